"""Which module the evidence points to: where harm starts outranks where it only shows.

Each kind of evidence is a multiple of the threshold from which it would be worth a warning. What
lies in a module itself (an op that overflows, its own rounding error) says where harm starts. What
its gradients show may come from anywhere before it, so it names a module only where no such start
is known, and only if that module stands out from the others.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.analysis.probe_findings import MAX_SUSPICION, ModuleFinding
from harness.analysis.rule import DecisionRule
from harness.analysis.wording import module_text, number, percent
from harness.numerics.formats import get_format
from harness.precision.module_names import ROOT
from harness.precision.policy import PrecisionPolicy

_Evidence = tuple[float, str]
_NONE: _Evidence = (0.0, "")
# Where trouble shows first then says nothing of who is to blame.
_NOT_THE_MODULE = ("learning_rate", "loss_scale")


def rank(
    modules: Sequence[ModuleFinding],
    *,
    policy: PrecisionPolicy,
    triage: Mapping[str, Any] | None,
    rule: DecisionRule,
) -> tuple[ModuleFinding, ...]:
    """Return the findings with suspicion and evidence, the most suspicious first.

    A module that contains another one with evidence of its own is not suspected for its output's
    error: the error comes from inside. Equal suspicion keeps the model's order.
    """
    innermost = _innermost(modules)
    starts = {m.module: _start(m, policy, triage, innermost, rule) for m in modules}
    known = {name for name, (size, _) in starts.items() if size >= 1}
    shows = {m.module: _shows(m, policy, rule) for m in modules}
    ranked = []
    for module in modules:
        size, text = starts[module.module]
        own = size >= 1 and not any(contains(module.module, other) for other in known)
        if not own:
            size, text = shows[module.module]
            if known:
                size, text = min(size, 0.99), ""
        size = min(size, MAX_SUSPICION)
        ranked.append(
            dataclasses.replace(
                module, suspicion=size, evidence=text if size >= 1 else "", starts_here=own
            )
        )
    return tuple(sorted(ranked, key=lambda m: -m.suspicion))


def guilty(ranked: Sequence[ModuleFinding], rule: DecisionRule) -> ModuleFinding | None:
    """Return the module that the evidence names, or None if it names none or all alike."""
    if not ranked or ranked[0].suspicion < 1:
        return None
    first = ranked[0]
    # Only modules with weights have gradients to show it in.
    others = [m.suspicion for m in ranked[1:] if m.module != ROOT and m.suspicion > 0]
    stands_out = not others or first.suspicion >= rule.concentration * statistics.median(others)
    return first if first.starts_here or stands_out else None


def guilty_sentence(module: ModuleFinding) -> str:
    """Return `look at `dist`: ...` with the evidence."""
    return f"look at {module_text(module.module)}: {module.evidence}."


def largest_exact_integer(fmt: str) -> float:
    """Return the largest n up to which a format holds every whole number.

    2^(stored mantissa bits + 1): 256 for BF16, 2048 for FP16 and TF32 (IEEE 754-2019, 3.4).
    """
    return float(2.0 ** (get_format(fmt).mantissa_bits + 1))


def error_outliers(
    modules: Sequence[ModuleFinding], policy: PrecisionPolicy, rule: DecisionRule
) -> list[ModuleFinding]:
    """Return the modules whose own error is far above the others', innermost ones, worst first."""
    innermost = _innermost(modules)
    found = [m for m in modules if _local_error(m, innermost, policy, rule)[0] >= 1]
    inner = [m for m in found if not any(contains(m.module, other.module) for other in found)]
    return sorted(inner, key=lambda m: -(m.local_forward_error or 0.0))


def _start(
    module: ModuleFinding,
    policy: PrecisionPolicy,
    triage: Mapping[str, Any] | None,
    innermost: Sequence[ModuleFinding],
    rule: DecisionRule,
) -> _Evidence:
    """Return the strongest evidence that harm starts in a module."""
    if triage is not None and _blames(triage, module.module):
        return MAX_SUSPICION, str(triage.get("sentence", "")).rstrip(".")
    found = [
        _nonfinite(module, policy),
        _zero_outputs(module, rule),
        _integers(module, policy),
        _local_error(module, innermost, policy, rule),
    ]
    return max(found, key=lambda evidence: evidence[0])


def _blames(triage: Mapping[str, Any], module: str) -> bool:
    """Return whether trouble began in a module through its own arithmetic, or what it was fed."""
    return triage.get("module") == module and triage.get("cause") not in _NOT_THE_MODULE


