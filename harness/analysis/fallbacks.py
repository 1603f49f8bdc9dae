"""What a rejected candidate points to, and whether keeping parts in FP32 gained anything.

A fallback is never recommended for being narrower: only if it was accepted, or if the evidence
names it and the grid has not already refuted it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.analysis import statistics
from harness.analysis.decision import worst_endpoint
from harness.analysis.findings import Endpoint, Verdict
from harness.analysis.remedies import Remedy, keeps_more_in_fp32, remedies
from harness.analysis.wording import ENDPOINT_NAMES, listing

# Of the warnings, what says why, the most specific first.
_TELLING = (
    "TRIAGE",
    "NONFINITE_INSIDE",
    "INTEGERS_ROUNDED",
    "MODULE_ERROR",
    "NONFINITE_BUFFERS",
    "ZERO_GRADIENTS",
    "ZERO_OUTPUTS",
    "DEAD_GRADIENTS",
    "LOST_UPDATES",
    "WEIGHTS_NOT_MOVING",
    "UNDERFLOW_OBSERVED",
    "STEP0_LOSS_DIFFERS",
    "UPDATE_RATIO",
    "GRAD_NORM_RATIO",
)


def rejection_reason(
    verdict: Verdict, candidates: Sequence[Verdict], *, flushed_limit: float
) -> str:
    """Return one sentence on why a candidate is rejected and what its evidence points to."""
    text = f"{verdict.policy} is rejected: {verdict.main_reason.message}"
    messages = {reason.code: reason.message for reason in verdict.reasons}
    telling = next((messages[code] for code in _TELLING if code in messages), None)
    if telling is not None and telling != verdict.main_reason.message:
        text += f" {telling}"
    return text + _points_to(verdict, candidates, flushed_limit)


def probe_reason(verdict: Verdict, candidates: Sequence[Verdict], *, flushed_limit: float) -> str:
    """Return one sentence on a candidate that passed on the loss and not on its arithmetic."""
    return (
        f"{verdict.policy} is undecided: its loss passes, its arithmetic does not. "
        f"{verdict.main_reason.message} More seeds of loss do not answer that."
        f"{_points_to(verdict, candidates, flushed_limit)}"
    )


def failed_by_probe(verdict: Verdict) -> bool:
    """Return whether the probe is what keeps a verdict undecided."""
    return verdict.outcome == "inconclusive" and verdict.main_reason.code.startswith("PROBE_")


def _points_to(verdict: Verdict, candidates: Sequence[Verdict], flushed_limit: float) -> str:
    pointers: list[str] = []
    named: set[str] = set()
    for remedy in remedies(verdict, flushed_limit=flushed_limit):
        said, policy = _against_the_grid(remedy, verdict, candidates)
        if said is not None and policy not in named:
            pointers.append(said)
            named |= {policy} if policy is not None else set()
    return f" It points to {listing(pointers, last='or')}." if pointers else ""


def fallback_reasons(candidates: Sequence[Verdict], *, chosen: Verdict | None) -> list[str]:
    """Return what keeping more parts in FP32 gained, for every policy of the grid that does so.

    Compared with the same policy without those parts, paired by seed, where the latter was not
    accepted: nothing, something but not enough, or (for the chosen one) no more than the noise.
    """
    reasons = []
    for fallback in candidates:
        for plain in candidates:
            if plain.outcome == "accept" or not keeps_more_in_fp32(fallback, plain):
                continue
            said = _gain_sentence(fallback, plain, is_chosen=fallback is chosen)
            if said is not None:
                reasons.append(said)
    return reasons


def _gain_sentence(fallback: Verdict, plain: Verdict, *, is_chosen: bool) -> str | None:
    if fallback.outcome == "accept" and (plain.outcome == "reject" or not is_chosen):
        return None
    gain = _gain(fallback, plain)
    if gain is None:
        return None
    endpoint, mean, low = gain
    if not low > 0:
        end = (
            f"; {plain.policy} itself is undecided, and more seeds may show that it is enough"
            if is_chosen
            else ""
        )
        return (
            f"{fallback.policy} gains nothing beyond the noise over {plain.policy} in "
            f"{ENDPOINT_NAMES[endpoint]}{end}."
        )
    if is_chosen:
        return None
    share = mean / plain.estimates[endpoint].mean_difference
    return (
        f"{fallback.policy} removes {100 * share:.0f} % of the harm of {plain.policy} in "
        f"{ENDPOINT_NAMES[endpoint]}, which is not enough for an acceptance."
    )


def _gain(fallback: Verdict, plain: Verdict) -> tuple[Endpoint, float, float] | None:
    """Return endpoint, mean improvement and its one-sided 95 % lower bound over the seeds."""
    shared = [seed for seed in plain.seeds_used if seed in fallback.seeds_used]
    if len(shared) < 2 or not plain.estimates or not fallback.estimates:
        return None
    endpoint = worst_endpoint(plain.estimates)
    if endpoint not in fallback.estimates:
        return None
    ours, theirs = (
        dict(zip(v.seeds_used, v.estimates[endpoint].differences, strict=True))
        for v in (fallback, plain)
    )
    mean, sd = statistics.mean_sd([theirs[seed] - ours[seed] for seed in shared])
    if sd is None or not math.isfinite(mean):
        return None
    width = statistics.t_quantile(0.95, len(shared) - 1) * sd / math.sqrt(len(shared))
    return endpoint, mean, mean - width


def _against_the_grid(
    remedy: Remedy, rejected: Verdict, candidates: Sequence[Verdict]
) -> tuple[str | None, str | None]:
    """Return the remedy with what the grid says about it, and the policy of the grid it names.

    The remedy is None if every policy of the grid that follows it is rejected as well, or works
    only because it keeps more in FP32 than a rejected one.
    """
    if remedy.does_it is None:
        return remedy.text, None
    tried = [v for v in candidates if v is not rejected and remedy.does_it(v)]
    if not tried:
        return (None if remedy.only_if_tried else remedy.text), None
    refuted = [v for v in tried if v.outcome == "reject" and remedy.by_format]
    tried = [v for v in tried if not any(keeps_more_in_fp32(v, plain) for plain in refuted)]
    for outcome, word in (("accept", "accepted"), ("inconclusive", "undecided")):
        for verdict in tried:
            if verdict.outcome == outcome:
                return f"{remedy.text} ({verdict.policy}, {word} here)", verdict.policy
    return None, None
