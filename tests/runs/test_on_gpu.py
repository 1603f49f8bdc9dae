"""Runs on a CUDA device: every policy trains, pairs with FP32, and probes tell what a CPU tells.

Their CPU twins are the conformance tests of policies, probes, dropout and workloads.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from tiny_workloads import (
    BF16,
    BF16_PURE,
    FP16,
    FP32,
    TF32,
    TinyWorkload,
    class_batches,
    cross_entropy,
    numbers,
)
from torch import nn

from harness.config import load_choice
from harness.numerics.exponents import exponent_histograms
from harness.numerics.formats import get_format
from harness.numerics.rounding import round_to_format
from harness.precision.execution import applied
from harness.precision.policy import PrecisionPolicy
from harness.probes.step_probes import StepProbes
from harness.runs.environment import describe_environment
from harness.runs.record import RunRecord
from harness.runs.same_point.probe import measure_same_point
from harness.runs.same_point.settings import KnownRun, SamePointSettings
from harness.runs.settings import ProbeSettings
from harness.runs.timing.step_times import measure_step_times
from harness.runs.trainer import RunSettings, train
from harness.runs.triage.finished_run import triaged
from harness.workloads.registry import make_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no CUDA device"),
]


def _run(workload: str, policy: str) -> RunRecord:
    device = torch.device("cuda")
    return train(
        make_workload(load_choice("workload", workload)),
        PrecisionPolicy.from_mapping(load_choice("policy", policy)),
        RunSettings(steps=20, seed=0, device="cuda", num_threads=1),
        run_key="gpu",
        environment=describe_environment(device, num_threads=1),
    )


@pytest.mark.parametrize("workload", ["char_gpt", "digits_convnet"])
@pytest.mark.parametrize("policy", ["tf32", "fp16", "bf16", "bf16_fallback", "bf16_pure"])
def test_a_candidate_pairs_with_fp32(workload: str, policy: str) -> None:
    reference, candidate = _run(workload, "fp32"), _run(workload, policy)
    assert (reference.status, candidate.status) == ("completed", "completed"), candidate.crash
    assert candidate.fingerprints == reference.fingerprints
    assert candidate.audit != reference.audit or policy == "tf32"
    assert reference.execution == "native"
    # The bound of the first-step warning for 16-bit formats: one rounding per layer at most.
    assert candidate.series["loss"][0] == pytest.approx(reference.series["loss"][0], rel=2**-5)
    assert candidate.peak_memory_bytes


CUDA = torch.device("cuda")
EVERY_STEP = ProbeSettings(
    exponents_every=1, weight_gradients_every=1, norms_every=1, lost_updates_every=1
)
FP8 = PrecisionPolicy(
    name="fp8",
    compute_format="fp8_e4m3",
    gradient_format="fp8_e5m2",
    operand_scaling="per_tensor",
)
E5M10 = PrecisionPolicy(name="e5m10", compute_format="e5m10", rounding="toward_zero")
STOCHASTIC = dataclasses.replace(BF16_PURE, name="stochastic", weight_rounding="stochastic")
DIRECTED = dataclasses.replace(
    BF16, name="directed", fp32_ops=("forward:gelu",), fp32_modules=("backward:3",)
)


def _name(policy: PrecisionPolicy) -> str:
    return policy.name


def _settings(device: str, steps: int = 6, probes: ProbeSettings = EVERY_STEP) -> RunSettings:
    return RunSettings(steps=steps, seed=0, device=device, num_threads=1, probes=probes)


def _train(
    workload: TinyWorkload,
    policy: PrecisionPolicy,
    device: str = "cuda",
    *,
    steps: int = 6,
    probes: ProbeSettings = EVERY_STEP,
) -> RunRecord:
    record = train(
        workload,
        policy,
        _settings(device, steps, probes),
        run_key="gpu",
        environment=describe_environment(torch.device(device), num_threads=1),
    )
    assert record.crash is None, record.crash.traceback
    return record


class Encoder(nn.Module):
    """Attention, convolution, normalization, recurrence and dropout in one small model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 16)
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.recurrent = nn.GRU(16, 16, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.inner(x).unflatten(0, (4, 4))
        tokens = self.attention(tokens)
        tokens = self.convolution(tokens.transpose(1, 2)).transpose(1, 2)
        return self.out(self.recurrent(tokens)[0].flatten(0, 1))


def _gelu_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 4))


