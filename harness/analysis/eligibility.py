"""Which accepted policies may be recommended at all, and in which order where no speed is known."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.analysis.findings import Verdict
from harness.numerics.formats import get_format

# By name first, then a user's own policies right after the built-in ones of the same format, then
# those with 16-bit weights. FP16 follows BF16 because its scaler can skip steps and its range can
# overflow. FP8 comes after every format whose arithmetic was that of a device: here it is emulated.
_ORDER_BY_NAME = {"bf16": 0, "bf16_fallback": 1, "fp16": 4, "tf32": 7, "fp32": 11}
_ORDER_BY_FORMAT = {"bf16": 2, "fp16": 5, "tf32": 8, "fp8_e4m3": 9, "fp8_e5m2": 9, "fp32": 12}
_ANY_OTHER_FORMAT = 10
# Wider first: what decides between speeds that are about equal. Steps of two leave room for
# policies that keep parts in FP32, and for 16-bit weights.
_WIDTH = {"fp32": 0, "tf32": 3, "bf16": 6, "fp16": 9}
_NARROWER = 12
_NO_DEVICE = re.compile(r"e\d+m\d+")


def never_chosen_because(verdict: Verdict) -> str | None:
    """Return the hazard that neither a few hundred steps of loss nor the probe exclude, or None."""
    content = verdict.policy_content
    fmt = str(content["compute_format"])
    if content["param_format"] != "fp32" and not _updates_probed(verdict):
        return "its weights are not FP32, and updates too small for them were not probed"
    if fmt == "fp16" and content["loss_scale"]["kind"] == "none":
        return (
            "FP16 without loss scaling loses gradients that are too small for it, so the "
            "acceptance rests on the range that gradients had in this run"
        )
    if _NO_DEVICE.fullmatch(fmt):
        return f"no device computes in {fmt}; it is a study of the format"
    return None


def is_eligible(verdict: Verdict) -> bool:
    """Return whether a policy may be chosen if accepted."""
    return never_chosen_because(verdict) is None


def departs_from_autocast(verdict: Verdict) -> bool:
    """Return whether a policy lowers ops that autocast keeps in FP32, at the risk of their range.

    BF16 weights whose arithmetic passed the probe do not count: BF16 has FP32's range, and what its
    rounding does in those ops is what the probe measured.
    """
    content = verdict.policy_content
    is_bf16 = content["param_format"] == content["compute_format"] == "bf16"
    return bool(content["low_precision_ops"]) and not (is_bf16 and _updates_probed(verdict))


def by_format(eligible: Sequence[Verdict]) -> list[Verdict]:
    """Return the policies in the order of their formats, assumed from the fastest on."""

    def place(verdict: Verdict) -> tuple[bool, int]:
        content = verdict.policy_content
        fmt = str(content["compute_format"])
        order = _ORDER_BY_NAME.get(verdict.policy, _ORDER_BY_FORMAT.get(fmt, _ANY_OTHER_FORMAT))
        if content["param_format"] != "fp32":
            order = _ORDER_BY_FORMAT.get(fmt, _ANY_OTHER_FORMAT) + 1
        return departs_from_autocast(verdict), order

    return sorted(eligible, key=place)


def width(verdict: Verdict) -> float:
    """Return a rank by width, the widest policy lowest."""
    content = verdict.policy_content
    fmt = str(content["compute_format"])
    rank = float(_WIDTH.get(fmt, _NARROWER))
    if fmt not in _WIDTH:
        # At most one: fewer mantissa bits are narrower.
        rank += 1 / (1 + get_format(fmt).mantissa_bits)
    keeps_fp32 = any(content[f"fp32_{part}"] for part in ("ops", "modules", "selectors"))
    return rank - int(keeps_fp32) + int(content["param_format"] != "fp32")


def _updates_probed(verdict: Verdict) -> bool:
    probe = verdict.probe
    return probe is not None and probe.passes and probe.retention is not None
