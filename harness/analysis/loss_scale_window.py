"""Which loss scales would have been safe, from what FP32's gradients were, and which were used.

The window is a what-if: it is read from the FP32 runs, so it exists for a candidate that died at
its first step as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from harness.analysis.module_evidence import Sides
from harness.analysis.probe_findings import LossScaleWindow
from harness.analysis.rule import DecisionRule
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.record_files import stored_number

_Step = tuple[int, float | None, float | None]


def loss_scale_window(
    runs: Sides, policy: PrecisionPolicy, rule: DecisionRule
) -> tuple[LossScaleWindow | None, float | None]:
    """Return the window of a candidate's format, and the share of steps with a scale outside it.

    A dynamic scale is outside where it would overflow; without one, or with a fixed one, also where
    it is too small. The steps of the loss scaler's calibration (`skips_warmup`) are left out of the
    share. None for a format that was not looked at, for BF16 and wider ones, whose range is
    FP32's, and for operands that are scaled tensor by tensor: no loss scale matters to them.
    """
    fmt = _format_of_gradients(policy)
    if policy.operand_scaling == "per_tensor" or fmt in ("fp32", "tf32", "bf16"):
        return None, None
    steps = [step for record in runs.theirs for step in _steps(record, fmt)]
    lows = [low for _, low, _ in steps if low is not None]
    highs = [high for _, _, high in steps if high is not None]
    if not lows and not highs:
        return None, None
    low, high = (max(lows) if lows else None), (min(highs) if highs else None)
    used = _used(runs.ours)
    window = LossScaleWindow(
        fmt=fmt, low=low, high=high, used=used, sentence=_sentence(fmt, low, high, used)
    )
    return window, _share_outside(runs, policy, rule)


def _format_of_gradients(policy: PrecisionPolicy) -> str:
    return policy.gradient_format or policy.compute_format


def _steps(record: RunRecord, fmt: str) -> list[_Step]:
    """Return (step, low, high) of one run's window, low and high as log2 of the scale."""
    found = record.probes.get("exponents", {})
    window: Any = found.get("windows", {}).get(fmt)
    if not isinstance(window, dict):
        return []
    lows, highs = window.get("low", []), window.get("high", [])
    return [
        (int(step), stored_number(low), stored_number(high))
        for step, low, high in zip(
            found.get("weight_gradient_steps", []), lows, highs, strict=False
        )
    ]


def _used(records: Iterable[RunRecord]) -> tuple[float, float]:
    scales = [x for record in records for x in record.series.get("loss_scale", ()) if x > 0]
    finite = [math.log2(x) for x in scales if math.isfinite(x)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def _share_outside(runs: Sides, policy: PrecisionPolicy, rule: DecisionRule) -> float | None:
    finds_its_own = policy.loss_scale.kind in ("dynamic", "deepspeed")
    outside = []
    for ours, theirs in zip(runs.ours, runs.theirs, strict=True):
        scales = ours.series.get("loss_scale", ())
        for step, low, high in _steps(theirs, _format_of_gradients(policy)):
            if step < rule.skips_warmup * ours.num_steps or step >= len(scales):
                continue
            scale = math.log2(scales[step]) if scales[step] > 0 else -math.inf
            too_large = high is not None and scale > high
            too_small = low is not None and scale < low and not finds_its_own
            outside.append(too_large or too_small)
    return sum(outside) / len(outside) if outside else None


def _sentence(fmt: str, low: float | None, high: float | None, used: tuple[float, float]) -> str:
    name = fmt.upper()
    if low is not None and high is not None and low > high:
        text = (
            f"no loss scale is safe for {name} at every step (2^{low:.0f} against underflow, "
            f"2^{high:.0f} against overflow)"
        )
    else:
        ends = [f"from 2^{low:.0f}"] if low is not None else []
        ends += [f"up to 2^{high:.0f}"] if high is not None else []
        text = f"loss scales {' '.join(ends)} are safe for {name} at every step"
    if used == (0.0, 0.0):
        mine = "no scale was used"
    elif used[0] == used[1]:
        mine = f"2^{used[0]:.0f} was used"
    else:
        mine = f"2^{used[0]:.0f} to 2^{used[1]:.0f} were used"
    return f"{text[:1].upper()}{text[1:]}; {mine}."


def safe_scales(windows: Sequence[LossScaleWindow | None]) -> str | None:
    """Return `2^8 to 2^15` of the first window that has a safe scale; None without one."""
    for window in windows:
        if window is None or window.low is None or window.high is None:
            continue
        if window.low <= window.high:
            return f"2^{window.low:.0f} to 2^{window.high:.0f}"
    return None