def _nonfinite(module: ModuleFinding, policy: PrecisionPolicy) -> _Evidence:
    inside = nonfinite_inside(module, policy)
    if not inside:
        return _NONE
    return MAX_SUSPICION, f"the {inside[0]} is not finite though its inputs are"


def nonfinite_inside(module: ModuleFinding, policy: PrecisionPolicy) -> list[str]:
    """Return the ops that overflow inside a module.

    Under a loss scaler only those of the forward pass: overflowing gradients are how it calibrates.
    """
    scaled = policy.loss_scale.kind != "none"
    return [text for text in module.nonfinite if not (scaled and text.startswith("gradient"))]


def _zero_outputs(module: ModuleFinding, rule: DecisionRule) -> _Evidence:
    excess = dead_excess(module.zero_output_share, rule)
    if excess is None:
        return _NONE
    return excess / rule.zero_grad_excess, "it puts out only zeros, and under FP32 it does not"


def dead_excess(
    shares: tuple[float | None, float | None] | None, rule: DecisionRule
) -> float | None:
    """Return how much more is zero than under FP32 where (almost) all of it is; None elsewhere."""
    ours, theirs = shares or (None, None)
    if ours is None or theirs is None or ours < rule.module_zero_share:
        return None
    return ours - theirs if ours - theirs > rule.zero_grad_excess else None


def _integers(module: ModuleFinding, policy: PrecisionPolicy) -> _Evidence:
    largest, exact = module.integer_input_max, largest_exact_integer(policy.compute_format)
    if largest is None or not largest > exact:
        return _NONE
    fmt = policy.compute_format.upper()
    return largest / exact, (
        f"whole numbers up to {largest:.0f} reach it, and {fmt} holds them only up to {exact:.0f}"
    )


def _local_error(
    module: ModuleFinding,
    innermost: Sequence[ModuleFinding],
    policy: PrecisionPolicy,
    rule: DecisionRule,
) -> _Evidence:
    error = module.local_forward_error
    if error is None:
        return _NONE
    if not math.isfinite(error):
        return MAX_SUSPICION, "given FP32's own input, its output is not finite"
    typical = _typical_error(m for m in innermost if m is not module)
    roundoff = get_format(policy.compute_format).unit_roundoff
    limit = max(
        rule.module_error,
        rule.module_error_roundoffs * roundoff,
        rule.module_error_factor * typical,
    )
    text = f"given FP32's own input, its output is off by {percent(error)}"
    if typical > 0 and error >= limit:
        text += f", {number(error / typical)} times the other modules'"
    return error / limit, text


def _innermost(modules: Sequence[ModuleFinding]) -> list[ModuleFinding]:
    """Return the modules with an error of their own that contain none: errors count once."""
    known = [m for m in modules if m.local_forward_error is not None and m.module != ROOT]
    return [m for m in known if not any(contains(m.module, other.module) for other in known)]


def _typical_error(modules: Iterable[ModuleFinding]) -> float:
    """Return the median error; 0 without any, or if most are not finite."""
    errors = [m.local_forward_error or 0.0 for m in modules]
    found = statistics.median(errors) if errors else 0.0
    return found if math.isfinite(found) else 0.0


def _shows(module: ModuleFinding, policy: PrecisionPolicy, rule: DecisionRule) -> _Evidence:
    """Return the strongest evidence that harm shows in a module's gradients or updates."""
    if module.module == ROOT:
        return _NONE
    found = [_NONE]
    if module.noise_ratio is not None and not math.isnan(module.noise_ratio):
        text = f"its gradient's rounding error has {percent(module.noise_ratio)} of the energy of "
        found.append((module.noise_ratio / rule.probe_noise_ratio, f"{text}minibatch noise"))
    excess = dead_excess(module.zero_grad_share, rule)
    if excess is not None:
        found.append((excess / rule.zero_grad_excess, "its gradients are all zero"))
    if module.flushed_share is not None:
        text = f"{percent(module.flushed_share)} of its gradient elements are flushed to zero"
        found.append((module.flushed_share / rule.zero_grad_excess, text))
    if policy.param_format != "fp32" and policy.weight_rounding == "nearest":
        share = module.lost_update_share or 0.0
        text = f"{percent(share)} of its weight updates round away"
        found.append((share / rule.lost_update_share, text))
    return max(found, key=lambda evidence: evidence[0])


def contains(outer: str, inner: str) -> bool:
    """Return whether a module lies, at any depth, in another one."""
    return outer != inner and (outer == ROOT or inner.startswith(f"{outer}."))
