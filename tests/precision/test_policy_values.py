"""Policies as values: what a mapping may hold, and what identity means."""

from __future__ import annotations

import pytest

from harness.precision.policy import LossScaleSettings, PrecisionPolicy, is_emulated_format


def test_one_name_and_a_list_of_one_are_the_same_policy():
    one = PrecisionPolicy.from_mapping({"name": "a", "low_precision_ops": "all"})
    several = PrecisionPolicy.from_mapping({"name": "b", "low_precision_ops": ["all"]})
    assert one.low_precision_ops == ("all",)
    assert one.content_hash() == several.content_hash()


def test_content_survives_a_round_trip_with_every_field_changed():
    policy = PrecisionPolicy(
        name="p",
        compute_format="fp16",
        fp32_ops=("softmax",),
        fp32_modules=("norm",),
        fp32_selectors=("loss",),
        low_precision_ops=("exp",),
        perturbation=0.5,
        clip_before_unscale=True,
    )
    emulated = PrecisionPolicy(
        name="p",
        compute_format="e4m3",
        gradient_format="fp8_e5m2",
        rounding="stochastic",
        operand_scaling="per_tensor",
        round_results=True,
    )
    stochastic = PrecisionPolicy(
        name="p", compute_format="bf16", param_format="bf16", weight_rounding="stochastic"
    )
    for one in (policy, emulated, stochastic):
        again = PrecisionPolicy.from_mapping({"name": "q", **one.content()})
        assert again.content() == one.content()
        assert again.content_hash() != PrecisionPolicy(name="p").content_hash()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute_format": "fp8"}, "compute_format='fp8' .*fp8_e4m3, fp8_e5m2, e<exponent bits"),
        ({"compute_format": "e9m3"}, "compute_format='e9m3' is not allowed"),
        ({"compute_format": "e4m3", "gradient_format": "e4"}, "gradient_format='e4' .*an empty"),
        ({"compute_format": "e4m3", "rounding": "up"}, "rounding='up' .*nearest, toward_zero"),
        ({"compute_format": "e4m3", "operand_scaling": "row"}, "operand_scaling='row' .*none, per"),
        ({"weight_rounding": "up"}, "weight_rounding='up' .*nearest, stochastic"),
        (
            {"compute_format": "bf16", "gradient_format": "fp8_e5m2"},
            "gradient_format='fp8_e5m2' has no effect with policy.compute_format='bf16'",
        ),
        (
            {"compute_format": "tf32", "rounding": "toward_zero"},
            "rounding='toward_zero' has no effect .*'tf32'; allowed: 'nearest'",
        ),
        ({"operand_scaling": "per_tensor"}, "operand_scaling='per_tensor' has no effect .*'fp32'"),
        (
            {"compute_format": "fp16", "round_results": True},
            "round_results=True has no effect .*; allowed: False",
        ),
        (
            {"compute_format": "bf16", "weight_rounding": "stochastic"},
            "weight_rounding='stochastic' has no effect with policy.param_format='fp32'",
        ),
        (
            {"compute_format": "fp8_e4m3", "low_precision_ops": ["softmax"]},
            r"low_precision_ops=\('softmax',\) has no effect .*'fp8_e4m3'; allowed: \(\)",
        ),
    ],
)
def test_values_that_are_not_allowed_or_have_no_effect_are_refused(fields, message):
    with pytest.raises(ValueError, match=rf"^policy\.{message}"):
        PrecisionPolicy.from_mapping({"name": "p", **fields})


def test_formats_that_no_device_has_are_emulated():
    assert all(is_emulated_format(name) for name in ("fp8_e4m3", "fp8_e5m2", "e5m3", "e8m10"))
    assert not any(is_emulated_format(name) for name in ("fp32", "tf32", "bf16", "fp16", "int8"))


@pytest.mark.parametrize("value", [3, [3], [""], {"softmax": True}, None])
def test_what_is_no_list_of_names_is_refused(value):
    with pytest.raises(ValueError, match=r"policy\.fp32_ops=.* a list of names"):
        PrecisionPolicy.from_mapping({"name": "p", "fp32_ops": value})


def test_roles_follow_from_content():
    fp32 = PrecisionPolicy(name="anything")
    assert fp32.is_reference
    assert not fp32.is_control
    twin = PrecisionPolicy(name="twin", perturbation=2.0**-8)
    assert twin.is_control
    assert not twin.is_reference
    assert not PrecisionPolicy(name="low", compute_format="bf16").computes_in_fp32
    scaled = PrecisionPolicy(name="scaled", loss_scale=LossScaleSettings(kind="dynamic"))
    assert not scaled.is_reference
    assert not scaled.is_control


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("none", "init_scale", 1024.0),
        ("static", "growth_interval", 10),
        ("dynamic", "hysteresis", 2),
        ("dynamic", "min_scale", 1.0),
        ("dynamic", "consecutive_hysteresis", True),
    ],
)
def test_a_field_that_the_kind_of_loss_scaling_does_not_use_is_refused(kind, field, value):
    with pytest.raises(ValueError, match=rf"loss_scale\.{field}=.* has no effect .*'{kind}'"):
        LossScaleSettings(kind=kind, **{field: value})
    assert getattr(LossScaleSettings(kind="deepspeed", **{field: value}), field) == value
