"""The run records of one model as curves to draw; what is missing or broken stays visible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.analysis.findings import ModelFindings
from harness.analysis.in_run_gates import ended_early
from harness.runs.record import RunRecord

Floats = NDArray[np.float64]

# Points of a drawn curve: more cannot be told apart at the width of the page.
_MAX_POINTS = 100


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Where a run's curve ends before its planned last step, or turns non-finite for good.

    Attributes:
        step: Last batch index with a finite value; 0 when there is none.
        value: The curve's value there; NaN when there is none.
        status: `diverged` or `crashed`.
    """

    step: float
    value: float
    status: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One quantity of one policy over the steps, over all its seeds.

    Attributes:
        steps: Centre of each bin, shape `(points,)`.
        middle: Mean over the seeds of the bin means; NaN (a gap) where any seed has no finite
            value: a mean over fewer seeds would jump by the luck of those that are gone.
        low: Smallest seed in each bin, of those with a finite value.
        high: Largest seed in each bin, likewise.
        stops: One for each seed that stopped early or became non-finite.
        num_runs: Seeds that went in.
    """

    steps: Floats
    middle: Floats
    low: Floats
    high: Floats
    stops: tuple[Stop, ...]
    num_runs: int


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All records of one model, by policy in grid order with the reference first."""

    findings: ModelFindings
    runs: dict[str, tuple[RunRecord, ...]]

    @property
    def num_steps(self) -> int:
        """Planned steps; at least 1, so that axes have a width."""
        return max(1, self.findings.num_steps)

    @property
    def policies(self) -> tuple[str, ...]:
        """The reference, then candidates and controls in grid order."""
        return tuple(self.runs)

    @property
    def compared(self) -> tuple[str, ...]:
        """Every policy but the reference."""
        return tuple(p for p in self.runs if p != self.findings.reference_policy)


def gather(findings: ModelFindings, records: Sequence[RunRecord]) -> Evidence:
    """Sort records by policy and seed; records of policies outside the findings are left out."""
    names = [findings.reference_policy, *(v.policy for v in findings.verdicts)]
    runs = {
        name: tuple(sorted((r for r in records if r.policy == name), key=lambda r: r.seed))
        for name in dict.fromkeys(names)
    }
    return Evidence(findings=findings, runs=runs)


def bin_width(num_steps: int) -> int:
    """Return how many steps one drawn point averages."""
    return max(1, math.ceil(num_steps / _MAX_POINTS))


