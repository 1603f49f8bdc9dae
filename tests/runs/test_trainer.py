"""One run: A/A equality, the oracle of a hand-written loop, statuses, crashes, planted faults."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_workloads import (
    BF16,
    BF16_PURE,
    FP16,
    FP32,
    POLICIES,
    TF32,
    TWIN,
    TinyWorkload,
    adamw,
    class_batches,
    cross_entropy,
    dropout_mlp,
    numbers,
    run,
    settings,
)
from torch import nn

from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.runs.determinism import seed_torch, stream_seed
from harness.runs.record import RunRecord
from harness.runs.settings import ProbeSettings
from harness.runs.trainer import Progress, train


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_same_run_twice_is_bitwise_equal(policy: PrecisionPolicy) -> None:
    """A/A."""
    assert numbers(run(policy=policy)) == numbers(run(policy=policy))


def test_another_seed_changes_weights_batches_and_masks() -> None:
    one, other = run(seed=0).fingerprints, run(seed=1).fingerprints
    assert one.init_sha256 != other.init_sha256
    assert not set(one.batches) & set(other.batches)
    assert not set(one.dropout) & set(other.dropout)


@pytest.mark.parametrize("policy", POLICIES[1:], ids=lambda p: p.name)
def test_policies_share_weights_batches_and_masks(policy: PrecisionPolicy) -> None:
    reference, candidate = run(), run(policy=policy)
    assert candidate.fingerprints == reference.fingerprints
    assert all(reference.fingerprints.dropout)
    assert candidate.series["loss"] != reference.series["loss"]


def test_record_survives_a_round_trip() -> None:
    record = run(policy=FP16)
    assert RunRecord.from_json(record.to_json()) == record


def test_fp32_run_equals_a_hand_written_loop() -> None:
    """Oracle: bitwise, since every op and their order are those of the plain loop."""
    workload = TinyWorkload(model=lambda: nn.Linear(12, 4), clip=0.1)
    record = run(workload, steps=8)
    model = workload.build_model(0)
    optimizer = adamw(model)
    losses, norms = [], []
    for batch in class_batches(0, 8):
        loss = cross_entropy(model, batch)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert record.series["loss"] == tuple(losses)
    assert record.series["grad_norm"] == tuple(norms)


def test_probes_change_nothing() -> None:
    often = run(probes=ProbeSettings(weight_gradients_every=1, lost_updates_every=1))
    seldom = run(probes=ProbeSettings(weight_gradients_every=1000, lost_updates_every=1000))
    assert len(often.sampled_steps) == 10
    assert seldom.sampled_steps == (0, 9)
    assert often.series["loss"] == seldom.series["loss"]
    assert often.held_out == seldom.held_out


def test_held_out_evaluation_changes_nothing() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))

    with_it = run(TinyWorkload(model=model, held_out_batches=3))
    without = run(TinyWorkload(model=model, held_out_batches=0))
    assert with_it.held_out is not None
    assert without.held_out is None
    assert with_it.series["loss"] == without.series["loss"]
    assert with_it.final == without.final


def test_perturbed_control_starts_from_the_same_fingerprint() -> None:
    reference, control = run(), run(policy=TWIN)
    assert control.fingerprints.init_sha256 == reference.fingerprints.init_sha256
    first = control.series["loss"][0] / reference.series["loss"][0] - 1
    # 2^-8 relative noise on weights moves the loss by less than ten times that, but not by zero.
    assert 0 < abs(first) < 10 * 2**-8


def test_global_state_is_as_before() -> None:
    seed_torch(7, torch.device("cpu"))
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    expected = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    seed_torch(7, torch.device("cpu"))
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    run(policy=BF16)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]  # noqa: NPY002
    # The dropout kernels are torch's own again: they draw from the default generator as before.
    seed_torch(7, torch.device("cpu"))
    first = torch.nn.functional.dropout(torch.ones(64), 0.5)
    seed_torch(7, torch.device("cpu"))
    mask = torch.empty(64).bernoulli_(0.5)
    assert torch.equal(first, mask * 2)


def test_iterator_on_the_global_generator_sees_the_same_batches_under_every_policy() -> None:
    """The model draws noise in its compute format; the iterator draws from torch's global state."""

    def data(seed: int, steps: int):
        torch.manual_seed(seed)
        for _ in range(steps):
            x = torch.randn(16, 12)
            yield x, (x[:, 0] > 0).long()

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y + 0.1 * torch.randn_like(y) * torch.empty_like(y).bernoulli_(0.7)

    workload = TinyWorkload(model=Noisy, data=data)
    prints = {p.name: run(workload, p).fingerprints for p in (FP32, BF16, FP16)}
    assert len(set(prints["fp32"].batches)) == 10
    assert prints["fp32"] == prints["bf16"] == prints["fp16"]


