"""What every rival rule is: a function of paired runs that says accept or reject.

Rivals read the training loss alone, as those who use them do: a missing held-out set changes
nothing. All of them agree on three things, settled here:

- a candidate whose loss is not finite, or that ended before its last step, is rejected, whatever
  the number of pairs (if FP32 is whole on the same seed);
- a reference that is not whole itself, a pair whose fingerprints differ, too few pairs, or twins
  that a rule needs and does not get: inconclusive;
- the order of the pairs is irrelevant.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.findings import Outcome
from harness.analysis.pairing import Pair
from harness.analysis.rivals.curves import PairCurves, curves_of
from harness.analysis.rule import DecisionRule
from harness.analysis.wording import counted, number, seeds_text

ULP_TWIN = "ulp_twin"
"""What a rule needs that is calibrated on FP32 runs from weights moved by one ulp."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule found.

    Attributes:
        outcome: `inconclusive` only where the rule could not be applied, or says so itself.
        value: The number that the rule compares, larger being worse; NaN where there is none.
        threshold: Values above it are rejected.
        why: What kept the rule from comparing, or made it reject without; None otherwise.
    """

    outcome: Outcome
    value: float = math.nan
    threshold: float = math.nan
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rival(ABC):
    """A rule that answers accept or reject for one candidate.

    Attributes:
        name: As in `decision.method`.
        sentence: When it rejects.
        compares: What `Finding.value` is, as a noun phrase.
        min_pairs: With fewer pairs it is inconclusive.
        needs: `ulp_twin` if it cannot judge without the twins.
    """

    name: str
    sentence: str
    compares: str
    min_pairs: int = 1
    needs: frozenset[str] = frozenset()

    def judge(self, pairs: Sequence[Pair], *, twins: Sequence[Pair], rule: DecisionRule) -> Outcome:
        """Return the outcome for one candidate.

        Args:
            pairs: The candidate's runs with FP32's.
            twins: FP32 from weights moved by one ulp, with FP32; may be empty.
            rule: For what all rules share: the tail, the head and the smoothing.
        """
        return self.find(pairs, twins=twins, rule=rule).outcome

    def find(self, pairs: Sequence[Pair], *, twins: Sequence[Pair], rule: DecisionRule) -> Finding:
        """Return the outcome with the number that it rests on."""
        pairs = sorted(pairs, key=lambda pair: pair.seed)
        curves = [curves_of(pair, rule) for pair in pairs]
        unusable = self._unusable(pairs, curves)
        if unusable is not None:
            return unusable
        around = [curves_of(pair, rule) for pair in sorted(twins, key=lambda pair: pair.seed)]
        around = [twin for twin in around if twin.is_whole]
        if ULP_TWIN in self.needs and not around:
            why = "it needs FP32 runs from weights moved by one ulp: add policy=fp32_ulp"
            return Finding(outcome="inconclusive", why=why)
        return self.compare(curves, around)

    @abstractmethod
    def compare(self, curves: Sequence[PairCurves], twins: Sequence[PairCurves]) -> Finding:
        """Return the outcome for at least `min_pairs` pairs of whole runs, in order of seeds."""

    def _unusable(self, pairs: Sequence[Pair], curves: Sequence[PairCurves]) -> Finding | None:
        broken = [pair.seed for pair in pairs if pair.fault is not None]
        if broken:
            why = f"the runs of {seeds_text(broken)} are not pairs"
            return Finding(outcome="inconclusive", why=why)
        failed = [p.seed for p, c in zip(pairs, curves, strict=True) if not c.reference_is_whole]
        if failed:
            why = f"FP32 is not finite to its last step in {seeds_text(failed)}"
            return Finding(outcome="inconclusive", why=why)
        failed = [p.seed for p, c in zip(pairs, curves, strict=True) if not c.candidate_is_whole]
        if failed:
            why = f"the loss is not finite to the last step in {seeds_text(failed)}"
            return Finding(outcome="reject", why=why)
        if len(pairs) < self.min_pairs:
            runs = f"{counted(len(pairs), 'pair')} of runs"
            why = f"{runs}; it needs {self.min_pairs}"
            return Finding(outcome="inconclusive", why=why)
        return None


def exceeds(value: float, threshold: float) -> Finding:
    """Return a rejection where `value` is not at most `threshold`; NaN is never accepted."""
    return Finding(
        outcome="accept" if value <= threshold else "reject", value=value, threshold=threshold
    )


def relative(difference: float, reference: float) -> float:
    """Return `difference / |reference|`; 0 for 0 / 0, else infinite where the reference is 0.

    The absolute value: with a negative loss a worse candidate still counts as worse.
    """
    if difference == 0:
        return 0.0
    return difference / abs(reference) if reference else math.copysign(math.inf, difference)


def in_words(rival: Rival, finding: Finding) -> str:
    """Return what a rule found, in one sentence."""
    if finding.why is not None:
        return f"The rule {rival.name} says {finding.outcome}: {finding.why}."
    side = "above" if finding.value > finding.threshold else "not above"
    return (
        f"The rule {rival.name} says {finding.outcome}: {rival.compares} is "
        f"{number(finding.value)}, {side} {number(finding.threshold)}."
    )
