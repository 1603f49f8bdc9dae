"""Relative difference of the last logged loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.rivals.base import Finding, Rival, exceeds, relative
from harness.analysis.rivals.curves import PairCurves


@dataclass(frozen=True, kw_only=True)
class LastStep(Rival):
    """Reject if the candidate's last loss is more than 1 % above FP32's, on average over seeds.

    `mean_s( (loss_c,s[T-1] - loss_f,s[T-1]) / |loss_f,s[T-1]| ) > tolerance`. A loss that is not
    finite at any step: reject. One pair is enough.

    Source: practice; the two final numbers of a table side by side, as Kalamkar et al. (2019),
    arXiv 1905.12322, and Micikevicius et al. (2018), arXiv 1710.03740, show them for single runs
    (of validation metrics, without a tolerance of their own).
    """

    name: str = "last_step"
    sentence: str = "The loss of the last step is more than 1 % above FP32's."
    compares: str = "the relative difference of the last loss"
    tolerance: float = 0.01

    def compare(self, curves: Sequence[PairCurves], twins: Sequence[PairCurves]) -> Finding:
        """Return the outcome, with the mean relative difference."""
        shares = [relative(c.candidate.last - c.reference.last, c.reference.last) for c in curves]
        return exceeds(sum(shares) / len(shares), self.tolerance)
