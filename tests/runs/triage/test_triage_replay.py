"""Planted faults in tiny trainings: the replay must name module, op, direction and numbers."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from tiny_workloads import (
    BATCH,
    BF16,
    BF16_PURE,
    CLASSES,
    FEATURES,
    FP16,
    FP32,
    POLICIES,
    TinyWorkload,
    class_batches,
    cross_entropy,
    run,
    settings,
)
from torch import nn

from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.triage.finished_run import triaged

UNSCALED = PrecisionPolicy(name="fp16_unscaled", compute_format="fp16")
HAND_CAST = PrecisionPolicy(
    name="hand_cast",
    compute_format="fp16",
    low_precision_ops=("all",),
    loss_scale=LossScaleSettings(kind="dynamic"),
)


def triage(workload, policy, steps=12):
    """Train, then return (the entry or None, the record before)."""
    record = run(workload, policy, steps)
    after = triaged(record, workload, policy, settings(steps))
    entry = after.probes.get("triage")
    if entry is not None:
        assert RunRecord.from_json(after.to_json()).probes.keys() == after.probes.keys()
        assert after.events[-1]["kind"] == "triage"
        json.dumps(entry["sentence"])
    return entry, record


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_a_healthy_run_is_left_as_it_is(policy):
    workload = TinyWorkload()
    record = run(workload, policy, 12)
    assert triaged(record, workload, policy, settings(12)) is record


class Growing(nn.Module):
    """An MLP with dropout whose second layer is multiplied by 10 from one step to the next."""

    def __init__(self, start=300.0):
        super().__init__()
        self.first, self.wide = nn.Linear(FEATURES, 24), nn.Linear(24, 24)
        self.drop, self.head = nn.Dropout(0.25), nn.Linear(24, CLASSES)
        self.gain, self.calls = start, 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        factor = 10.0 ** min(self.calls - 1, 5)
        return self.head(self.drop(self.wide(self.first(x) * factor)) / factor)


def test_the_layer_that_overflows_and_the_step_at_which_it_does():
    entry, record = triage(TinyWorkload(model=Growing), FP16)
    first = next(k for k, loss in enumerate(record.series["loss"]) if not loss < float("inf"))
    assert 2 <= first <= 6
    assert (entry["trigger"], entry["step"], entry["cause"]) == ("nonfinite_loss", first, "layer")
    assert entry["limit"] == 65504.0
    assert entry["value"] > 65504.0
    # The model's own arithmetic and the layer are both in reach; nothing else is.
    assert entry["module"] in ("wide", "(model)")
    assert entry["fp32_max"] == pytest.approx(entry["value"], rel=0.01)
    assert not any("losses of the run" in f["sentence"] for f in entry["findings"])


class Normalized(nn.Module):
    """Divides by a norm whose squares, and whose 1e-8 beside them, are below FP16's range."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 24, bias=False), nn.Linear(24, CLASSES)
        nn.init.normal_(self.first.weight, std=1e-5)

    def forward(self, x):
        h = self.first(x)
        return self.head(h / ((h * h).mean(-1, keepdim=True).sqrt() + 1e-8))


def test_a_division_by_what_was_rounded_to_zero_names_where_the_zero_was_made():
    entry, _ = triage(TinyWorkload(model=Normalized), FP16)
    assert (entry["cause"], entry["module"], entry["op"]) == ("layer", "(model)", "div")
    assert "output of `add` inside `(model)`, which it reads, is exactly zero" in entry["sentence"]
    assert "in FP32 it is finite (max " in entry["sentence"]
    assert "in FP32 too" not in entry["sentence"]


def logarithm_of_probabilities(model, batch):
    """A probability that 16 bits round to 1: the rest is 0, and so is 1e-8 beside it."""
    x, y = batch
    p = torch.sigmoid(8.0 + 40.0 * model(x)[:, 0])
    return -torch.log(torch.where(y == 0, p, 1 - p) + 1e-8).mean()


def test_a_logarithm_of_what_was_rounded_to_zero_is_finite_in_fp32():
    entry, _ = triage(TinyWorkload(loss=logarithm_of_probabilities), FP16)
    assert (entry["cause"], entry["module"], entry["op"]) == ("layer", None, "log")
    made = "output of `add` outside of every module, which it reads, is exactly zero in places"
    assert made in entry["sentence"]
    assert "in FP32 too" not in entry["sentence"]


