"""A band around FP32's loss curve that the candidate's curve must not leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.rivals.base import Finding, Rival, exceeds
from harness.analysis.rivals.curves import PairCurves


@dataclass(frozen=True, kw_only=True)
class PointwiseBand(Rival):
    """Reject if at any step after the warm-up, in any seed, the curves are more than 2 % apart.

    `max_s max_{t >= warmup * T} |S_c,s[t] / S_f,s[t] - 1| > tolerance`, S the exponential moving
    average of the training loss (decay `decision.ema_decay`, 0.9). Smoothed, because the loss of a
    single batch would leave the band in almost every run; two-sided, because a band is; the first
    tenth of the steps is warm-up, where a curve that is early by one step is off by more than 2 %.
    A loss that is not finite: reject. One pair is enough.

    Source: practice. Overlaid smoothed curves with the largest relative gap named are how reports
    of low-precision pre-training argue, e.g. DeepSeek-V3 (2024), arXiv 2412.19437, section 3.3,
    with 0.25 % for FP8 against BF16 on large models; 2 % suits runs of a few hundred steps.
    """

    name: str = "pointwise_band"
    sentence: str = "The smoothed loss leaves a band of 2 % around FP32's after the warm-up."
    compares: str = "the largest relative gap between the smoothed losses"
    tolerance: float = 0.02
    warmup: float = 0.1

    def compare(self, curves: Sequence[PairCurves], twins: Sequence[PairCurves]) -> Finding:
        """Return the outcome, with the largest relative gap."""
        return exceeds(max(self._largest(c) for c in curves), self.tolerance)

    def _largest(self, curves: PairCurves) -> float:
        first = math.ceil(self.warmup * curves.reference.num_steps)
        return float(curves.relative_deviations[first:].max(initial=0.0))
