"""Lost updates by module and for the whole model."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from tiny_workloads import BF16_PURE, FP16, FP32, TinyWorkload, run
from torch import nn

from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.probes.base import NamedTensor
from harness.probes.lost_updates import LostUpdatesProbe
from harness.runs.settings import ProbeSettings

EVERY_STEP = ProbeSettings(
    exponents_every=None,
    weight_gradients_every=None,
    norms_every=None,
    lost_updates_every=1,
    memory=False,
)


def watch(probe: LostUpdatesProbe, weights: dict[str, nn.Parameter], steps: torch.Tensor) -> None:
    named = [
        NamedTensor(module=module, name="weight", value=weight.detach(), source=weight)
        for module, weight in weights.items()
    ]
    probe.start(0, loss_scale=1.0)
    probe.before_update(named)
    with torch.no_grad():
        for weight in weights.values():
            weight.copy_((weight.float() + steps).to(weight.dtype))
    probe.after_update(named, skipped=False)
    probe.flush()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lost_updates_by_hand(dtype: torch.dtype) -> None:
    """At weight 1, BF16's spacing is 2^-7 upwards: half of it is lost, more than half is not."""
    steps = torch.tensor([0.0, 2.0**-8, 2.0**-7, 2.0**-9, 0.5], dtype=torch.float32)
    weight = nn.Parameter(torch.ones(5, dtype=dtype))
    weight.grad = (steps != 0).to(dtype)
    probe = LostUpdatesProbe(every=1, num_steps=2)
    watch(probe, {"a": weight}, steps)
    assert probe.sampled() == ((0,), {"lost_update_bf16": (2.0,), "update_total": (4.0,)})
    result = probe.result()
    row = result["modules"]["a"]
    assert set(row) == set(LostUpdatesProbe.metrics)
    assert (row["updates"], row["lost_bf16"]) == ([4], [2])
    if dtype is torch.float32:
        assert result["view"] == "what_if"
        assert row["lost_fp16"] == [0]  # spacing 2^-10
        size = 2.0**-8 + 2.0**-7 + 2.0**-9 + 0.5
        assert row["retained_nearest_bf16"][0] == pytest.approx((2.0**-7 + 0.5) / size, abs=1e-6)
        assert row["retained_stochastic_bf16"] == [1.0]
    else:
        assert result["view"] == "observed"
        assert row["lost_fp16"] == row["retained_nearest_bf16"] == [None]


def test_sixteen_bit_weights_are_observed_by_format_and_wide_ones_left_out() -> None:
    steps = torch.tensor([2.0**-9, 0.5])
    weights = {
        "half": nn.Parameter(torch.ones(2, dtype=torch.float16)),
        "wide": nn.Parameter(torch.ones(2)),
    }
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    probe = LostUpdatesProbe(every=1, num_steps=2)
    watch(probe, weights, steps / 8)
    assert probe.sampled()[1] == {}  # nothing of FP16 weights would be kept in BF16
    assert set(probe.result()["modules"]) == {"half"}
    half = probe.result()["modules"]["half"]
    assert (half["updates"], half["lost_fp16"], half["lost_bf16"]) == ([2], [1], [None])


def test_parameters_without_gradient_and_sparse_gradients() -> None:
    dense = nn.Parameter(torch.ones(4, 1, dtype=torch.bfloat16))
    dense.grad = torch.sparse_coo_tensor(
        [[1, 3]], torch.ones(2, 1, dtype=torch.bfloat16), (4, 1), check_invariants=True
    )
    none = nn.Parameter(torch.ones(4, 1, dtype=torch.bfloat16))
    probe = LostUpdatesProbe(every=1, num_steps=2)
    watch(probe, {"table": dense, "unused": none}, torch.tensor([[0.0], [0.5], [0.0], [2.0**-9]]))
    row = probe.result()["modules"]["table"]
    assert (row["updates"], row["lost_bf16"]) == ([2], [1])
    assert "unused" not in probe.result()["modules"]


def test_no_weights_at_all() -> None:
    probe = LostUpdatesProbe(every=1, num_steps=2)
    watch(probe, {}, torch.zeros(1))
    watch(probe, {"empty": nn.Parameter(torch.empty(0))}, torch.empty(0))
    assert probe.result()["modules"] == {}
    assert probe.sampled()[1] == {"lost_update_bf16": (0.0, 0.0), "update_total": (0.0, 0.0)}


def test_a_skipped_step_has_no_updates() -> None:
    overflowing = dataclasses.replace(
        FP16, loss_scale=LossScaleSettings(kind="dynamic", init_scale=2.0**24)
    )
    record = run(policy=overflowing, probes=EVERY_STEP, steps=4)
    assert record.series["skipped"][0] == 1.0
    found = record.probes["lost_updates"]
    assert found["steps"] == [0, 1, 2, 3]
    skipped = [step for step, flag in enumerate(record.series["skipped"]) if flag]
    for columns in found["modules"].values():
        assert all(columns["updates"][step] == 0 for step in skipped)
        assert all(columns["retained_nearest_bf16"][step] is None for step in skipped)
    assert [record.sampled["update_total"][step] for step in skipped] == [0.0] * len(skipped)


def test_a_small_rate_loses_most_updates_and_a_large_one_few() -> None:
    def share(policy: PrecisionPolicy, rate: float) -> float:
        workload = TinyWorkload(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=rate))
        record = run(workload, policy, probes=EVERY_STEP)
        assert record.probes["lost_updates"]["view"] == (
            "observed" if policy is BF16_PURE else "what_if"
        )
        json.dumps(record.probes["lost_updates"], allow_nan=False)
        lost, total = (record.sampled[k] for k in ("lost_update_bf16", "update_total"))
        modules = record.probes["lost_updates"]["modules"].values()
        assert sum(sum(m["lost_bf16"]) for m in modules) == sum(lost)
        return sum(lost) / sum(total)

    for policy in (FP32, BF16_PURE):
        assert share(policy, 1e-5) > 0.9
        assert share(policy, 1.0) < 0.3