def nan_at(step):
    def batches(seed, steps):
        for k, (x, y) in enumerate(class_batches(seed, steps)):
            if k == step:
                x[0, 0] = float("nan")
            yield x, y

    return batches


def test_a_batch_that_is_not_finite():
    entry, _ = triage(TinyWorkload(data=nan_at(7), held_out_batches=0), FP16)
    assert (entry["cause"], entry["step"]) == ("data", 7)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Linear(FEATURES, 24), nn.BatchNorm1d(24)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x):
        return self.head(self.bn(self.stem(x)).relu())


def outlier_batches(seed, steps):
    for k, (x, y) in enumerate(class_batches(seed, steps)):
        if k == 7:
            x[0] = 3e5
        yield x, y


def test_statistics_that_one_outlier_spoils():
    workload = TinyWorkload(model=Normed, data=outlier_batches, held_out_batches=0)
    entry, record = triage(workload, FP16)
    assert record.final["nonfinite_buffers"] > 0
    assert (entry["trigger"], entry["step"], entry["cause"]) == ("nonfinite_buffers", 7, "data")
    assert entry["module"] == "stem"
    assert "`bn.running_mean`, `bn.running_var` became non-finite" in entry["sentence"]
    assert "holds 300,000" in entry["sentence"]
    assert not any("losses of the run" in f["sentence"] for f in entry["findings"])


def blowing_up(model):
    return torch.optim.SGD(model.parameters(), lr=1e4)


@pytest.mark.parametrize("policy", [FP32, BF16, FP16], ids=lambda p: p.name)
def test_a_learning_rate_that_is_too_high(policy):
    def squared(model, batch):
        x, y = batch
        return (model(x).sum(-1) - y).square().mean()

    workload = TinyWorkload(loss=squared, optimizer=blowing_up, clip=None)
    entry, _ = triage(workload, policy, 60)
    assert entry["cause"] == "learning_rate"
    assert "10,000" in entry["sentence"]


def test_a_scale_that_is_too_large():
    policy = PrecisionPolicy(
        name="p",
        compute_format="fp16",
        loss_scale=LossScaleSettings(kind="static", init_scale=2.0**24),
    )
    entry, _ = triage(TinyWorkload(), policy, 30)
    assert (entry["trigger"], entry["cause"]) == ("loss_scale_collapse", "loss_scale")
    assert entry["direction"] == "backward"
    assert entry["step"] == 19
    assert "at loss scale 16,777,216" in entry["sentence"] or "1.68e7" in entry["sentence"]


def test_a_gradient_that_overflows_without_a_scale():
    def large(model, batch):
        return cross_entropy(model, batch) * 1e8

    entry, _ = triage(TinyWorkload(loss=large), UNSCALED)
    assert entry["trigger"] == "nonfinite_gradient"
    assert entry["cause"] == "layer"
    assert entry["kind"] == "gradient of"
    assert entry["value"] > entry["limit"]


def test_gradients_that_underflow():
    def tiny(model, batch):
        return cross_entropy(model, batch) * 1e-9

    entry, record = triage(TinyWorkload(loss=tiny, clip=None), UNSCALED)
    assert record.status == "completed"
    assert (entry["trigger"], entry["cause"]) == ("zero_gradients", "loss_scale")
    assert entry["direction"] == "backward"
    assert entry["value"] < 2**-24
    # At a uniform start the gradient of a logit is at most about 1 / BATCH of the loss's.
    assert entry["value"] == pytest.approx(1e-9 / BATCH, rel=0.05)


class DeadNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def large_batches(seed, steps):
    for x, y in class_batches(seed, steps):
        yield 1000 * x, y


def test_a_norm_that_dies_without_a_nan():
    def model():
        return nn.Sequential(nn.Linear(FEATURES, 24), DeadNorm(), nn.Linear(24, CLASSES))

    workload = TinyWorkload(model=model, data=large_batches, held_out_batches=0)
    entry, record = triage(workload, HAND_CAST, 30)
    assert record.status == "completed"
    assert (entry["trigger"], entry["cause"], entry["module"]) == ("zero_gradients", "silent", "1")
    assert entry["op"] == "pow"
    assert entry["direction"] == "forward"
    assert "output of `1` is all zeros" in entry["sentence"]
    assert "all gradients of `0` are exactly zero" in entry["sentence"]


