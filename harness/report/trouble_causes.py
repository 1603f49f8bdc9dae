"""Where trouble began, run by run, in the sentences that the triage left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.report.evidence import Evidence
from harness.report.stored_probes import mapping, table_rows

_CAUSES = {
    "data": "the data",
    "learning_rate": "the learning rate",
    "loss_scale": "the loss scale",
    "layer": "one layer",
    "silent": "a silent fault: nothing is NaN",
    "unknown": "not found",
}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What the triage found in one or more runs of a policy.

    Attributes:
        runs: Policy and seeds, e.g. `fp16 (seeds 0, 1; numbers of seed 0)`.
        cause: In which of the places a practitioner asks about, in words.
        sentence: What happened, where and when.
        findings: Further sentences, in order.
    """

    runs: str
    cause: str
    sentence: str
    findings: tuple[str, ...]


def causes(evidence: Evidence) -> tuple[Cause, ...]:
    """Return what the triage found; runs of a policy with trouble in the same place together."""
    found: dict[tuple[str, ...], list[tuple[int, Mapping[str, Any]]]] = {}
    for policy, runs in evidence.runs.items():
        for record in runs:
            triage = mapping(record.probes.get("triage"))
            if triage.get("sentence"):
                found.setdefault((policy, *_place(triage)), []).append((record.seed, triage))
    return tuple(_cause(key[0], runs) for key, runs in found.items())


def _place(triage: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what two runs share whose trouble is the same; numbers and steps may differ."""
    if not triage.get("module") and not triage.get("op"):
        return (str(triage["sentence"]),)
    return tuple(str(triage.get(key)) for key in ("cause", "module", "op", "direction", "kind"))


def _cause(policy: str, runs: list[tuple[int, Mapping[str, Any]]]) -> Cause:
    seeds = [seed for seed, _ in runs]
    triage = runs[0][1]
    sentence = str(triage["sentence"])
    noun = "seed" if len(seeds) == 1 else "seeds"
    of_one = len({str(found["sentence"]) for _, found in runs}) > 1
    numbers = f"; numbers of seed {seeds[0]}" if of_one else ""
    further = [str(f["sentence"]) for f in table_rows(triage.get("findings")) if f.get("sentence")]
    return Cause(
        runs=f"{policy} ({noun} {', '.join(map(str, seeds))}{numbers})",
        cause=_CAUSES.get(str(triage.get("cause")), "not found"),
        sentence=sentence[:1].upper() + sentence[1:],
        findings=tuple(s for s in dict.fromkeys(further) if s != sentence),
    )
