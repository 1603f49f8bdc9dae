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


def level_of(verdict: Verdict, rule: DecisionRule) -> float:
    """Return the level that a verdict was given at: its look's, else the whole alpha."""
    return rule.alpha if verdict.look is None else verdict.look.alpha


def holm_not_met(p: float, level: float, rule: DecisionRule) -> Reason:
    """Return the reason HOLM_NOT_MET: a warning, or what decides where `familywise` is set."""
    message = f"Adjusted for the number of candidates (Holm), p = {p:.2g} is above {level:g}."
    return Reason(
        code="HOLM_NOT_MET",
        message=message,
        value=p,
        threshold=level,
        kind="test" if rule.familywise else "warning",
    )


def _with_holm(verdict: Verdict, p: float, rule: DecisionRule) -> Verdict:
    verdict = dataclasses.replace(verdict, p_accept_holm=p)
    level = level_of(verdict, rule)
    if not rule.familywise or verdict.outcome != "accept" or p <= level:
        return verdict
    outcome: Outcome = "inconclusive"
    reasons = (holm_not_met(p, level, rule), *verdict.reasons)
    return _held_back(dataclasses.replace(verdict, outcome=outcome, reasons=reasons))


def _held_back(verdict: Verdict) -> Verdict:
    """Say in its last look that a candidate passed alone and yet is undecided.

    Only a last look can come to this: before it an acceptance must hold against all candidates.
    """
    if verdict.look is None:
        return verdict
    passed = verdict.look.sentence.removesuffix(".").replace("Accepted", "Inside the margin", 1)
    look = dataclasses.replace(
        verdict.look,
        settled=False,
        stop="last_look",
        sentence=f"{passed}, but not among all candidates at once (Holm): undecided.",
    )
    return dataclasses.replace(verdict, look=look, looks=(*verdict.looks[:-1], look))
