"""The rules that are judged side by side, each as a function of one candidate's runs.

Ours are the analyzer's own functions, in the order in which `analysis.verdicts.judge` calls them;
what that adds besides (warnings, forecasts, sentences) decides nothing and is left out, as a study
asks some million times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.analysis.decision import estimate, non_inferiority
from harness.analysis.explanation import with_probe
from harness.analysis.findings import Endpoint, Estimate, Outcome
from harness.analysis.gates import Comparison, apply_gates
from harness.analysis.pairing import Pair
from harness.analysis.probe_findings import ProbeFindings
from harness.analysis.rivals import RIVALS, Rival
from harness.analysis.rule import DecisionRule
from harness.analysis.verdicts import Reference

OURS = "ours"
LOSS_ONLY = "ours_without_probe"


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """All that a rule may look at.

    Attributes:
        comparison: The candidate's runs beside FP32's; estimates at the level of `rule`.
        reference: The FP32 side, of the same seeds.
        probe: The candidate's same-point probe; None without a measurement.
        twins: FP32 from weights moved by one ulp beside FP32, same seeds; may be empty.
        rule: Constants, alpha being that of the look.
    """

    comparison: Comparison
    reference: Reference
    probe: ProbeFindings | None
    twins: tuple[Pair, ...]
    rule: DecisionRule

    @cached_property
    def loss_outcome(self) -> Outcome:
        """What gates and test say: asked by our rule with the probe and without it."""
        hits = apply_gates(
            self.comparison,
            unstable=self.reference.unstable_reason,
            not_learning=self.reference.not_learning_reason,
            rule=self.rule,
        )
        if hits:
            return hits[0].outcome
        return non_inferiority(self.comparison.estimates, rule=self.rule).outcome


Judge = Callable[[Evidence], tuple[Outcome, bool]]
"""Returns the outcome, and whether no further seed can change it."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One rule.

    Attributes:
        name: Identifier.
        title: In tables.
        judge: What it says.
        min_pairs: With fewer it is not asked.
        sequential: Whether it is also asked at the looks of a sequential plan.
        is_rival: Whether it is somebody else's.
    """

    name: str
    title: str
    judge: Judge
    min_pairs: int = 1
    sequential: bool = False
    is_rival: bool = False


def loss_outcome(evidence: Evidence) -> tuple[Outcome, bool]:
    """Return what gates and the non-inferiority test say."""
    outcome = evidence.loss_outcome
    return outcome, outcome != "inconclusive"


def our_outcome(evidence: Evidence) -> tuple[Outcome, bool]:
    """Return what the rule says: the probe may turn an acceptance into an undecided verdict.

    That settles it as well: more seeds of loss do not answer the probe.
    """
    outcome, settled = loss_outcome(evidence)
    if outcome == "accept":
        outcome, _ = with_probe(outcome, (), evidence.probe, evidence.rule)
    return outcome, settled


def on_one_endpoint(endpoint: Endpoint) -> Judge:
    """Return gates and test on one endpoint alone, as if the other had not been measured."""

    def judge(evidence: Evidence) -> tuple[Outcome, bool]:
        comparison = evidence.comparison
        found = comparison.estimates.get(endpoint)
        estimates: dict[Endpoint, Estimate] = {}
        if found is not None:
            estimates[endpoint] = at_level(
                found, found.differences, num_endpoints=1, rule=evidence.rule
            )
        alone = dataclasses.replace(comparison, estimates=estimates)
        return loss_outcome(dataclasses.replace(evidence, comparison=alone))

    return judge


def at_level(
    found: Estimate, differences: tuple[float, ...], *, num_endpoints: int, rule: DecisionRule
) -> Estimate:
    """Return the estimate of other differences against the same margin."""
    return estimate(
        differences,
        unit=found.unit,
        margin=found.margin,
        margin_term=found.margin_term,
        progress=found.progress,
        reference_loss=found.reference_loss,
        num_endpoints=num_endpoints,
        rule=rule,
    )


def _rival(rival: Rival) -> Contender:
    def judge(evidence: Evidence) -> tuple[Outcome, bool]:
        pairs = evidence.comparison.pairs
        return rival.judge(pairs, twins=evidence.twins, rule=evidence.rule), True

    title = RIVAL_TITLES.get(rival.name, rival.name.replace("_", " "))
    return Contender(
        name=rival.name, title=title, judge=judge, min_pairs=rival.min_pairs, is_rival=True
    )


RIVAL_TITLES: Mapping[str, str] = {
    "relative_tail": "relative 1 % of tail loss",
    "pointwise_band": "pointwise 2 % band",
    "ulp_envelope": "one-ulp envelope x 3",
    "paired_t": "paired t-test of no difference",
    "welch_t": "Welch t-test, unpaired",
    "block_bootstrap": "block bootstrap over steps",
    "steps_to_target": "steps to target, as MLPerf",
    "last_step": "last-step difference",
}


def contenders(rivals: Sequence[Rival] | None = None) -> tuple[Contender, ...]:
    """Return every rule that is judged, ours first.

    Args:
        rivals: Other people's; all that there are by default.
    """
    theirs = tuple(RIVALS.values()) if rivals is None else rivals
    return (
        Contender(name=OURS, title="this harness", judge=our_outcome, sequential=True),
        Contender(
            name=LOSS_ONLY,
            title="this harness without the probe",
            judge=loss_outcome,
            sequential=True,
        ),
        Contender(
            name="train_only",
            title="non-inferiority, training loss only",
            judge=on_one_endpoint("train"),
        ),
        Contender(
            name="held_out_only",
            title="non-inferiority, held-out loss only",
            judge=on_one_endpoint("held_out"),
        ),
        *(_rival(rival) for rival in theirs),
    )
