"""What would settle a verdict that the last look left undecided, as sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping

from harness.analysis.findings import Endpoint, Estimate
from harness.analysis.forecast import lean_of
from harness.analysis.rule import DecisionRule
from harness.analysis.wording import ENDPOINT_NAMES, number


def accepting_margins(estimates: Mapping[Endpoint, Estimate]) -> dict[Endpoint, float]:
    """Return per endpoint the margin above which these runs would be accepted.

    The upper end of the interval, in the endpoint's unit: acceptance needs it to lie below the
    margin. Endpoints without an interval, or whose interval lies below zero, are left out.
    """
    return {
        endpoint: e.ci_high
        for endpoint, e in estimates.items()
        if e.ci_high is not None and math.isfinite(e.ci_high) and e.ci_high > 0
    }


def settle_sentences(
    estimates: Mapping[Endpoint, Estimate],
    *,
    total: int | None,
    command: str | None,
    rule: DecisionRule,
    probe_fails: bool = False,
) -> tuple[str, ...]:
    """Return what would settle an undecided test, a sentence each.

    Args:
        estimates: Of the last look.
        total: Pairs in all that should settle it at the present mean and spread; None if no
            number up to `rule.forecast_limit` should.
        command: The command that adds them; None where no command is known.
        rule: Constants.
        probe_fails: Whether the same-point probe forbids an acceptance: no margin answers it.
    """
    if total is None:
        seeds = (
            f"Seeds: at the present mean and spread no number up to {rule.forecast_limit} should "
            "settle it."
        )
    else:
        how = f": {command}" if command else "."
        # Intervals that hold at all numbers of seeds together may be looked at once more for free.
        again = "" if rule.always_valid else f", judged at level {number(rule.alpha)} once more"
        seeds = f"Seeds: {total} in all should settle it at the present mean and spread{again}{how}"
    found = [seeds, _held_out(estimates)]
    if lean_of(estimates) == "acceptable":
        found.append(
            "A longer run: the loss is then averaged over more steps, and FP32 learns more, which "
            "widens the margin."
        )
    # With familywise, what these runs would be accepted with rests on the others too.
    if not (rule.familywise or probe_fails):
        found.append(_own_margin(estimates))
    return tuple(sentence for sentence in found if sentence is not None)


def _held_out(estimates: Mapping[Endpoint, Estimate]) -> str | None:
    """Say how much larger the held-out set would have to be, where it alone is undecided.

    Its spread over seeds has two parts that the stored means do not tell apart: the runs end in
    different places, and few items measure each of them badly. Only the second shrinks with more
    items, as one over their number in energy, so the figure is a lower bound.
    """
    held, train = estimates.get("held_out"), estimates.get("train")
    if held is None or held.ci_high is None or not held.mean_difference < held.margin:
        return None
    if train is None or train.ci_high is None or not train.ci_high < train.margin:
        return None
    narrower = (held.ci_high - held.mean_difference) / (held.margin - held.mean_difference)
    if not (math.isfinite(narrower) and narrower > 1):
        return None
    return (
        f"A larger held-out set: only the {ENDPOINT_NAMES['held_out']} is undecided, and its "
        f"interval would have to be {narrower:.1f} times narrower. That takes at least "
        f"{narrower**2:.1f} times as many items, and more as far as the runs themselves differ, "
        "which these records cannot tell."
    )


def _own_margin(estimates: Mapping[Endpoint, Estimate]) -> str | None:
    """Name the smallest margin of one's own that these runs would be accepted with."""
    needed = accepting_margins(estimates)
    if not needed or any(e.ci_high is None for e in estimates.values()):
        return None
    units = {e.unit for e in estimates.values()}
    shares = [
        100 * value / estimates[endpoint].progress
        for endpoint, value in needed.items()
        if estimates[endpoint].progress > 0
    ]
    percent = _rounded_up(max(shares)) if len(shares) == len(needed) else None
    if len(units) == 1:
        size = _rounded_up(max(needed.values()))
        share = "" if percent is None else f" ({percent} % of what FP32 learned)"
        setting = f"{size} {units.pop()}{share} would accept these runs: decision.margin={size}"
    elif percent is not None:
        share = f"{percent} %"
        setting = f"{share} of what FP32 learned would accept these runs: decision.margin='{share}'"
    else:
        return None
    return (
        f"An explicit margin: {setting}. Set it if that much harm does not matter to you, not "
        "because it fits."
    )


def _rounded_up(value: float) -> str:
    """Return three significant digits of a positive number, never below it.

    Strictly above where the three digits are exact: acceptance needs the interval inside.
    """
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return number((math.floor(value / step) + 1) * step)
