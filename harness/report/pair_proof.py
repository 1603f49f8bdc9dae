"""Is the pair a pair? Fingerprints of every policy against the reference's, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.wording import counted
from harness.report.evidence import Evidence
from harness.report.text import NOT_AVAILABLE
from harness.runs.record import RunRecord

COLUMNS = ("initial weights", "batches", "dropout masks", "held-out data")


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """One policy against the reference.

    Attributes:
        policy: Name.
        cells: One text for each of `COLUMNS`.
        equal: Whether nothing that could be compared differs.
    """

    policy: str
    cells: tuple[str, ...]
    equal: bool


@dataclass(frozen=True, kw_only=True)
class _Count:
    """How many things were compared, and how many were equal."""

    compared: int = 0
    equal: int = 0

    def plus(self, same: int, out_of: int) -> _Count:
        return _Count(compared=self.compared + out_of, equal=self.equal + same)


def pair_rows(evidence: Evidence) -> tuple[PairRow, ...]:
    """Return one row per policy but the reference; empty without reference runs."""
    reference = {r.seed: r for r in evidence.runs[evidence.findings.reference_policy]}
    if not reference:
        return ()
    return tuple(_row(policy, evidence.runs[policy], reference) for policy in evidence.compared)


def _row(policy: str, runs: Sequence[RunRecord], reference: dict[int, RunRecord]) -> PairRow:
    weights = batches = masks = held_out = _Count()
    drawn = False
    for record in runs:
        other = reference.get(record.seed)
        if other is None:
            continue
        ours, theirs = record.fingerprints, other.fingerprints
        # The masks of the step that crashed may be incomplete, and the weights unhashed.
        steps = (record.crash.step or 0) if record.crash is not None else None
        if ours.init_sha256 and theirs.init_sha256:
            weights = weights.plus(ours.init_sha256 == theirs.init_sha256, 1)
        batches = batches.plus(*_agreement(ours.batches[:steps], theirs.batches[:steps]))
        masks = masks.plus(*_agreement(ours.dropout[:steps], theirs.dropout[:steps]))
        drawn = drawn or any(theirs.dropout)
        if ours.held_out_sha256 and theirs.held_out_sha256:
            held_out = held_out.plus(ours.held_out_sha256 == theirs.held_out_sha256, 1)
    return PairRow(
        policy=policy,
        cells=(
            _text(weights, "seed"),
            _text(batches, "step"),
            _text(masks, "step") if drawn or masks.equal < masks.compared else "none drawn",
            _text(held_out, "seed"),
        ),
        equal=all(c.equal == c.compared for c in (weights, batches, masks, held_out)),
    )


def _agreement(ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, int]:
    pairs = list(zip(ours, theirs, strict=False))
    return sum(a == b for a, b in pairs), len(pairs)


def _text(count: _Count, noun: str) -> str:
    if not count.compared:
        return NOT_AVAILABLE
    if count.equal == count.compared:
        return f"equal in {counted(count.compared, noun)}"
    return f"DIFFER in {count.compared - count.equal} of {counted(count.compared, noun)}"
