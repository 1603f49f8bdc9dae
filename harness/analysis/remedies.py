"""What the evidence on one candidate points to: remedies, and which policies apply them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.analysis.findings import Verdict
from harness.analysis.loss_scale_window import safe_scales
from harness.precision.directions import split_direction
from harness.precision.module_names import ROOT, matches
from harness.precision.policy import LossScaleSettings

FP32_PARTS = ("fp32_ops", "fp32_modules", "fp32_selectors")
_CRASHES = frozenset({"CRASHED", "NOT_EXPRESSIBLE"})
_OVERFLOWS = frozenset({"NONFINITE", "LOSS_SCALE_COLLAPSE"})
_STALLS = frozenset({"WEIGHTS_NOT_MOVING", "LOST_UPDATES", "PROBE_STAGNATION"})
_UNDERFLOWS = frozenset(
    {"ZERO_GRADIENTS", "DEAD_GRADIENTS", "UNDERFLOW_OBSERVED", "WEIGHTS_NOT_MOVING"}
)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """What to do, and the policies that do it (None: it is not a policy).

    `only_if_tried`: a guess, worth naming only if the grid has tried it. `by_format`: the number
    format is to do it, so that it is refuted if only more parts in FP32 make it work. `changes`:
    the fields of the candidate's policy with which it does it, and `suffix` what its name then gets
    appended; empty where what to change is not known.
    """

    text: str
    does_it: Callable[[Verdict], bool] | None = None
    only_if_tried: bool = False
    by_format: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    suffix: str = ""


def remedies(verdict: Verdict, *, flushed_limit: float) -> list[Remedy]:
    """Return what the evidence on a candidate points to, the first choice first.

    Args:
        verdict: Rejected, or undecided because of its probe.
        flushed_limit: Share of gradient elements that are flushed from which it counts.
    """
    codes = {reason.code for reason in verdict.reasons}
    content = verdict.policy_content
    fmt = str(content["compute_format"])
    if "CRASHED" in codes:
        return [_keep_module(verdict)]
    if codes & _CRASHES:
        return [_BF16, _SAME_FORMAT_UNSCALED]
    if content["clip_before_unscale"]:
        changes = {"clip_before_unscale": False}
        return [Remedy(text="clipping after unscaling", changes=changes, suffix="clip_unscaled")]
    if content["param_format"] != "fp32" and (codes & _STALLS or not codes & _OVERFLOWS):
        return [_fp32_weights(fmt), _stochastic(verdict)]
    if "INTEGERS_ROUNDED" in codes:
        return [_INTEGERS, keep_parts(verdict)]
    if fmt == "fp16" and codes & _OVERFLOWS:
        return [_BF16, _keep_module(verdict)]
    if _underflows(verdict, codes, flushed_limit):
        return [_scaled(verdict), _BF16]
    if content["low_precision_ops"]:
        return [_autocast(fmt), *_named(verdict), keep_parts(verdict)]
    if "STEP0_LOSS_DIFFERS" in codes:
        return [_keep_module(verdict)]
    return [*_named(verdict), keep_parts(verdict)]


def keeps_more_in_fp32(fallback: Verdict, plain: Verdict) -> bool:
    """Return whether a policy differs from another one only by more that stays in FP32."""
    ours, theirs = fallback.policy_content, plain.policy_content
    rest = set(ours) - set(FP32_PARTS)
    if fallback is plain or any(ours[key] != theirs[key] for key in rest):
        return False
    return all(set(ours[part]) >= set(theirs[part]) for part in FP32_PARTS) and any(
        set(ours[part]) > set(theirs[part]) for part in FP32_PARTS
    )


def keep_parts(plain: Verdict) -> Remedy:
    """Return the guess that keeping more of the model in FP32 helps."""
    return Remedy(
        text="keeping more of the model in FP32",
        does_it=lambda verdict: keeps_more_in_fp32(verdict, plain),
        only_if_tried=True,
    )


def _underflows(verdict: Verdict, codes: set[str], flushed_limit: float) -> bool:
    content = verdict.policy_content
    finds_its_own = content["loss_scale"]["kind"] in ("dynamic", "deepspeed")
    if content["compute_format"] != "fp16" or finds_its_own:
        return False
    flushed = verdict.probe.flushed_share if verdict.probe is not None else None
    flushes = flushed is not None and flushed > flushed_limit
    unscaled = content["loss_scale"]["kind"] == "none"
    return flushes or (unscaled and bool(codes & _UNDERFLOWS))


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


def _fp32_weights(fmt: str) -> Remedy:
    text = "FP32 weights under the same arithmetic"
    changes = {**_FP32_STORAGE, **_OWN_FP32_LIST}
    if fmt == "fp16":
        changes |= {"loss_scale": _DYNAMIC}
    return Remedy(
        text=text,
        does_it=_runs_in(fmt),
        by_format=True,
        changes=changes,
        suffix="fp32_weights",
    )


def _stochastic(plain: Verdict) -> Remedy:
    stored = plain.policy_content["param_format"]

    def does_it(verdict: Verdict) -> bool:
        content = verdict.policy_content
        return bool(
            content["param_format"] == stored and content["weight_rounding"] == "stochastic"
        )

    rounded = does_it(plain)
    return Remedy(
        text="stochastic rounding of the weights",
        does_it=does_it,
        only_if_tried=rounded,
        changes={"weight_rounding": "stochastic"},
        suffix="stochastic",
    )


def _autocast(fmt: str) -> Remedy:
    return Remedy(
        text=f"autocast's own FP32 list for {fmt.upper()}",
        does_it=_runs_in(fmt),
        by_format=True,
        changes={**_FP32_STORAGE, **_OWN_FP32_LIST},
        suffix="autocast",
    )


def _named(verdict: Verdict) -> list[Remedy]:
    """Return keeping the module that the evidence names in FP32, if it names one."""
    module = verdict.guilty_module
    if module is None or module == ROOT:
        return []
    fmt = verdict.policy_content["compute_format"]

    def does_it(other: Verdict) -> bool:
        content = other.policy_content
        return bool(
            content["compute_format"] == fmt
            and any(_covers(str(entry), module) for entry in content["fp32_modules"])
        )

    kept = [*map(str, verdict.policy_content["fp32_modules"]), module]
    setting = f"policy={verdict.policy} policy.fp32_modules=[{','.join(kept)}]"
    return [
        Remedy(
            text=f"keeping `{module}` in FP32 ({setting})",
            does_it=does_it,
            changes={"fp32_modules": kept},
            suffix=f"keep_{_WORD_BREAKS.sub('_', module).strip('_')}",
        )
    ]


def _covers(entry: str, module: str) -> bool:
    """Return whether an entry of `fp32_modules` keeps a module or one that contains it in FP32."""
    direction, pattern = split_direction(entry)
    parts = module.split(".")
    outer = (".".join(parts[: k + 1]) for k in range(len(parts)))
    return direction is None and any(matches(pattern, name) for name in outer)


def _keep_module(verdict: Verdict) -> Remedy:
    """Return keeping the failing module in FP32: by name where it is known."""
    named = _named(verdict)
    if named:
        return named[0]
    fmt = verdict.policy_content["compute_format"]

    def does_it(other: Verdict) -> bool:
        content = other.policy_content
        return content["compute_format"] == fmt and any(content[part] for part in FP32_PARTS)

    text = "keeping the failing module in FP32 (policy.fp32_modules)"
    return Remedy(text=text, does_it=does_it)


def _scaled(verdict: Verdict) -> Remedy:
    scales = safe_scales([verdict.loss_scale_window])
    return Remedy(
        text="loss scaling" if scales is None else f"loss scaling (safe: {scales})",
        does_it=_runs_in("fp16", scaled=True),
        by_format=True,
        changes={"loss_scale": _DYNAMIC, **_FP32_STORAGE, **_OWN_FP32_LIST},
        suffix="with_scaler",
    )


_WORD_BREAKS = re.compile("[^A-Za-z0-9]+")
_UNSCALED = dataclasses.asdict(LossScaleSettings())
_DYNAMIC = dataclasses.asdict(LossScaleSettings(kind="dynamic"))
_FP32_STORAGE = {"param_format": "fp32", "weight_rounding": "nearest"}
_OWN_FP32_LIST: dict[str, Any] = {"low_precision_ops": []}
# Fields that mean something in an emulated format only.
_NOT_EMULATED = {
    "gradient_format": "",
    "rounding": "nearest",
    "operand_scaling": "none",
    "round_results": False,
}
_INTEGERS = Remedy(text="carrying those whole numbers in FP32 up to where they are used")
_BF16 = Remedy(
    text="BF16, which has FP32's range",
    does_it=_runs_in("bf16"),
    by_format=True,
    changes={
        "compute_format": "bf16",
        "loss_scale": _UNSCALED,
        **_FP32_STORAGE,
        **_OWN_FP32_LIST,
        **_NOT_EMULATED,
    },
    suffix="in_bf16",
)
_SAME_FORMAT_UNSCALED = Remedy(
    text="the same format without a loss scaler",
    does_it=_runs_in("fp16", scaled=False),
    by_format=True,
    changes={"loss_scale": _UNSCALED},
    suffix="without_scaler",
)
