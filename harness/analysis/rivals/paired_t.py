"""Student's paired t test of no difference over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis import statistics
from harness.analysis.rivals.base import Finding, Rival
from harness.analysis.rivals.curves import PairCurves


@dataclass(frozen=True, kw_only=True)
class PairedT(Rival):
    """Reject if a paired t test finds the candidate's tail loss worse at all, one-sided 5 %.

    `P( T(n-1) > mean d / (sd d / sqrt(n)) ) < alpha`, d the per-seed difference of the mean
    training losses over the last third. What is not significant is accepted, however little the
    seeds could show. A loss that is not finite: reject. Two pairs are needed.

    Source: Student, The probable error of a mean, Biometrika 6 (1908), 1-25; as in
    `scipy.stats.ttest_rel(candidate, reference, alternative="greater")`. With bitwise equal
    differences the p-value is 0 above zero, 1 otherwise.
    """

    name: str = "paired_t"
    sentence: str = "A paired t test over seeds finds the candidate worse at all, one-sided 5 %."
    compares: str = "one minus the p-value of no difference"
    min_pairs: int = 2
    alpha: float = 0.05

    def compare(self, curves: Sequence[PairCurves], twins: Sequence[PairCurves]) -> Finding:
        """Return the outcome, with 1 - p."""
        mean, sd = statistics.mean_sd([c.tail_difference for c in curves])
        assert sd is not None
        p = statistics.tail_probability(mean, sd / math.sqrt(len(curves)), len(curves) - 1)
        return significance(p, self.alpha)


def significance(p: float, alpha: float) -> Finding:
    """Return a rejection for `p < alpha`, with `1 - p` as its value: more is worse."""
    return Finding(outcome="reject" if p < alpha else "accept", value=1 - p, threshold=1 - alpha)
