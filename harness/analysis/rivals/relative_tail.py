"""Relative difference of the tail loss: a common house rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.rivals.base import Finding, Rival, exceeds, relative
from harness.analysis.rivals.curves import PairCurves


@dataclass(frozen=True, kw_only=True)
class RelativeTail(Rival):
    """Reject if the candidate's tail loss is more than 1 % above FP32's, on average over seeds.

    `mean_s( (L_c,s - L_f,s) / |L_f,s| ) > tolerance`, L the mean training loss over the last third
    of the steps. A loss that is not finite: reject. One pair is enough.

    Source: practice; no publication sets it up or says how often it errs. The regression tests of
    training frameworks compare logged losses by relative tolerances of this size.
    """

    name: str = "relative_tail"
    sentence: str = "The mean loss over the last third is more than 1 % above FP32's."
    compares: str = "the relative difference of the mean loss over the last third"
    tolerance: float = 0.01

    def compare(self, curves: Sequence[PairCurves], twins: Sequence[PairCurves]) -> Finding:
        """Return the outcome, with the mean relative difference."""
        shares = [relative(c.tail_difference, c.reference.tail) for c in curves]
        return exceeds(sum(shares) / len(shares), self.tolerance)