def test_swapped_batches_are_caught() -> None:
    """Planted fault: the same batches in another order."""

    def swapped(seed: int, steps: int):
        batches = list(class_batches(seed, steps))
        if steps == 10:
            batches[3], batches[4] = batches[4], batches[3]
        return iter(batches)

    one, other = run().fingerprints.batches, run(TinyWorkload(data=swapped)).fingerprints.batches
    assert [a == b for a, b in zip(one, other, strict=True)] == [i not in (3, 4) for i in range(10)]


def test_masks_that_depend_on_the_dtype_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: without the harness' kernels' key, 16-bit activations get other masks."""
    from harness.runs import dropout

    original = dropout._Masks.draw

    def faulty(self: dropout._Masks, shape: tuple[int, ...], p: float) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            torch.rand(1)
        return original(self, shape, p)

    monkeypatch.setattr(dropout._Masks, "draw", faulty)
    reference, candidate = run().fingerprints, run(policy=BF16).fingerprints
    assert reference.batches == candidate.batches
    assert all(a != b for a, b in zip(reference.dropout, candidate.dropout, strict=True))


def test_skipped_steps_keep_their_place_and_the_schedule_goes_on() -> None:
    """FP16 from an absurd scale skips the first steps; a pair stays aligned by batch index."""

    def halving(optimizer: torch.optim.Optimizer, steps: int):
        del steps
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    policy = PrecisionPolicy(
        name="fp16",
        compute_format="fp16",
        loss_scale=LossScaleSettings(kind="dynamic", init_scale=2.0**40),
    )
    workload = TinyWorkload(scheduler=halving)
    reference, candidate = run(workload), run(workload, policy)
    skipped = candidate.series["skipped"]
    assert skipped[:3] == (1.0, 1.0, 1.0)
    assert candidate.series["loss_scale"][:3] == (2.0**40, 2.0**39, 2.0**38)
    assert min(candidate.series["nonfinite_grad"][:3]) > 0
    assert candidate.series["learning_rate"] == reference.series["learning_rate"]
    assert candidate.fingerprints == reference.fingerprints
    assert candidate.status == "completed"


def test_scaled_gradients_have_fp32_norms_and_clipping_them_first_is_visible() -> None:
    """The planted fault of clipping before unscaling shrinks the update by the scale."""
    sgd = TinyWorkload(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.5), clip=0.5)
    faulty = PrecisionPolicy(
        name="fault",
        compute_format="fp16",
        loss_scale=LossScaleSettings(kind="static", init_scale=1024.0),
        clip_before_unscale=True,
    )
    reference, good, bad = run(sgd, steps=40), run(sgd, FP16, 40), run(sgd, faulty, 40)
    # FP16 operands carry 2^-11 relative error each; the first norm agrees far within 1 %.
    assert good.series["grad_norm"][0] == pytest.approx(reference.series["grad_norm"][0], rel=0.01)
    assert good.series["loss"][-1] == pytest.approx(reference.series["loss"][-1], rel=0.1)
    assert bad.series["loss"][-1] > 2 * reference.series["loss"][-1]
    assert bad.series["grad_norm"][0] < 0.01 * reference.series["grad_norm"][0]


def test_tiny_gradients_without_a_scaler_vanish_and_the_counts_say_so() -> None:
    """Planted fault: FP16 without scaling on gradients below 2^-25."""
    tiny = TinyWorkload(
        loss=lambda m, b: cross_entropy(m, b) * 1e-9,
        clip=None,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e9),
    )
    unscaled = PrecisionPolicy(name="fp16_unscaled", compute_format="fp16")
    reference, candidate = run(tiny), run(tiny, unscaled)
    assert reference.final["zero_grad_share"] < 0.5
    flushed = reference.sampled["grad_flushed_fp16"][0] / reference.sampled["grad_nonzero"][0]
    assert flushed > 0.9
    assert candidate.final["zero_grad_share"] == 1.0
    assert candidate.final["moved_weight_share"] == 0.0


def test_pure_bf16_weights_at_a_small_rate_lose_their_updates() -> None:
    """Planted fault, observed view; and the what-if view from FP32 weights sees it coming."""
    slow = TinyWorkload(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-4))
    reference, candidate = run(slow), run(slow, BF16_PURE)
    for record in (reference, candidate):
        lost = sum(record.sampled["lost_update_bf16"]) / sum(record.sampled["update_total"])
        assert lost > 0.8
    # moved from where BF16 storage put them
    assert candidate.final["moved_weight_share"] < 0.5 < reference.final["moved_weight_share"]


def test_divergence_stops_the_run_and_is_data() -> None:
    explosive = TinyWorkload(
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e30), clip=None
    )
    record = run(explosive, steps=200)
    assert record.status == "diverged"
    assert 25 < len(record.series["loss"]) < 100
    assert len(record.fingerprints.batches) == len(record.series["loss"])
    assert record.final["nonfinite_weights"] > 0
    assert [e["kind"] for e in record.events] == ["nonfinite_loss", "stopped"]


def test_one_bad_loss_in_the_middle_is_not_divergence() -> None:
    calls = []

    def loss(model: nn.Module, batch: object) -> torch.Tensor:
        if model.training:
            calls.append(1)
        value = cross_entropy(model, batch)
        return value + math.inf * 0 if len(calls) == 4 else value

    policy = PrecisionPolicy(
        name="scaled", loss_scale=LossScaleSettings(kind="dynamic", init_scale=4.0)
    )
    record = run(TinyWorkload(loss=loss), policy)
    assert record.status == "completed"
    assert math.isnan(record.series["loss"][3])


def test_parameters_of_every_kind() -> None:
    """Tied, unused, frozen, sparse and complex parameters in one model."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 12, sparse=True)
            self.out = nn.Linear(12, 6, bias=False)
            self.tied = self.out
            self.unused = nn.Linear(3, 3)
            self.frozen = nn.Parameter(torch.ones(12), requires_grad=False)
            self.spectrum = nn.Parameter(torch.randn(7, dtype=torch.complex64))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids) * self.frozen
            x = torch.fft.irfft(torch.fft.rfft(x.float()) * self.spectrum, n=12)
            return self.out(x) + self.tied(x)

    def data(seed: int, steps: int):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            ids = torch.randint(6, (16,), generator=generator)
            yield ids, (ids + 1) % 6

    workload = TinyWorkload(
        model=Odd, data=data, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )
    for policy in (FP32, BF16, TF32):
        record = run(workload, policy, probes=ProbeSettings(exponents_every=2))
        assert record.status == "completed"
        assert record.final["num_parameters"] == 72 + 72 + 12 + 12 + 7
        assert all(0 < n < math.inf for n in record.series["grad_norm"])
    crashed = run(workload, FP16, crash_expected=True)
    assert crashed.status == "crashed"
    assert crashed.crash is not None
    assert crashed.crash.not_expressible
    assert "complex gradient of `spectrum`" in crashed.crash.sentence
    assert "at step 0" in crashed.crash.sentence


