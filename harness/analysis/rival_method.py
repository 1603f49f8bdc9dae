"""`decision.method=<rival>`: a rival's rule in place of the non-inferiority test.

The gates on the comparison stay: broken pairs, a reference that cannot judge, crashes, missing
runs. What a failed run is, is the rival's own affair, and neither margin nor probe has a say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.analysis.decision import TestResult
from harness.analysis.findings import Reason, caveat
from harness.analysis.methods import NON_INFERIORITY
from harness.analysis.pairing import Pair, make_pair
from harness.analysis.rivals import RIVALS, Rival
from harness.analysis.rivals.base import ULP_TWIN, in_words
from harness.analysis.rule import DecisionRule
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord

ULP = 2.0**-23
"""Relative spacing of FP32 numbers: the most that a one-ulp twin's weights are moved by."""


def rival_of(rule: DecisionRule) -> Rival | None:
    """Return the rival that decides, or None for the non-inferiority test."""
    return None if rule.method == NON_INFERIORITY else RIVALS[rule.method]


def rival_test(
    rival: Rival, pairs: Sequence[Pair], *, twins: Sequence[Pair], rule: DecisionRule
) -> TestResult:
    """Return what a rival says of one candidate, with the reason RIVAL_RULE and no p-values."""
    found = rival.find(pairs, twins=twins, rule=rule)
    reason = Reason(
        code="RIVAL_RULE",
        message=in_words(rival, found),
        value=found.value if math.isfinite(found.value) else None,
        threshold=found.threshold if math.isfinite(found.threshold) else None,
        kind="test",
    )
    return TestResult(outcome=found.outcome, reason=reason, p_accept=None, p_reject=None)


def rival_caveat(rule: DecisionRule) -> tuple[Reason, ...]:
    """Return METHOD_NOT_CALIBRATED, on the whole model, where a rival decides."""
    rival = rival_of(rule)
    if rival is None:
        return ()
    message = (
        f"decision.method={rival.name} decides here, not the rule that this report describes. It "
        f"rejects where: {rival.sentence[0].lower()}{rival.sentence[1:].rstrip('.')}. How often it "
        "errs: docs/calibration.md."
    )
    return (caveat("METHOD_NOT_CALIBRATED", message),)


def ulp_twins(
    candidates: Mapping[str, Mapping[int, RunRecord]],
    stable: Mapping[int, RunRecord],
    rule: DecisionRule,
) -> tuple[Pair, ...]:
    """Return the pairs of stable FP32 runs with FP32 from weights moved by one ulp, by seed.

    Args:
        candidates: Policy -> seed -> run, of the whole grid.
        stable: Seed -> FP32 run that can serve as a reference.
        rule: Nothing is looked for unless its method is a rival that needs such runs.
    """
    rival = rival_of(rule)
    if rival is None or ULP_TWIN not in rival.needs:
        return ()
    return tuple(
        make_pair(runs[seed], stable[seed])
        for runs in candidates.values()
        for seed in sorted(runs.keys() & stable.keys())
        if _is_ulp_twin(runs[seed])
    )


def _is_ulp_twin(record: RunRecord) -> bool:
    policy = PrecisionPolicy.from_mapping({**record.policy_content, "name": record.policy})
    return policy.is_control and policy.perturbation <= ULP
