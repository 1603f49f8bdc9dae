"""Runs whose weights or products are rounded at random."""

import dataclasses

import pytest
import torch
from tiny_workloads import BF16_PURE, FP32, TinyWorkload, cross_entropy, numbers, run
from torch import nn

from harness.precision.policy import LossScaleSettings, PrecisionPolicy

BF16_STOCHASTIC = dataclasses.replace(
    BF16_PURE, name="bf16_stochastic", weight_rounding="stochastic"
)
FP8 = PrecisionPolicy(
    name="fp8",
    compute_format="fp8_e4m3",
    gradient_format="fp8_e5m2",
    operand_scaling="per_tensor",
)
RANDOM_PRODUCTS = PrecisionPolicy(name="e6m9", compute_format="e6m9", rounding="stochastic")
POLICIES = (BF16_STOCHASTIC, FP8, RANDOM_PRODUCTS)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.parametrize("optimizer", [None, lbfgs], ids=["adamw", "lbfgs"])
def test_same_run_twice_is_bitwise_equal_and_another_seed_rounds_otherwise(policy, optimizer):
    """A/A."""
    workload = TinyWorkload(**({} if optimizer is None else {"optimizer": optimizer}))
    assert numbers(run(workload, policy)) == numbers(run(workload, policy))
    assert run(workload, policy).series["loss"] != run(workload).series["loss"]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_pairs_stay_pairs(policy):
    """The random bits of rounding neither disturb nor depend on dropout's."""
    assert run(policy=policy).fingerprints == run().fingerprints


@pytest.mark.parametrize("optimizer", [None, lbfgs], ids=["adamw", "lbfgs"])
def test_the_model_sees_16_bit_weights_in_every_evaluation_of_a_step(optimizer):
    seen = []

    def loss(model, batch):
        if model.training:
            seen.append(model[0].weight.dtype)
        return cross_entropy(model, batch)

    fields = {} if optimizer is None else {"optimizer": optimizer}
    run(TinyWorkload(loss=loss, **fields), BF16_STOCHASTIC, steps=4)
    assert len(seen) >= (4 if optimizer is None else 12)
    assert set(seen) == {torch.bfloat16}


def ones():
    layer = nn.Linear(12, 4)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    return layer


def tiny_steps(model):
    return torch.optim.SGD(model.parameters(), lr=2.0**-12)


def test_updates_below_half_a_spacing_reach_the_weights():
    """From weights of 1, steps below half of BF16's spacing: rounding to nearest stays there."""
    workload = TinyWorkload(model=ones, optimizer=tiny_steps, clip=None)
    moved = {}
    for policy in (FP32, BF16_PURE, BF16_STOCHASTIC):
        losses = run(workload, policy, steps=300).series["loss"]
        moved[policy.name] = sum(losses[:100]) - sum(losses[-100:])
    assert moved["fp32"] > 1
    assert moved["bf16_pure"] == 0
    # Each weight walks at random around FP32's, at most a spacing's worth of 2^-8 * sqrt(300) / 2;
    # that moves the loss less than a tenth of what training does.
    assert moved["bf16_stochastic"] == pytest.approx(moved["fp32"], rel=0.1)


def test_fp16_weights_rounded_at_random_train_without_a_scaler():
    policy = PrecisionPolicy(
        name="fp16_stochastic",
        compute_format="fp16",
        param_format="fp16",
        weight_rounding="stochastic",
        low_precision_ops=("all",),
    )
    assert run(policy=policy).status == "completed"
    scaled = dataclasses.replace(policy, loss_scale=LossScaleSettings(kind="dynamic"))
    record = run(policy=scaled, crash_expected=True)
    assert record.crash is not None
    assert "FP16 gradient" in record.crash.message
