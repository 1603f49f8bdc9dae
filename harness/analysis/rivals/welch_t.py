"""Welch's t test of two sets of runs, as if their seeds had nothing to do with each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis import statistics
from harness.analysis.rivals.base import Finding, Rival
from harness.analysis.rivals.curves import PairCurves
from harness.analysis.rivals.paired_t import significance


@dataclass(frozen=True, kw_only=True)
class WelchT(Rival):
    """Reject if Welch's test finds the candidate's tail losses worse than FP32's, one-sided 5 %.

    `t = (mean_c - mean_f) / sqrt(v_c + v_f)` with `v = var / n`, and
    `df = (v_c + v_f)^2 / (v_c^2 / (n-1) + v_f^2 / (n-1))` degrees of freedom. What is not
    significant is accepted. A loss that is not finite: reject. Two pairs are needed.

    Source: Welch, The generalization of Student's problem when several different population
    variances are involved, Biometrika 34 (1947), 28-35; as in
    `scipy.stats.ttest_ind(candidate, reference, equal_var=False, alternative="greater")`.
    Without any spread the p-value is 0 for a worse mean, 1 otherwise.
    """

    name: str = "welch_t"
    sentence: str = (
        "Welch's unpaired t test over seeds finds the candidate worse at all, one-sided 5 %."
    )
    compares: str = "one minus the p-value of no difference"
    min_pairs: int = 2
    alpha: float = 0.05

    def compare(self, curves: Sequence[PairCurves], twins: Sequence[PairCurves]) -> Finding:
        """Return the outcome, with 1 - p."""
        ours, sd = statistics.mean_sd([c.candidate.tail for c in curves])
        theirs, reference_sd = statistics.mean_sd([c.reference.tail for c in curves])
        assert sd is not None
        assert reference_sd is not None
        n = len(curves)
        v, w = sd**2 / n, reference_sd**2 / n
        df = (v + w) ** 2 / (v**2 + w**2) * (n - 1) if v**2 + w**2 > 0 else float(n - 1)
        p = statistics.tail_probability(ours - theirs, math.sqrt(v + w), df)
        return significance(p, self.alpha)