def binned(values: Floats, num_steps: int) -> Floats:
    """Return the mean of the finite values in each bin of `bin_width(num_steps)` steps.

    Args:
        values: Shape `(steps,)`; shorter than `num_steps` for a run that stopped.
        num_steps: Planned steps.

    Returns:
        Shape `(bins,)`; NaN for a bin without a finite value.
    """
    width = bin_width(num_steps)
    bins = math.ceil(num_steps / width)
    padded = np.full(bins * width, np.nan)
    kept = values[: bins * width]
    padded[: len(kept)] = kept
    table = padded.reshape(bins, width)
    finite = np.isfinite(table)
    counts = finite.sum(axis=1)
    sums = np.where(finite, table, 0.0).sum(axis=1)
    means: Floats = np.full(bins, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def bin_centres(num_steps: int) -> Floats:
    """Return the middle step of each bin, shape `(bins,)`."""
    width = bin_width(num_steps)
    bins = math.ceil(num_steps / width)
    centres: Floats = np.arange(bins, dtype=np.float64) * width + (width - 1) / 2
    return centres


def series_curve(evidence: Evidence, policy: str, name: str) -> Curve | None:
    """Return the curve of a per-step series; None when no run of the policy has it."""
    return _curve(evidence.runs[policy], evidence.num_steps, lambda record: _series(record, name))


def difference_curve(evidence: Evidence, policy: str) -> Curve | None:
    """Return candidate minus reference training loss, seed by seed; None without a pair."""
    reference = {r.seed: r for r in evidence.runs[evidence.findings.reference_policy]}
    paired = tuple(r for r in evidence.runs[policy] if r.seed in reference)

    def difference(record: RunRecord) -> Floats:
        ours, theirs = _series(record, "loss"), _series(reference[record.seed], "loss")
        length = min(len(ours), len(theirs))
        # A non-finite loss on either side leaves a gap; Inf - Inf would warn as well.
        pair_ok = np.isfinite(ours[:length]) & np.isfinite(theirs[:length])
        out = np.full(length, np.nan)
        np.subtract(ours[:length], theirs[:length], out=out, where=pair_ok)
        return out

    return _curve(paired, evidence.num_steps, difference)


def sampled_share_curve(
    evidence: Evidence, policy: str, *, counted: str, total: str
) -> Curve | None:
    """Return `sampled[counted] / sampled[total]` over the sampled steps, mean and range over seeds.

    Seeds whose sampled steps are not a prefix of the longest seed's are left out. None when no
    run has both counts.
    """
    runs = [r for r in evidence.runs[policy] if r.sampled.get(counted) and r.sampled.get(total)]
    if not runs:
        return None
    grid = max((r.sampled_steps for r in runs), key=len)
    rows = []
    for record in runs:
        length = min(len(record.sampled_steps), len(record.sampled[counted]))
        if record.sampled_steps[:length] != grid[:length]:
            continue
        row = np.full(len(grid), np.nan)
        top = np.asarray(record.sampled[counted][:length], float)
        bottom = np.asarray(record.sampled[total][:length], float)
        np.divide(top, bottom, out=row[:length], where=bottom > 0)
        rows.append(row)
    return _summarize(np.asarray(grid, float), np.stack(rows), ())


def exponent_shares(evidence: Evidence, policy: str, name: str) -> Floats | None:
    """Return the share of non-zero finite gradient elements per binary exponent, over all seeds.

    Returns:
        Shape `(254,)` for biased FP32 exponents 1 to 254; entry k is for magnitudes in
        `[2**(k-126), 2**(k-125))`. None without counts.
    """
    tables = [
        np.asarray(r.histograms[name], float)
        for r in evidence.runs[policy]
        if len(r.histograms.get(name, ())) == 256
    ]
    if not tables:
        return None
    counts = np.sum(tables, axis=0)[1:255]
    total = counts.sum()
    return counts / total if total > 0 else None


def typical(record: RunRecord, name: str) -> float | None:
    """Return the median of a series after its first tenth (warm-up); None if nothing is finite."""
    values = _series(record, name)
    values = values[len(values) // 10 :]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def trouble(evidence: Evidence) -> tuple[str, ...]:
    """Return one sentence for each run of the grid that is missing, crashed or diverged.

    A run that no look asked for is not missing.
    """
    sentences = []
    for policy, runs in evidence.runs.items():
        by_seed = {record.seed: record for record in runs}
        due = _due_seeds(evidence.findings, policy)
        for seed in evidence.findings.seeds:
            record = by_seed.get(seed)
            if record is None and seed not in due:
                continue
            if record is None:
                sentences.append(f"{policy} seed {seed}: there is no run")
            elif record.status != "completed":
                sentences.append(f"{policy} seed {seed}: {_ending(record)}")
    return tuple(sentences)


def _due_seeds(findings: ModelFindings, policy: str) -> tuple[int, ...]:
    """Return the seeds on which a run of the policy must exist for the verdicts there are."""
    if findings.plan is None or not findings.plan.adaptive:
        return findings.seeds
    looks = {v.policy: v.look for v in findings.verdicts if v.look is not None}
    if policy not in looks:
        # The reference and the controls go along as far as any candidate.
        return findings.seeds[: max((look.pairs for look in looks.values()), default=0)]
    look = looks[policy]
    return () if look.stop == "gate" else findings.seeds[: look.pairs]


def _series(record: RunRecord, name: str) -> Floats:
    return np.asarray(record.series.get(name, ()), np.float64)


def _ending(record: RunRecord) -> str:
    if record.crash is not None:
        return f"crashed: {record.crash.sentence}"
    early = ended_early(record)
    if early is not None:
        return f"ended itself after {early.step} of {early.num_steps} steps: {early.why}"
    losses = _series(record, "loss")
    bad = np.flatnonzero(~np.isfinite(losses))
    if not len(bad):
        return f"{record.status}: the loss is finite, but some weights are not"
    return f"{record.status}: the first non-finite loss is at step {bad[0]}"


def _curve(
    runs: Sequence[RunRecord], num_steps: int, values: Callable[[RunRecord], Floats]
) -> Curve | None:
    rows, stops = [], []
    centres = bin_centres(num_steps)
    for record in runs:
        raw = values(record)
        if not len(raw):
            continue
        row = binned(raw, num_steps)
        rows.append(row)
        if record.status != "completed":
            stops.append(_stop(centres, row, record.status))
    return _summarize(centres, np.stack(rows), tuple(stops)) if rows else None


def _stop(centres: Floats, row: Floats, status: str) -> Stop:
    finite = np.flatnonzero(np.isfinite(row))
    if not len(finite):
        return Stop(step=0.0, value=math.nan, status=status)
    return Stop(step=float(centres[finite[-1]]), value=float(row[finite[-1]]), status=status)


def _summarize(steps: Floats, rows: Floats, stops: tuple[Stop, ...]) -> Curve:
    finite = np.isfinite(rows)
    counts = finite.sum(axis=0)
    empty = counts == 0
    sums = np.where(finite, rows, 0.0).sum(axis=0)
    middle = np.where(counts == len(rows), sums / len(rows), np.nan)
    low = np.where(empty, np.nan, np.where(finite, rows, np.inf).min(axis=0))
    high = np.where(empty, np.nan, np.where(finite, rows, -np.inf).max(axis=0))
    return Curve(steps=steps, middle=middle, low=low, high=high, stops=stops, num_runs=len(rows))
