"""What the rivals read off a pair of runs, computed once per pair however often it is judged.

A study that draws seeds judges the same pairs some hundred thousand times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harness.analysis import statistics
from harness.analysis.endpoints import tail_start
from harness.analysis.pairing import Pair
from harness.analysis.rule import DecisionRule
from harness.analysis.run_memory import once_per_run
from harness.runs.record import RunRecord

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunCurve:
    """The training loss of one run.

    Attributes:
        losses: One per step that ran, FP64.
        num_steps: Planned steps.
        tail_start: First step of the tail.
        head_steps: Steps whose mean is the loss before training.
        decay: Of the exponential moving average.
    """

    losses: FloatArray
    num_steps: int
    tail_start: int
    head_steps: int
    decay: float

    @cached_property
    def is_whole(self) -> bool:
        """Whether every planned step ran and left a finite loss; a run of no steps is not."""
        complete = 0 < self.num_steps <= len(self.losses)
        return complete and bool(np.isfinite(self.losses).all())

    @cached_property
    def head(self) -> float:
        """Mean loss before training."""
        return float(self.losses[: self.head_steps].mean())

    @cached_property
    def tail(self) -> float:
        """Mean loss over the tail."""
        return float(self.losses[self.tail_start :].mean())

    @cached_property
    def last(self) -> float:
        """Loss of the last step."""
        return float(self.losses[-1])

    @cached_property
    def smoothed(self) -> FloatArray:
        """Exponential moving average of the loss, one per step."""
        return statistics.exponential_average(self.losses.tolist(), decay=self.decay)

    @cached_property
    def _lowest_so_far(self) -> FloatArray:
        return np.minimum.accumulate(self.smoothed)

    def steps_to(self, target: float) -> int | None:
        """Return after how many steps the smoothed loss is first at or below a target, or None."""
        # Ascending once negated, so that the first step not above the target is a bisection.
        step = int(np.searchsorted(-self._lowest_so_far, -target, side="left"))
        return step + 1 if step < len(self.losses) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class PairCurves:
    """A candidate's training loss beside FP32's, same seed."""

    candidate: RunCurve
    reference: RunCurve

    @property
    def candidate_is_whole(self) -> bool:
        """Whether the candidate has a finite loss at each of FP32's steps."""
        same_length = len(self.candidate.losses) == len(self.reference.losses)
        return self.candidate.is_whole and same_length

    @property
    def reference_is_whole(self) -> bool:
        """Whether FP32 has a finite loss at each of its steps."""
        return self.reference.is_whole

    @cached_property
    def is_whole(self) -> bool:
        """Whether both have."""
        return self.reference_is_whole and self.candidate_is_whole

    @property
    def tail_difference(self) -> float:
        """Candidate's tail loss minus FP32's."""
        return self.candidate.tail - self.reference.tail

    @cached_property
    def tail_differences(self) -> FloatArray:
        """Candidate's loss minus FP32's at each step of the tail."""
        start = self.reference.tail_start
        return self.candidate.losses[start:] - self.reference.losses[start:]

    @cached_property
    def relative_deviations(self) -> FloatArray:
        """`|candidate / reference - 1|` of the smoothed losses, one per step.

        0 where both are 0, infinite where the reference alone is.
        """
        ours, theirs = self.candidate.smoothed, self.reference.smoothed
        gap = np.abs(ours - theirs)
        size = np.where(gap == 0, 1.0, np.abs(theirs))
        with np.errstate(divide="ignore", over="ignore"):
            return gap / size


def curves_of(pair: Pair, rule: DecisionRule) -> PairCurves:
    """Return the curves of a pair; asked again with the same two records it costs a look-up."""
    return _beside(pair.candidate, pair.reference, rule)


@once_per_run
def _beside(candidate: RunRecord, reference: RunRecord, rule: DecisionRule) -> PairCurves:
    return PairCurves(candidate=curve_of(candidate, rule), reference=curve_of(reference, rule))


@once_per_run
def curve_of(record: RunRecord, rule: DecisionRule) -> RunCurve:
    """Return the curve of one run."""
    return RunCurve(
        losses=np.asarray(record.series.get("loss", ()), dtype=np.float64),
        num_steps=record.num_steps,
        tail_start=tail_start(record.num_steps, rule),
        head_steps=max(rule.head_min_steps, math.ceil(rule.head_fraction * record.num_steps)),
        decay=rule.ema_decay,
    )