class WithTarget(nn.Module):
    """A network and a slow copy of it that the forward pass moves."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)
        self.target = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.target.load_state_dict(self.net.state_dict())
        with torch.no_grad():
            self.net.bias.fill_(1.0)
            self.target.bias.fill_(1.0)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
                    slow.add_((fast - slow) * 1e-3)
        return self.net(x)


def test_a_target_network_that_sixteen_bits_freeze():
    workload = TinyWorkload(model=WithTarget)
    entry, record = triage(workload, BF16_PURE, 60)
    assert record.final["unmoved_tensors"] > 0
    assert (entry["trigger"], entry["cause"], entry["module"]) == (
        "unmoved_weights",
        "silent",
        "target",
    )
    assert "`target.bias`" in entry["sentence"]
    assert triage(workload, BF16, 60)[0] is None


class Center(nn.Module):
    """A running mean in a buffer, beside a constant one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((FEATURES,), 2.0))
        self.register_buffer("scale", torch.ones(FEATURES))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.999).add_(x.detach().mean(0).to(self.mean.dtype), alpha=0.001)
        return (x - self.mean) * self.scale


def test_a_running_mean_that_stands_still_in_bf16():
    def model():
        return nn.Sequential(Center(), nn.Linear(FEATURES, 24), nn.Linear(24, CLASSES))

    entry, record = triage(TinyWorkload(model=model), BF16_PURE, 60)
    assert record.final["unmoved_buffers"] == 2
    assert (entry["trigger"], entry["module"]) == ("unmoved_weights", "0")
    assert "no element of `0.mean` moved, while all of them moved under FP32" in entry["sentence"]
    entry, record = triage(TinyWorkload(model=model), BF16, 60)
    assert (entry, record.final["unmoved_buffers"]) == (None, 1)


def test_weights_that_nobody_moves_are_no_trouble():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Linear(FEATURES, 24).requires_grad_(False)
            self.head = nn.Linear(24, CLASSES)

        def forward(self, x):
            return self.head(self.backbone(x))

    entry, record = triage(TinyWorkload(model=Frozen), BF16, 60)
    assert record.final["unmoved_tensors"] == 2
    assert entry is None


def test_a_format_that_no_tensor_has():
    def model():
        net = nn.Sequential(nn.Linear(FEATURES, 24), nn.Linear(24, CLASSES))
        with torch.no_grad():
            net[0].weight.mul_(1e4)
        return net

    policy = PrecisionPolicy(name="p", compute_format="e4m3")
    entry, _ = triage(TinyWorkload(model=model), policy)
    assert (entry["module"], entry["op"], entry["format"]) == ("0", "rounding", "e4m3")
    assert entry["limit"] == 240.0
    assert entry["value"] > 240.0
    assert "rounded to E4M3 inside `0` reached" in entry["sentence"]


class TestReplaysThatFail:
    def test_one_that_does_not_repeat_the_run_says_so(self):
        calls = itertools.count()

        def data(seed, steps):
            first = next(calls) == 0
            for k, (x, y) in enumerate(class_batches(seed, steps)):
                if k == 7 and first:
                    x[0, 0] = float("nan")
                yield x, y

        entry, _ = triage(TinyWorkload(data=data, held_out_batches=0), FP16)
        assert entry["cause"] == "unknown"
        assert "did not give its losses again" in entry["sentence"]

    def test_one_that_raises_is_told(self):
        calls = itertools.count()

        def data(seed, steps):
            if next(calls):
                raise OSError("the disk is gone")
            yield from nan_at(7)(seed, steps)

        entry, _ = triage(TinyWorkload(data=data, held_out_batches=0), FP16)
        assert entry["cause"] == "unknown"
        assert "the replay ended with OSError: the disk is gone" in entry["sentence"]

    def test_it_leaves_global_state_as_it_was(self):
        workload = TinyWorkload(data=nan_at(7), held_out_batches=0)
        record = run(workload, FP16, 12)
        before = torch.get_rng_state(), torch.get_num_threads()
        triaged(record, workload, FP16, settings(12))
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == torch.get_num_threads()
        assert not torch.is_autocast_enabled("cpu")


def test_progress_is_told_and_only_the_steps_before_are_made():
    seen = []
    workload = TinyWorkload(data=nan_at(7), held_out_batches=0)
    record = run(workload, FP16, 12)
    triaged(record, workload, FP16, settings(12), on_progress=seen.append)
    assert seen
    assert max(p.step for p in seen) <= 7
