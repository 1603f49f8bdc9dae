"""What a profile of training steps says about a policy: shares of time, and one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.precision.policy import PrecisionPolicy
from harness.probes.profile import LOW_PRECISION, OPTIMIZER, OpTime
from harness.runs.timing.record import Profile, TimeRatio

_LISTED_SHARE = 0.8
_PRODUCTS = ("matmul", "convolution", "recurrent")
_ELEMENTWISE = ("elementwise", OPTIMIZER)
# Below, what a format did not touch is told as the reason; above, only where the time is now.
_SMALL_GAIN = 1.5
# From 5 % slower to 5 % faster nothing is gained.
_NO_LOSS = 0.95


def make_profile(
    ops: Sequence[OpTime],
    *,
    steps: int,
    policy: PrecisionPolicy,
    ratio: TimeRatio | None,
    is_reference: bool = False,
) -> Profile:
    """Return shares of the time inside ops, and the sentence on the policy's gain.

    Args:
        ops: What the profiler saw, longest first.
        steps: Training steps that it saw.
        policy: Whose steps; under `tf32` FP32 products count as low precision.
        ratio: Measured step time over the reference's; None when there is none.
        is_reference: Whether the policy is what others are compared with.

    Returns:
        A profile; with no time in any op all shares are 0 and the sentence says so.
    """
    total = sum(op.seconds for op in ops)

    def share(chosen: Sequence[OpTime]) -> float:
        return sum(op.seconds for op in chosen) / total if total else 0.0

    low = [op for op in ops if _is_low(op, policy) and not op.is_cast]
    casts = [op for op in ops if op.is_cast]
    elementwise = [
        op for op in ops if op.format == "fp32" and op.family in _ELEMENTWISE and not op.is_cast
    ]
    by_family: dict[str, list[OpTime]] = {}
    for op in ops:
        by_family.setdefault(op.family, []).append(op)
    families = {family: share(members) for family, members in by_family.items()}
    shares = {"low": share(low), "cast": share(casts), "elementwise": share(elementwise)}
    return Profile(
        steps=steps,
        families=dict(sorted(families.items(), key=lambda item: -item[1])),
        ops=_longest(ops, total),
        low_precision_share=shares["low"],
        cast_share=shares["cast"],
        fp32_elementwise_share=shares["elementwise"],
        sentence=_sentence(policy, shares, ratio, total=total, is_reference=is_reference),
    )


def _is_low(op: OpTime, policy: PrecisionPolicy) -> bool:
    if policy.compute_format == "tf32" and op.family in _PRODUCTS and op.format == "fp32":
        return True
    return op.format in LOW_PRECISION


def _longest(ops: Sequence[OpTime], total: float) -> tuple[tuple[str, float], ...]:
    """Return the ops that together make 80 % of the time, formats of one op added up."""
    by_name: dict[str, float] = {}
    for op in ops:
        by_name[op.name] = by_name.get(op.name, 0.0) + op.seconds
    listed: list[tuple[str, float]] = []
    so_far = 0.0
    for name, seconds in sorted(by_name.items(), key=lambda item: -item[1]):
        if so_far >= _LISTED_SHARE * total:
            break
        so_far += seconds
        listed.append((name, seconds / total))
    return tuple(listed)


def _sentence(
    policy: PrecisionPolicy,
    shares: Mapping[str, float],
    ratio: TimeRatio | None,
    *,
    total: float,
    is_reference: bool,
) -> str:
    name = policy.name
    if total == 0:
        return f"{name}: the profiler saw no time in any op"
    rest = max(0.0, 1.0 - sum(shares.values()))
    parts = {
        "low-precision kernels": shares["low"],
        "FP32 element-wise ops": shares["elementwise"],
        "casts between formats": shares["cast"],
        "FP32 products and other FP32 ops": rest,
    }
    parts = dict(sorted(parts.items(), key=lambda item: -item[1]))
    told = _list([f"{_percent(part)} in {what}" for what, part in parts.items() if part >= 0.005])
    if is_reference:
        return f"{name}, the reference: {told}"
    if policy.is_control:
        return f"{name}, FP32 as well: {told}"
    if ratio is None:
        return f"{name}: gain not measured; {told}"
    gain = 1.0 / ratio.value
    untouched = {what: part for what, part in parts.items() if what != "low-precision kernels"}
    largest = next(iter(untouched))
    if gain < _NO_LOSS:
        return f"{name} is slower, at {gain:.2g}x the speed: {told}"
    verb = f"gains {gain:.2g}x" if gain >= _NO_LOSS + 0.1 else f"gains nothing ({gain:.2f}x)"
    if gain < _SMALL_GAIN and untouched[largest] > shares["low"]:
        where = f"{_percent(untouched[largest])} of the time is in {largest}"
        no_more = " and no more" if gain >= _NO_LOSS + 0.1 else ""
        return f"{name} {verb}{no_more} because {where}"
    return f"{name} {verb}: {told}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _list(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
