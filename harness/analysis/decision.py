"""The decision rule: the non-inferiority test over seeds (its constants: `DecisionRule`).

What a run must not do (diverge, be unpaired, ...) is in `gates`; this module knows only paired
differences and margins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness.analysis import statistics
from harness.analysis.findings import Endpoint, Estimate, Outcome, Reason
from harness.analysis.rule import DecisionRule
from harness.analysis.wording import ENDPOINT_NAMES, counted, in_margins, in_words

__all__ = ["DecisionRule", "TestResult", "estimate", "non_inferiority", "worst_endpoint"]


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """What the non-inferiority test says about one candidate.

    Attributes:
        outcome: `inconclusive` also when there are too few pairs or a difference is NaN.
        reason: The one that decided.
        p_accept: Largest p over the endpoints (intersection-union test); None below 2 pairs.
        p_reject: Smallest p over the endpoints times their number, at most 1 (Bonferroni).
    """

    __test__ = False  # not a test class, whatever pytest makes of its name

    outcome: Outcome
    reason: Reason
    p_accept: float | None
    p_reject: float | None


def estimate(
    differences: tuple[float, ...],
    *,
    unit: str,
    margin: float,
    margin_term: str,
    progress: float,
    reference_loss: float,
    num_endpoints: int,
    rule: DecisionRule,
    formula_margin: float | None = None,
) -> Estimate:
    """Return the paired estimate of one endpoint.

    `ci_high = m + t(n-1, 1-alpha) * s/sqrt(n)` is the end that acceptance tests and
    `ci_low = m - t(n-1, 1-alpha/E) * s/sqrt(n)` the end that rejection tests, E being
    `num_endpoints`. With `rule.always_valid` the quantiles are those of the confidence sequence
    instead of t. A NaN difference makes the mean NaN and leaves spread, interval and p None.
    """
    pairs = len(differences)
    mean, sd = statistics.mean_sd(differences)
    alpha_reject = rule.alpha / num_endpoints
    estimated = sd is not None and math.isfinite(mean) and math.isfinite(sd)
    low = high = p_accept = p_reject = None
    if estimated:
        assert sd is not None
        error = sd / math.sqrt(pairs)
        low = mean - _reach(alpha_reject, pairs, error, rule)
        high = mean + _reach(rule.alpha, pairs, error, rule)
        p_accept = _p_value(margin - mean, error, pairs, rule)
        p_reject = _p_value(mean - margin, error, pairs, rule)
    return Estimate(
        unit=unit,
        mean_difference=mean,
        sd=sd if estimated else None,
        ci_low=low,
        ci_high=high,
        confidence=1 - rule.alpha - alpha_reject if estimated else None,
        alpha_accept=rule.alpha,
        alpha_reject=alpha_reject,
        num_pairs=pairs,
        margin=margin,
        margin_term=margin_term,
        progress=progress,
        reference_loss=reference_loss,
        differences=differences,
        p_accept=p_accept,
        p_reject=p_reject,
        formula_margin=formula_margin,
    )


def _reach(alpha: float, pairs: int, error: float, rule: DecisionRule) -> float:
    """Return how far a one-sided interval reaches from the mean; 0 where nothing spreads."""
    if error == 0:
        return 0.0
    quantile = statistics.one_sided_quantile(alpha, pairs, always_valid=rule.always_valid)
    return quantile * error


def _p_value(distance: float, error: float, pairs: int, rule: DecisionRule) -> float:
    if rule.always_valid:
        return statistics.always_valid_p(distance, error, pairs)
    return statistics.tail_probability(distance, error, pairs - 1)


def non_inferiority(estimates: Mapping[Endpoint, Estimate], *, rule: DecisionRule) -> TestResult:
    """Test one candidate: accept if every endpoint is inside its margin, reject if any is outside.

    Accept when `ci_high < margin` on all endpoints (intersection-union: no correction needed),
    reject when `ci_low > margin` on any (each at alpha/E), with at least `min_pairs` pairs.
    Source of the design: non-inferiority trials, e.g. ICH E9 section 3.3.2.
    """
    pairs = min((e.num_pairs for e in estimates.values()), default=0)
    p_accept, p_reject = _combined_p(estimates)
    if pairs < rule.min_pairs:
        reason = _too_few(pairs, rule)
        return TestResult(
            outcome="inconclusive", reason=reason, p_accept=p_accept, p_reject=p_reject
        )
    outcome, reason = _outcome(estimates, pairs)
    return TestResult(outcome=outcome, reason=reason, p_accept=p_accept, p_reject=p_reject)


def worst_endpoint(estimates: Mapping[Endpoint, Estimate]) -> Endpoint:
    """Return the endpoint whose mean is largest in margins; NaN counts as worst."""

    def key(endpoint: Endpoint) -> float:
        relative = in_margins(estimates[endpoint].mean_difference, estimates[endpoint].margin)
        return math.inf if math.isnan(relative) else relative

    return max(estimates, key=key)


def _combined_p(estimates: Mapping[Endpoint, Estimate]) -> tuple[float | None, float | None]:
    accept = [e.p_accept for e in estimates.values() if e.p_accept is not None]
    reject = [e.p_reject for e in estimates.values() if e.p_reject is not None]
    if not estimates or len(accept) < len(estimates):
        return None, None
    return max(accept), min(1.0, len(reject) * min(reject))


def _outcome(estimates: Mapping[Endpoint, Estimate], pairs: int) -> tuple[Outcome, Reason]:
    for endpoint, e in estimates.items():
        if e.ci_low is not None and e.ci_low > e.margin:
            return "reject", _inferior(endpoint, e)
    highest = {k: in_margins(e.ci_high, e.margin) for k, e in estimates.items()}
    worst = max(highest, key=lambda k: -math.inf if math.isnan(highest[k]) else highest[k])
    e = estimates[worst]
    if all(x.ci_high is not None and x.ci_high < x.margin for x in estimates.values()):
        what = "Training and held-out loss stay"
        if len(estimates) == 1:
            what = f"The {ENDPOINT_NAMES[worst]} stays"
        message = (
            f"{what} inside the margin: at worst {in_words(e.ci_high, e.margin)} against FP32 "
            f"({pairs} seeds)."
        )
        return "accept", _reason("NONINFERIOR", message, e.ci_high, e.margin)
    if any(x.ci_high is None for x in estimates.values()):
        return "inconclusive", _reason(
            "CI_SPANS_MARGIN", "A difference is not a number.", None, None
        )
    message = (
        f"In {ENDPOINT_NAMES[worst]} the difference may be anything from "
        f"{in_words(e.ci_low, e.margin, unit=False)} to {in_words(e.ci_high, e.margin)}: the "
        f"{pairs} seeds do not tell which side of the margin it is on."
    )
    return "inconclusive", _reason("CI_SPANS_MARGIN", message, e.ci_high, e.margin)


def _inferior(endpoint: Endpoint, e: Estimate) -> Reason:
    code = {"train": "INFERIOR_TRAIN", "held_out": "INFERIOR_HELDOUT"}[endpoint]
    message = (
        f"In {ENDPOINT_NAMES[endpoint]} the candidate is worse than FP32 by "
        f"{in_words(e.mean_difference, e.margin, signed=False)}, at least "
        f"{in_words(e.ci_low, e.margin, signed=False)} "
        f"({e.num_pairs} seeds)."
    )
    return _reason(code, message, e.ci_low, e.margin)


def _too_few(pairs: int, rule: DecisionRule) -> Reason:
    message = f"{counted(pairs, 'pair')} of runs; the test needs {rule.min_pairs}."
    return _reason("TOO_FEW_SEEDS", message, float(pairs), float(rule.min_pairs))


def _reason(code: str, message: str, value: float | None, threshold: float | None) -> Reason:
    return Reason(code=code, message=message, value=value, threshold=threshold, kind="test")