MLP = TinyWorkload(model=_gelu_mlp)
ENCODER = TinyWorkload(model=Encoder)
# What is new in each is a path of its own on a GPU: kernels at autocast's key, rounding in the
# dispatcher, a generator on the device, two runs of one op.
ALL = [FP32, TF32, BF16, FP16, BF16_PURE, STOCHASTIC, FP8, E5M10, DIRECTED]
NOT_DIRECTED = ALL[:-1]


@pytest.mark.parametrize("policy", ALL, ids=_name)
def test_probes_at_every_step_change_nothing(policy: PrecisionPolicy) -> None:
    with_probes = _train(MLP, policy)
    without = _train(MLP, policy, probes=ProbeSettings.off())
    ours, bare = numbers(with_probes), numbers(without)
    for measured in (ours, bare):
        measured["sampled"] = measured["histograms"] = None
        measured["final"].pop("zero_grad_share", None)
    assert repr(ours) == repr(bare)


@pytest.mark.parametrize("policy", NOT_DIRECTED, ids=_name)
def test_attention_convolution_and_recurrence_train(policy: PrecisionPolicy) -> None:
    record = _train(ENCODER, policy)
    reference = _train(ENCODER, FP32, probes=ProbeSettings.off())
    assert record.fingerprints == reference.fingerprints
    assert all(map(math.isfinite, record.series["loss"]))
    assert set(record.probes) >= {"audit", "exponents", "norms", "lost_updates", "memory"}
    expected = 0.0 if policy is FP32 else 1.0
    assert record.probes["audit"]["low_precision_flop_share"] == expected
    logits = record.probes["norms"]["modules"]["attention.self_attn"]["attention_logit_max"]
    assert logits[0] > 0


@pytest.mark.parametrize("policy", [TF32, FP8, E5M10], ids=_name)
def test_an_emulated_step_is_that_of_a_cpu(policy: PrecisionPolicy) -> None:
    """The rounding is bit by bit the same; the products add up in another order."""
    losses, formats = [], []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = _gelu_mlp().eval().to(device)
        batch = tuple(t.to(device) for t in next(class_batches(0, 1)))
        where = torch.device(device)
        with applied(policy, model, device=where, backend="emulated") as execution:
            with execution.audit() as audit, execution.forward():
                loss = cross_entropy(model, batch)
            loss.backward()
        assert execution.kind == "emulated"
        formats.append(audit["addmm"])
        losses.append(
            torch.cat([loss.detach().view(1), *(p.grad.flatten() for p in model.parameters())])
        )
    assert formats[0] == formats[1]
    cpu, cuda = losses[0].cpu(), losses[1].cpu()
    # An operand that lies on a boundary may fall to the other side: FP8's next value is 2^-3 away.
    assert (cpu - cuda).norm() < 1e-2 * cpu.norm()


@pytest.mark.parametrize("rounding", ["nearest", "toward_zero"])
@pytest.mark.parametrize("name", ["tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "e3m4", "e8m3"])
def test_rounding_is_that_of_a_cpu(name: str, rounding: str) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=_generator())
    values = torch.cat([bits.to(torch.int32).view(torch.float32), torch.randn(50_000)])
    values = values[~values.isnan()]
    fmt = get_format(name)
    expected = round_to_format(values, fmt, rounding=rounding)
    found = round_to_format(values.cuda(), fmt, rounding=rounding).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "e3m4"])
def test_stochastic_rounding_has_no_bias(name: str) -> None:
    value, draws = 1.03, 1 << 20
    rounded = round_to_format(
        torch.full((draws,), value, device="cuda"),
        get_format(name),
        rounding="stochastic",
        generator=torch.Generator(CUDA).manual_seed(0),
    )
    spread = float(rounded.double().std()) / math.sqrt(draws)
    assert float(rounded.double().mean()) == pytest.approx(value, abs=6 * spread)


def test_histograms_of_any_layout_are_those_of_a_cpu() -> None:
    base = torch.randn(70_000, generator=_generator()) * torch.logspace(-44, 38, 70_000)
    tensors = [
        base,
        base[1:],  # not aligned
        base[:60_000].view(200, 300).t(),  # not contiguous
        base[::7],
        base[:1].view(()),
        base[:0],
        base.bfloat16(),
        base.half(),  # overflows to infinity
        base.double(),
        base[:1000].expand(3, 1000),
    ]
    expected = exponent_histograms(tensors)
    found = exponent_histograms([t.cuda() for t in tensors])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    # A view on the device, not a copy of one.
    on_device = base.cuda()
    strided = [on_device[1:], on_device[:60_000].view(200, 300).t(), on_device[::7]]
    assert torch.equal(exponent_histograms(strided)[0].cpu(), expected[0][1:4])


