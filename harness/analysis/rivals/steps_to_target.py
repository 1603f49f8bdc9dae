"""Steps to a quality target, tested as MLPerf Training tests a submission."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis import statistics
from harness.analysis.rivals.base import Finding, Rival, exceeds
from harness.analysis.rivals.curves import PairCurves, RunCurve


@dataclass(frozen=True, kw_only=True)
class StepsToTarget(Rival):
    """Reject if the candidate needs significantly more steps to a target loss than FP32.

    The target is the loss at which FP32, on average over these seeds, has `share` of its progress
    (mean of the first losses minus mean over the last third) behind it; a run reaches it at the
    first step whose exponential moving average (decay 0.9) is not above it. Each side's figure is
    the olympic mean: its best and its worst run are left out. With `sd` the deviation of FP32's
    steps (divisor n, all runs), reject if

        olympic mean_c > olympic mean_f + allowed_deviation(n, n) * sd

    or if more than one run of the candidate never reaches the target. A run that does not reach it
    counts as all steps. More than one such FP32 run, or FP32 learning nothing: inconclusive. A
    loss that is not finite: reject. Three pairs are needed, the fewest that MLPerf admits.

    Source: mlcommons/logging, `rcp_checker.py`: olympic means, one-sided pooled t test at 5 % with
    the reference's deviation for both sides. That checker asks whether a submission is *faster*
    than the reference; here the same test looks the other way, a target is derived instead of
    given, and FP32 has as many runs as the candidate instead of twice as many.
    """

    name: str = "steps_to_target"
    sentence: str = (
        "The candidate takes significantly more steps to a target loss, as MLPerf tests it."
    )
    compares: str = "the olympic mean of the steps to the target loss"
    min_pairs: int = 3
    alpha: float = 0.05
    share: float = 0.95
    max_unconverged: int = 1

    def compare(self, curves: Sequence[PairCurves], twins: Sequence[PairCurves]) -> Finding:
        """Return the outcome, with the candidate's olympic mean of steps."""
        references = [c.reference for c in curves]
        head = sum(r.head for r in references) / len(references)
        tail = sum(r.tail for r in references) / len(references)
        if not head > tail:
            return Finding(outcome="inconclusive", why="FP32's loss does not fall")
        target = head - self.share * (head - tail)
        theirs, missed = _steps(references, target)
        if missed > self.max_unconverged:
            why = f"{missed} runs of FP32 do not reach the target loss"
            return Finding(outcome="inconclusive", why=why)
        ours, missed = _steps([c.candidate for c in curves], target)
        if missed > self.max_unconverged:
            return Finding(outcome="reject", why=f"{missed} runs do not reach the target loss")
        allowed = allowed_deviation(len(ours), len(theirs), alpha=self.alpha)
        slowest = olympic_mean(theirs) + allowed * float(np.std(theirs))
        return exceeds(olympic_mean(ours), slowest)


def _steps(curves: Sequence[RunCurve], target: float) -> tuple[list[int], int]:
    """Return each run's steps to the target, and how many runs never reach it."""
    reached = [curve.steps_to(target) for curve in curves]
    steps = [c.num_steps if s is None else s for c, s in zip(curves, reached, strict=True)]
    return steps, reached.count(None)


def olympic_mean(values: Sequence[float]) -> float:
    """Return the mean without the smallest and the largest value; at least three are needed."""
    return (sum(values) - min(values) - max(values)) / (len(values) - 2)


def allowed_deviation(num_runs: int, num_references: int, *, alpha: float = 0.05) -> float:
    """Return how far the olympic means may lie apart, in deviations of the reference.

    `t(n + m - 2, 1 - alpha) * sqrt(1/n + 1/m)` with n and m the runs left after the best and the
    worst are dropped. MLPerf's own numbers of runs give 0.73 (10 against 20), 1.24 (5 against 10)
    and 2.63 (3 against 6). Three against three leave one each and no degree of freedom: there all
    runs are counted, as the deviation is one of all runs.

    Raises:
        ValueError: Fewer than three runs on a side.
    """
    if min(num_runs, num_references) < 3:
        raise ValueError(f"an olympic mean of {min(num_runs, num_references)} runs does not exist")
    n, m = num_runs - 2, num_references - 2
    if n + m < 3:
        n, m = num_runs, num_references
    return statistics.t_quantile(1 - alpha, n + m - 2) * math.sqrt(1 / n + 1 / m)
