"""Policies as values: what a mapping may hold, and what identity means."""

from __future__ import annotations

import pytest

from harness.precision.policy import LossScaleSettings, PrecisionPolicy


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
    again = PrecisionPolicy.from_mapping({"name": "q", **policy.content()})
    assert again.content() == policy.content()
    assert again.content_hash() != PrecisionPolicy(name="p").content_hash()


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
    ],
)
def test_a_field_that_the_kind_of_loss_scaling_does_not_use_is_refused(kind, field, value):
    with pytest.raises(ValueError, match=rf"loss_scale\.{field}=.* has no effect .*'{kind}'"):
        LossScaleSettings(kind=kind, **{field: value})
    assert getattr(LossScaleSettings(kind="deepspeed", **{field: value}), field) == value
