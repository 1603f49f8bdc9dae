"""What a rejected candidate points to, and whether keeping parts in FP32 gained anything.

A fallback is never recommended for being narrower: only if it was accepted, or if the evidence
names it and the grid has not already refuted it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.analysis import statistics
from harness.analysis.decision import worst_endpoint
from harness.analysis.findings import Endpoint, Verdict
from harness.analysis.wording import ENDPOINT_NAMES, listing

_CRASHES = frozenset({"CRASHED", "NOT_EXPRESSIBLE"})
_OVERFLOWS = frozenset({"NONFINITE", "LOSS_SCALE_COLLAPSE"})
_STALLS = frozenset({"WEIGHTS_NOT_MOVING", "LOST_UPDATES"})
_UNDERFLOWS = frozenset({"ZERO_GRADIENTS", "UNDERFLOW_OBSERVED", "WEIGHTS_NOT_MOVING"})
# Of the warnings, what says why, the most specific first.
_TELLING = (
    "NONFINITE_BUFFERS",
    "ZERO_GRADIENTS",
    "WEIGHTS_NOT_MOVING",
    "LOST_UPDATES",
    "UNDERFLOW_OBSERVED",
    "STEP0_LOSS_DIFFERS",
    "GRAD_NORM_RATIO",
)
_FP32_PARTS = ("fp32_ops", "fp32_modules", "fp32_selectors")


@dataclass(frozen=True, kw_only=True)
class _Pointer:
    """A remedy: what to do, and the policies that do it (None: it is not a policy).

    `only_if_tried`: a guess, worth naming only if the grid has tried it.
    """

    text: str
    does_it: Callable[[Verdict], bool] | None = None
    only_if_tried: bool = False


def rejection_reason(verdict: Verdict, candidates: Sequence[Verdict]) -> str:
    """Return one sentence on why a candidate is rejected and what its evidence points to."""
    text = f"{verdict.policy} is rejected: {verdict.main_reason.message}"
    pointers: list[str] = []
    named: set[str] = set()
    for pointer in _pointers(verdict):
        said, policy = _against_the_grid(pointer, verdict, candidates)
        if said is not None and policy not in named:
            pointers.append(said)
            named |= {policy} if policy is not None else set()
    messages = {reason.code: reason.message for reason in verdict.reasons}
    telling = next((messages[code] for code in _TELLING if code in messages), None)
    if telling is not None and telling != verdict.main_reason.message:
        text += f" {telling}"
    return f"{text} It points to {listing(pointers, last='or')}." if pointers else text


def fallback_reasons(candidates: Sequence[Verdict], *, chosen: Verdict | None) -> list[str]:
    """Return what keeping more parts in FP32 gained, for every policy of the grid that does so.

    Compared with the same policy without those parts, paired by seed, where the latter was not
    accepted: nothing, something but not enough, or (for the chosen one) no more than the noise.
    """
    reasons = []
    for fallback in candidates:
        for plain in candidates:
            if plain.outcome == "accept" or not _keeps_more_in_fp32(fallback, plain):
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


def _keeps_more_in_fp32(fallback: Verdict, plain: Verdict) -> bool:
    ours, theirs = fallback.policy_content, plain.policy_content
    rest = set(ours) - set(_FP32_PARTS)
    if fallback is plain or any(ours[key] != theirs[key] for key in rest):
        return False
    return all(set(ours[part]) >= set(theirs[part]) for part in _FP32_PARTS) and any(
        set(ours[part]) > set(theirs[part]) for part in _FP32_PARTS
    )


def _pointers(verdict: Verdict) -> list[_Pointer]:
    codes = {reason.code for reason in verdict.reasons}
    content = verdict.policy_content
    fmt = str(content["compute_format"])
    scaled = content["loss_scale"]["kind"] != "none"
    if codes & _CRASHES:
        return [_keep_module(fmt)] if "CRASHED" in codes else [_BF16, _SAME_FORMAT_UNSCALED]
    if content["clip_before_unscale"]:
        return [_Pointer(text="clipping after unscaling")]
    if content["param_format"] != "fp32" and (codes & _STALLS or not codes & _OVERFLOWS):
        return [_fp32_weights(fmt)]
    found = [_keep_parts(verdict)]
    if fmt == "fp16" and codes & _OVERFLOWS:
        found = [_BF16, _keep_module(fmt)]
    elif fmt == "fp16" and not scaled and codes & _UNDERFLOWS:
        found = [_FP16_SCALED, _BF16]
    elif content["low_precision_ops"]:
        found = [_autocast(fmt), _keep_parts(verdict)]
    elif "STEP0_LOSS_DIFFERS" in codes:
        found = [_keep_module(fmt)]
    return found


def _against_the_grid(
    pointer: _Pointer, rejected: Verdict, candidates: Sequence[Verdict]
) -> tuple[str | None, str | None]:
    """Return the remedy with what the grid says about it, and the policy of the grid it names.

    The remedy is None if every policy of the grid that follows it is rejected as well.
    """
    if pointer.does_it is None:
        return pointer.text, None
    tried = [v for v in candidates if v is not rejected and pointer.does_it(v)]
    if not tried:
        return (None if pointer.only_if_tried else pointer.text), None
    for outcome, word in (("accept", "accepted"), ("inconclusive", "undecided")):
        for verdict in tried:
            if verdict.outcome == outcome:
                return f"{pointer.text} ({verdict.policy}, {word} here)", verdict.policy
    return None, None


def _runs_in(fmt: str, *, scaled: bool | None = None) -> Callable[[Verdict], bool]:
    def does_it(verdict: Verdict) -> bool:
        content = verdict.policy_content
        has_scaler = content["loss_scale"]["kind"] != "none"
        return (
            content["compute_format"] == fmt
            and content["param_format"] == "fp32"
            and not content["low_precision_ops"]
            and (scaled is None or scaled == has_scaler)
        )

    return does_it


def _fp32_weights(fmt: str) -> _Pointer:
    return _Pointer(text="FP32 weights under the same arithmetic", does_it=_runs_in(fmt))


def _autocast(fmt: str) -> _Pointer:
    return _Pointer(text=f"autocast's own FP32 list for {fmt.upper()}", does_it=_runs_in(fmt))


def _keep_parts(plain: Verdict) -> _Pointer:
    return _Pointer(
        text="keeping more of the model in FP32",
        does_it=lambda verdict: _keeps_more_in_fp32(verdict, plain),
        only_if_tried=True,
    )


def _keep_module(fmt: str) -> _Pointer:
    def does_it(verdict: Verdict) -> bool:
        content = verdict.policy_content
        return content["compute_format"] == fmt and any(content[part] for part in _FP32_PARTS)

    text = "keeping the failing module in FP32 (policy.fp32_modules)"
    return _Pointer(text=text, does_it=does_it)


_BF16 = _Pointer(text="BF16, which has FP32's range", does_it=_runs_in("bf16"))
_FP16_SCALED = _Pointer(text="loss scaling", does_it=_runs_in("fp16", scaled=True))
_SAME_FORMAT_UNSCALED = _Pointer(
    text="the same format without a loss scaler", does_it=_runs_in("fp16", scaled=False)
)
