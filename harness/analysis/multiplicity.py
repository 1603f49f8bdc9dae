"""Holm's adjustment over the candidates of a model: a warning, or binding where asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from harness.analysis import statistics
from harness.analysis.findings import Outcome, Reason, Verdict
from harness.analysis.rule import DecisionRule


def adjust_for_multiplicity(verdicts: Sequence[Verdict], rule: DecisionRule) -> tuple[Verdict, ...]:
    """Add Holm-adjusted p over the candidates; with `familywise` they bind acceptance.

    The family is every candidate of the grid: one that crashed or diverged has no p, which counts
    as 1, so that a failure does not make it easier for the others.
    """
    family = [k for k, v in enumerate(verdicts) if not v.is_control]
    values = [verdicts[k].p_accept for k in family]
    adjusted = statistics.holm([1.0 if p is None else p for p in values])
    result = list(verdicts)
    for k, value, p in zip(family, values, adjusted, strict=True):
        if value is not None:
            result[k] = _with_holm(verdicts[k], p, rule)
    return tuple(result)


def holm_not_met(p: float, rule: DecisionRule) -> Reason:
    """Return the reason HOLM_NOT_MET: a warning, or what decides where `familywise` is set."""
    message = f"Adjusted for the number of candidates (Holm), p = {p:.2g} is above {rule.alpha:g}."
    return Reason(
        code="HOLM_NOT_MET",
        message=message,
        value=p,
        threshold=rule.alpha,
        kind="test" if rule.familywise else "warning",
    )


def _with_holm(verdict: Verdict, p: float, rule: DecisionRule) -> Verdict:
    verdict = dataclasses.replace(verdict, p_accept_holm=p)
    if not rule.familywise or verdict.outcome != "accept" or p <= rule.alpha:
        return verdict
    outcome: Outcome = "inconclusive"
    reasons = (holm_not_met(p, rule), *verdict.reasons)
    return dataclasses.replace(verdict, outcome=outcome, reasons=reasons)
