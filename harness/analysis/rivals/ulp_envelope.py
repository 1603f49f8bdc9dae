"""An envelope around FP32, drawn by FP32 runs whose weights were moved by one ulp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.rivals.base import ULP_TWIN, Finding, Rival, exceeds
from harness.analysis.rivals.curves import PairCurves


@dataclass(frozen=True, kw_only=True)
class UlpEnvelope(Rival):
    """Reject if the mean tail difference is more than 3 times the largest one of one-ulp twins.

    `|mean_s d_s| > factor * max_u |d_u|`, d the difference of the mean training losses over the
    last third, u the twins: FP32 from initial weights multiplied by `1 + 2^-23 * U(-1, 1)`, on
    whatever seeds there are. Two-sided, as an envelope is. The mean over seeds favours the rule:
    a maximum over the candidate's seeds would reject harmless spread more often. A loss that is
    not finite: reject. One pair and one twin are enough; without a whole twin: inconclusive.

    Source: the idea of ensemble consistency tests, in which perturbations of round-off size set
    the tolerance: Baker et al., A new ensemble-based consistency test for the Community Earth
    System Model, Geoscientific Model Development 8 (2015), 2829; for trainings TTrace (2025),
    arXiv 2506.09280. The factor 3 is practice.
    """

    name: str = "ulp_envelope"
    sentence: str = (
        "The mean loss over the last third is off by more than three times the largest "
        "difference of FP32 runs moved by one ulp."
    )
    compares: str = "the size of the mean difference over the last third"
    needs: frozenset[str] = frozenset({ULP_TWIN})
    factor: float = 3.0

    def compare(self, curves: Sequence[PairCurves], twins: Sequence[PairCurves]) -> Finding:
        """Return the outcome, with the size of the mean difference."""
        mean = sum(c.tail_difference for c in curves) / len(curves)
        envelope = max(abs(twin.tail_difference) for twin in twins)
        return exceeds(abs(mean), self.factor * envelope)
