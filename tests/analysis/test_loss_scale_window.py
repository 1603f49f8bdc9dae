"""Which loss scales would have been safe, and whether the ones used were."""

from __future__ import annotations

import dataclasses
from typing import Any

from factories import POLICIES, make_grid, make_record, with_probe, with_series

from harness.analysis.loss_scale_window import loss_scale_window
from harness.analysis.module_evidence import Sides
from harness.analysis.rule import DecisionRule
from harness.precision.policy import LossScaleSettings, PrecisionPolicy

RULE = DecisionRule()
STEPS = [0, 30, 60, 90]
STATIC = PrecisionPolicy(
    name="fp16_static", compute_format="fp16", loss_scale=LossScaleSettings(kind="static")
)


def with_window(record: Any, low: list[Any], high: list[Any], fmt: str = "fp16") -> Any:
    found = {"weight_gradient_steps": STEPS, "windows": {fmt: {"low": low, "high": high}}}
    return with_probe(record, "exponents", found)


def look(policy: PrecisionPolicy, *, low: list[Any], high: list[Any], scale: float) -> Any:
    candidate = with_series(make_record(policy), loss_scale=[scale] * 120)
    reference = with_window(make_record("fp32"), low, high)
    return loss_scale_window(Sides(ours=(candidate,), theirs=(reference,)), policy, RULE)


def test_the_window_is_the_narrowest_over_the_steps() -> None:
    window, outside = look(STATIC, low=[2, 5, 8, 3], high=[20, 18, 19, 20], scale=2.0**10)
    assert (window.fmt, window.low, window.high, window.used) == ("fp16", 8, 18, (10, 10))
    assert window.sentence == (
        "Loss scales from 2^8 up to 2^18 are safe for FP16 at every step; 2^10 was used."
    )
    assert outside == 0


def test_steps_outside_are_counted_after_calibration() -> None:
    # Step 0 is calibration; of 30, 60 and 90 the scale 2^4 is too small at 30 and 60.
    _, outside = look(STATIC, low=[2, 5, 8, 3], high=[20] * 4, scale=2.0**4)
    assert outside == 2 / 3
    _, outside = look(STATIC, low=[0] * 4, high=[20, 18, 3, 3], scale=2.0**4)
    assert outside == 2 / 3


def test_a_dynamic_scale_is_outside_only_where_it_overflows() -> None:
    fp16 = POLICIES["fp16"]
    _, outside = look(fp16, low=[20] * 4, high=[30] * 4, scale=2.0**4)
    assert outside == 0
    _, outside = look(fp16, low=[0] * 4, high=[3] * 4, scale=2.0**4)
    assert outside == 1


def test_no_scale_may_be_safe_throughout() -> None:
    window, _ = look(STATIC, low=[2, 12, 2, 2], high=[20, 20, 9, 20], scale=1.0)
    assert window.sentence.startswith("No loss scale is safe for FP16 at every step (2^12 ")
    assert window.sentence.endswith("no scale was used.")


def test_missing_parts_are_passed_over() -> None:
    none = Sides(ours=(make_record("fp16"),), theirs=(make_record("fp32"),))
    assert loss_scale_window(none, POLICIES["fp16"], RULE) == (None, None)
    window, _ = look(STATIC, low=[None] * 4, high=[None, 5, None, "Infinity"], scale=1.0)
    assert (window.low, window.high) == (None, 5)
    assert "Loss scales up to 2^5" in window.sentence


def test_formats_with_the_range_of_fp32_have_no_window() -> None:
    reference = with_window(make_record("fp32"), [0] * 4, [1] * 4, fmt="bf16")
    runs = Sides(ours=(make_record("bf16"),), theirs=(reference,))
    assert loss_scale_window(runs, POLICIES["bf16"], RULE) == (None, None)


def test_operands_scaled_one_by_one_need_no_loss_scale() -> None:
    plain = PrecisionPolicy(name="fp8", compute_format="fp8_e4m3", gradient_format="fp8_e5m2")
    scaled = dataclasses.replace(plain, operand_scaling="per_tensor")
    reference = with_window(make_record("fp32"), [3] * 4, [12] * 4, fmt="fp8_e5m2")
    found = {
        policy.operand_scaling: loss_scale_window(
            Sides(ours=(make_record(policy),), theirs=(reference,)), policy, RULE
        )
        for policy in (plain, scaled)
    }
    window, _ = found["none"]
    assert (window.fmt, window.low, window.high) == ("fp8_e5m2", 3, 12)  # of the gradients
    assert found["per_tensor"] == (None, None)


def test_a_scale_outside_is_a_warning_and_the_remedy_names_the_safe_ones(analysis: Any) -> None:
    records = make_grid({"fp32": {}, "fp16_unscaled": {"offset": 0.5}})
    records = [
        with_window(
            dataclasses.replace(r, final={**r.final, "zero_grad_share": 0.01}), [9] * 4, [15] * 4
        )
        if r.policy == "fp32"
        else dataclasses.replace(r, final={**r.final, "zero_grad_share": 1.0})
        for r in records
    ]
    findings = analysis.findings(records)
    (verdict,) = findings.verdicts
    (reason,) = [r for r in verdict.reasons if r.code == "LOSS_SCALE_OUTSIDE_WINDOW"]
    assert "no scale was used: outside it at 100 % of the sampled steps" in reason.message
    (text,) = [r for r in findings.choice.reasons if r.startswith("fp16_unscaled is rejected")]
    assert "loss scaling (safe: 2^9 to 2^15)" in text