def test_optimizer_with_a_closure() -> None:
    workload = TinyWorkload(
        optimizer=lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=4), clip=None
    )
    reference, candidate = run(workload), run(workload, BF16)
    assert reference.series["loss"][-1] < reference.series["loss"][0]
    # Line searches may take different numbers of evaluations; the masks of a step are one.
    assert candidate.fingerprints == reference.fingerprints
    scaled = run(workload, FP16, crash_expected=True)
    assert scaled.crash is not None
    assert scaled.crash.not_expressible
    assert "closure" in scaled.crash.sentence


def test_crash_names_step_module_and_line() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += self.training
            if self.calls == 4:
                raise IndexError("no such thing\nsecond line")
            return x

    model = lambda: nn.Sequential(nn.Linear(12, 4), nn.Sequential(Fragile()))  # noqa: E731
    record = run(TinyWorkload(model=model), crash_expected=True)
    crash = record.crash
    assert record.status == "crashed"
    assert crash is not None
    assert (crash.kind, crash.step, crash.module) == ("IndexError", 3, "1.0")
    assert crash.message == "no such thing"
    assert "test_trainer.py:" in crash.sentence
    assert "second line" in crash.traceback
    assert len(record.series["loss"]) == len(record.fingerprints.batches) == 3
    assert RunRecord.from_json(record.to_json()) == record


def test_crash_in_a_custom_backward_names_the_module() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

    class Op(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(12, 12) / 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Doubled.apply(x, self.w)

    model = lambda: nn.Sequential(nn.Linear(12, 12), Op(), nn.Linear(12, 4))  # noqa: E731
    workload = TinyWorkload(model=model)
    assert run(workload).status == "completed"
    crash = run(workload, BF16, crash_expected=True).crash
    assert crash is not None
    assert (crash.step, crash.module) == (0, "1")
    assert "backward pass at step 0, module `1`" in crash.sentence


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (TinyWorkload(data=lambda s, n: class_batches(s, 4)), "ended after 4 of 10 batches"),
        (TinyWorkload(model=lambda: 1 / 0), "while building the model"),  # type: ignore[arg-type, return-value]
        (TinyWorkload(loss=lambda m, b: 1.0), "loss_fn returned float"),  # type: ignore[arg-type, return-value]
        (TinyWorkload(optimizer=lambda m: torch.optim.SGD([], lr=1)), "making the optimizer"),
        (TinyWorkload(evaluation=lambda m: {}["x"]), "evaluating on held-out data"),
    ],
)
def test_every_crash_is_a_record_with_one_sentence(workload: TinyWorkload, words: str) -> None:
    record = run(workload, crash_expected=True)
    assert record.status == "crashed"
    assert record.crash is not None
    assert words in record.crash.sentence
    assert "\n" not in record.crash.sentence


