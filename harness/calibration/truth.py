"""What every arm of the bank truly is, from all of its seeds: the yardstick of the error rates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from harness.analysis import statistics
from harness.analysis.findings import Endpoint
from harness.analysis.gates import Comparison, apply_gates
from harness.analysis.rule import DecisionRule
from harness.analysis.setting import Setting
from harness.analysis.verdicts import Reference, compare
from harness.calibration.bank import StoredArm
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.same_point.record import SamePointRecord

Label = Literal["harm", "benign", "grey", "intermittent", "void"]

# A run that ends like this has failed, whatever its loss difference.
HARD_FAILURES = frozenset(
    {"CRASHED", "NOT_EXPRESSIBLE", "NONFINITE", "LOSS_SCALE_COLLAPSE", "DIVERGED"}
)
# An arm whose runs fail in at least this share of the seeds is harmful; in fewer, intermittent:
# n <= 8 seeds cannot be asked to meet a rare failure.
HARD_FAILURE_SHARE = 0.25
# Evidence that a mean lies on one side: two standard errors, about 97.5 % one-sided.
_EVIDENCE = 2.0
_HARM_MARGINS = 1.0
_BENIGN_MARGINS = 0.5


class StoredRuns(Protocol):
    """What is read of a bank: see `calibration.bank`."""

    @property
    def folder(self) -> Path:
        """Where the bank lies."""

    def tasks(self) -> tuple[str, ...]:
        """Return the names of the tasks that have runs."""

    def stored_arms(self, task: str) -> Mapping[str, StoredArm]:
        """Return what was planted, by the arm's name; the reference first."""

    def digest(self, task: str) -> str:
        """Return a hash of all that is stored of a task."""

    def records(self, task: str) -> Mapping[str, Mapping[int, RunRecord]]:
        """Return arm -> seed -> record."""

    def same_point(self, task: str) -> Mapping[str, SamePointRecord]:
        """Return arm -> its same-point probe, where there is one."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """An arm's mean loss difference over all seeds, in margins of all seeds, with its error.

    Attributes:
        mean: In margins; NaN if a run has no tail.
        se: Standard error over seeds, in margins; NaN likewise.
        sd: Standard deviation over seeds, in margins; NaN likewise.
    """

    mean: float
    se: float
    sd: float


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What an arm is.

    Attributes:
        label: `harm` if mean - 2 SE of the seeds that do not fail exceeds one margin on an
            endpoint, or at least a quarter of the seeds fail hard; `intermittent` if fewer fail
            and the others show no harm; `benign` if mean + 2 SE lies below half a margin on every
            endpoint; `void` if the runs are not pairs or FP32 cannot judge; else `grey`.
        size: Largest mean over the endpoints in margins; infinite if a run has no finite tail.
        effects: By endpoint.
        hard_failures: Share of the seeds that fail hard.
        num_seeds: Pairs that all of this rests on.
    """

    label: Label
    size: float
    effects: Mapping[Endpoint, Effect]
    hard_failures: float
    num_seeds: int


def truth_of(runs: Mapping[int, RunRecord], reference: Reference, rule: DecisionRule) -> Truth:
    """Return what an arm is, from all of its seeds.

    Args:
        runs: Seed -> run of the arm.
        reference: The FP32 runs of all seeds, measured.
        rule: Constants; margins are the rule's own, from all seeds.
    """
    policy = policy_of(runs)
    setting = Setting(seeds=tuple(runs), command="", rule=rule)
    comparison = compare(policy, runs, reference, setting)
    failed = [_fails_hard(comparison, seed, rule) for seed in (p.seed for p in comparison.pairs)]
    share = sum(failed) / len(failed) if failed else math.nan
    effects = {endpoint: _effect(e.differences, e.margin) for endpoint, e in
               comparison.estimates.items()}  # fmt: skip
    alive = {
        endpoint: _effect(
            [d for d, fails in zip(e.differences, failed, strict=False) if not fails], e.margin
        )
        for endpoint, e in comparison.estimates.items()
    }
    means = [effect.mean for effect in effects.values()]
    size = math.inf if any(not math.isfinite(m) for m in means) else max(means, default=math.nan)
    void = (
        reference.unstable_reason is not None
        or reference.not_learning_reason is not None
        or any(pair.fault is not None for pair in comparison.pairs)
        or not effects
    )
    return Truth(
        label="void" if void else _label(alive, share),
        size=size,
        effects=effects,
        hard_failures=share,
        num_seeds=len(comparison.pairs),
    )


def policy_of(runs: Mapping[int, RunRecord]) -> PrecisionPolicy:
    """Return the policy that an arm's records name."""
    record = next(iter(runs.values()))
    return PrecisionPolicy.from_mapping(
        {**record.policy_content, "name": record.policy, "description": ""}
    )


def complete_seeds(records: Mapping[str, Mapping[int, RunRecord]], reference: str) -> list[int]:
    """Return the seeds that the reference and every arm with at least half as many runs have.

    A bank is trained seed by seed, so an interrupted one lacks its last seeds; an arm that lacks
    most of them (its training fails to start) must not take everyone else's seeds away.
    """
    seeds = set(records[reference])
    for runs in records.values():
        if 2 * len(runs) >= len(records[reference]):
            seeds &= set(runs)
    return sorted(seeds)


def _label(effects: Mapping[Endpoint, Effect], hard_failures: float) -> Label:
    if hard_failures >= HARD_FAILURE_SHARE:
        return "harm"
    # Before the rare failures: what also harms in the mean of all seeds does not hide among them.
    if any(e.mean - _EVIDENCE * e.se > _HARM_MARGINS for e in effects.values()):
        return "harm"
    if hard_failures > 0:
        return "intermittent"
    # NaN is on neither side: without a hard failure it means that an evaluation is missing.
    if all(e.mean + _EVIDENCE * e.se < _BENIGN_MARGINS for e in effects.values()):
        return "benign"
    return "grey"


def _effect(differences: Sequence[float], margin: float) -> Effect:
    mean, sd = statistics.mean_sd(differences)
    if sd is None or not margin > 0:
        return Effect(mean=math.nan, se=math.nan, sd=math.nan)
    sd = sd / margin
    return Effect(mean=mean / margin, se=sd / math.sqrt(len(differences)), sd=sd)


def _fails_hard(comparison: Comparison, seed: int, rule: DecisionRule) -> bool:
    """Return whether one pair alone makes a gate of failure fire."""
    pairs = tuple(pair for pair in comparison.pairs if pair.seed == seed)
    alone = dataclasses.replace(
        comparison, pairs=pairs, runs=tuple(p.candidate for p in pairs), missing=(), estimates={}
    )
    hits = apply_gates(alone, unstable=None, not_learning=None, rule=rule)
    return any(hit.reason.code in HARD_FAILURES for hit in hits)