def test_what_probes_counted_of_the_first_step_is_what_a_cpu_counts() -> None:
    """Weights are the same bits; the first gradients differ in the order of their sums."""
    ours, theirs = (
        _train(MLP, FP32, device, steps=1).probes["exponents"]["modules"]
        for device in ("cuda", "cpu")
    )
    assert ours.keys() == theirs.keys()
    for module, kinds in theirs.items():
        assert ours[module].keys() == kinds.keys()
        if "weights" in kinds:
            assert ours[module]["weights"] == kinds["weights"]
        for kind, counts in kinds.items():
            assert ours[module][kind]["elements"] == counts["elements"]
            moved = sum(
                abs(ours[module][kind]["bins"].get(b, 0) - counts["bins"].get(b, 0))
                for b in {*ours[module][kind]["bins"], *counts["bins"]}
            )
            # A value next to a power of two may fall into the neighbouring bin.
            assert moved <= 2 + 0.02 * counts["elements"]


def test_the_same_point_probe() -> None:
    policies = [dataclasses.replace(FP32, name="again"), TF32, BF16, FP16, STOCHASTIC, FP8]
    known = _train(MLP, FP32, steps=12, probes=ProbeSettings.off())
    found = measure_same_point(
        MLP,
        policies,
        _settings("cuda", 12, ProbeSettings.off()),
        reference=FP32,
        probe=SamePointSettings(points=(0.5, 1.0), batches=4),
        known=KnownRun(
            losses=known.series["loss"],
            batches=known.fingerprints.batches,
            learning_rates=known.series["learning_rate"],
        ),
    )
    for name, record in found.items():
        assert record.failed is None, (name, record.failed)
        assert record.same_trajectory is True
        assert record.modules[0].fp64_error is not None, record.notes
        path = [p for p in record.points if p.kind == "trajectory"]
        nu = sum(p.error_sq for p in path) / sum(p.noise for p in path)
        # FP8's unit roundoffs are 2^-4 and 2^-3, those of the others 2^-8 and less.
        assert nu < (0.1 if name == "fp8" else 0.01)
        assert all(p.retained / p.updated > 0.9 for p in record.points)
    assert all(p.error_sq == 0 for p in found["again"].points)


def test_triage_names_the_op() -> None:
    class Large(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3e4

    workload = TinyWorkload(
        model=lambda: nn.Sequential(nn.Linear(12, 24), Large(), nn.Linear(24, 4)), clip=None
    )
    policy = PrecisionPolicy(name="fp16_unscaled", compute_format="fp16")
    record = _train(workload, policy, probes=ProbeSettings.off())
    entry = triaged(record, workload, policy, _settings("cuda")).probes["triage"]
    assert (entry["module"], entry["op"], entry["direction"]) == ("1", "mul", "forward")
    assert "65,504" in entry["sentence"]


def test_a_profile_counts_the_time_of_kernels() -> None:
    record = measure_step_times(
        MLP,
        [FP32, BF16],
        _settings("cuda"),
        reference="fp32",
        blocks=2,
        steps_per_block=2,
        profile_steps=2,
    )
    assert record.profiles["bf16"].low_precision_share > 0
    assert record.profiles["fp32"].low_precision_share == 0
    assert sum(record.profiles["bf16"].families.values()) == pytest.approx(1.0)


@contextmanager
def _waits_noted(found: list[str]) -> Iterator[None]:
    """Add a message per wait for the device, as torch itself tells of synchronizing calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [str(w.message) for w in caught if "synchroniz" in str(w.message)]


def test_a_wait_would_be_noted() -> None:
    found: list[str] = []
    with _waits_noted(found):
        torch.ones(3, device=CUDA).sum().item()
    assert found


@pytest.mark.parametrize("policy", [FP32, BF16, BF16_PURE, STOCHASTIC, FP8], ids=_name)
def test_probes_wait_for_nothing_inside_a_step(
    policy: PrecisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watched from a step's first hook to its last; what was measured is fetched between steps."""
    watching, found = StepProbes.watching, []

    @contextmanager
    def watched(probes: StepProbes, step: int, *, loss_scale: float) -> Iterator[None]:
        # The first step compiles kernels and is audited.
        noted = _waits_noted(found) if step else nullcontext()
        with noted, watching(probes, step, loss_scale=loss_scale):
            yield

    monkeypatch.setattr(StepProbes, "watching", watched)
    _train(dataclasses.replace(MLP, optimizer=_sgd), policy, steps=8)
    assert found == []


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