def test_interruption_passes_through() -> None:
    def interrupted(model: nn.Module, batch: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(TinyWorkload(loss=interrupted, held_out_batches=0))
    # nothing stays registered or switched
    assert numbers(run()) == numbers(run())


def test_loss_computed_in_16_bits_is_found() -> None:
    rounded = TinyWorkload(loss=lambda m, b: cross_entropy(m, b).to(torch.bfloat16))
    record = run(rounded, steps=20)
    assert record.loss_dtype == "bfloat16"
    assert record.loss_on_16bit_grid == "bf16"
    hidden = TinyWorkload(loss=lambda m, b: cross_entropy(m, b).half().float())
    assert run(hidden, steps=20).loss_on_16bit_grid == "fp16"
    assert run(steps=20).loss_on_16bit_grid is None


def test_a_precision_switch_set_by_the_workload_is_noted() -> None:
    """The reference would compute in TF32 on a GPU while its record says IEEE."""

    def switching(model: nn.Module, batch: Any) -> torch.Tensor:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        return cross_entropy(model, batch)

    record = run(TinyWorkload(loss=switching, held_out_batches=0))
    assert record.environment["backend_switches"]["cuda.matmul"] == "ieee"
    notes = [event["message"] for event in record.events if event["kind"] == "note"]
    assert notes == ["code of the workload set the backend switch cuda.matmul to tf32"]
    assert not run(TinyWorkload(held_out_batches=0)).events


def test_progress_arrives_and_ends_at_the_last_step() -> None:
    seen: list[Progress] = []
    train(TinyWorkload(), FP32, settings(30), run_key="k", environment={}, on_progress=seen.append)
    assert (seen[-1].step, seen[-1].steps) == (30, 30)
    assert seen[-1].loss is not None


def test_modules_in_eval_mode_stay_there() -> None:
    """A frozen BatchNorm keeps its statistics through training and evaluations."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(12)
            self.out = nn.Linear(12, 4)
            self.norm.eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not self.norm.training
            return self.out(self.norm(x))

    assert run(TinyWorkload(model=Frozen)).status == "completed"


def test_memory_and_environment_are_recorded() -> None:
    record = run(TinyWorkload(model=dropout_mlp))
    assert record.peak_memory_bytes is None or record.peak_memory_bytes > 10_000_000
    assert record.peak_memory_source
    assert record.environment["device_kind"] == "cpu"
    assert record.environment["data_sha256"] == "0" * 64
    assert record.samples_per_step == 16
    assert record.tokens_per_step is None
    assert record.audit
    assert record.settings["train"]["steps"] == 10


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="steps=0"):
        settings(0)


def test_step_seeds_do_not_repeat() -> None:
    seeds = {
        stream_seed(s, stream=name, index=i)
        for s in range(5)
        for name in ("data", "step")
        for i in range(100)
    }
    assert len(seeds) == 1000
    assert all(0 <= s < 2**63 for s in seeds)


def test_optimizer_that_finds_its_own_rate() -> None:
    class SignDescent(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=0.001)

    record = run(TinyWorkload(optimizer=lambda model: SignDescent(model.parameters())), steps=3)
    assert all(math.isnan(rate) for rate in record.series["learning_rate"])


def test_runs_that_change_shared_data_in_place_stay_paired() -> None:
    shared = list(class_batches(0, 3))

    def data(seed: int, steps: int) -> Iterator[Any]:
        return iter(shared[:steps])

    def augmenting(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model, (batch[0].mul_(1.1), batch[1]))

    workload = TinyWorkload(data=data, loss=augmenting)
    reference, candidate = run(workload, steps=3), run(workload, BF16, steps=3)
    assert candidate.fingerprints == reference.fingerprints
    assert numbers(run(workload, steps=3)) == numbers(reference)


def test_tracing_for_the_output_head_trains_the_same_model() -> None:
    """A policy that traces a forward pass first must not be one call ahead of the others."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(12, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layer(x + math.sin(self.calls))

    workload = TinyWorkload(model=Counting)
    traced = PrecisionPolicy(name="traced", compute_format="tf32", fp32_selectors=("output_head",))
    # The only product is kept in FP32, so that nothing but the trace differs.
    assert run(workload, traced).series["loss"] == run(workload, FP32).series["loss"]
