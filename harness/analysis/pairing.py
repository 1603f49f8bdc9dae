"""Whether two runs are a pair: the same initial weights, batches, dropout masks, held-out set.

Only fingerprints decide this. A different first loss is what low precision does and at most a
warning, found in `cautions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.run_memory import once_per_run
from harness.runs.record import RunRecord


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One seed under the reference and under a candidate, with what keeps it from being a pair."""

    seed: int
    reference: RunRecord
    candidate: RunRecord
    fault: str | None


def make_pair(candidate: RunRecord, reference: RunRecord) -> Pair:
    """Return the pair of two runs of one seed, checked.

    Raises:
        ValueError: The seeds differ.
    """
    if candidate.seed != reference.seed:
        raise ValueError(f"seeds {candidate.seed} and {reference.seed} cannot be paired")
    return Pair(
        seed=candidate.seed,
        reference=reference,
        candidate=candidate,
        fault=pairing_fault(candidate, reference),
    )


@once_per_run
def pairing_fault(candidate: RunRecord, reference: RunRecord) -> str | None:
    """Return what differed first between two runs, or None for a pair.

    A run that ended early is compared over the steps it has. A crashed run is compared over the
    steps it completed (the masks of the last one may be incomplete), and the weights only if it
    got as far as hashing them.
    """
    ours, theirs = candidate.fingerprints, reference.fingerprints
    reached_weights = ours.init_sha256 or candidate.status != "crashed"
    if reached_weights and ours.init_sha256 != theirs.init_sha256:
        return "the initial weights differ"
    steps = candidate.crash.step or 0 if candidate.crash is not None else None
    batch = _first_difference(ours.batches[:steps], theirs.batches[:steps])
    mask = _first_difference(ours.dropout[:steps], theirs.dropout[:steps])
    if batch is not None and (mask is None or batch <= mask):
        return f"batch {batch} differs"
    if mask is not None:
        return f"the dropout masks of step {mask} differ"
    if candidate.status != "crashed" and ours.held_out_sha256 != theirs.held_out_sha256:
        return "the held-out sets differ"
    return None


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    for step, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return step
    return None
