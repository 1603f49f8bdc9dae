"""Norms: every metric against plain FP64 arithmetic, odd tensors, logits, bitwise neutrality."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.precision.policy import PrecisionPolicy
from harness.probes.attention_logits import AttentionLogits, largest_logit
from harness.probes.base import NamedTensor
from harness.probes.norm_columns import _rounded
from harness.probes.norms import ACTIVATIONS_EVERY, NormsProbe
from harness.probes.tensor_sizes import by_module, gather, measurable
from harness.runs.settings import ProbeSettings, RunSettings
from harness.runs.trainer import train
from harness.workloads.registry import make_workload

# Sums in FP32, stored to six digits.
CLOSE = {"rel": 2e-5}
ONLY_NORMS = ProbeSettings(
    exponents_every=None,
    weight_gradients_every=None,
    norms_every=1,
    lost_updates_every=None,
    memory=False,
)


def named(module: str, *values: Tensor) -> list[NamedTensor]:
    return [NamedTensor(module=module, name=str(k), value=v) for k, v in enumerate(values)]


def rms(*tensors: Tensor) -> float:
    flat = torch.cat([t.double().reshape(-1) for t in tensors])
    return float(flat.square().mean().sqrt())


def one_step(
    weights: Sequence[NamedTensor],
    gradients: Sequence[NamedTensor],
    change: Callable[[], Any],
    *,
    skipped: bool = False,
    inside: Callable[[NormsProbe], Any] = lambda probe: None,
) -> dict[str, dict[str, list[float | None]]]:
    probe = NormsProbe(every=1, num_steps=1)
    probe.start(0, loss_scale=1.0)
    inside(probe)
    probe.gradients(gradients)
    probe.before_update(weights)
    change()
    probe.after_update(weights, skipped=skipped)
    probe.flush()
    json.dumps(probe.result(), allow_nan=True)
    modules: dict[str, dict[str, list[float | None]]] = probe.result()["modules"]
    return modules


@pytest.mark.parametrize("table", [True, False])
def test_every_metric_against_plain_arithmetic(
    table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the definitions, in FP64, on a module of two tensors beside one of one."""
    if not table:
        monkeypatch.setattr("harness.probes.tensor_sizes.TABLE_ELEMENTS", 0)
    torch.manual_seed(0)
    w, b, v = torch.randn(7, 5), torch.randn(7) * 3, torch.randn(4)
    gw, gb = torch.randn(7, 5), torch.zeros(7)
    gw[0] = 0.0
    old = w.clone(), b.clone()
    x, y = torch.randn(2, 5), torch.randn(2, 7).relu()
    found = one_step(
        [*named("first", w, b), *named("second", v)],
        named("first", gw, gb),
        lambda: (w.mul_(1.01), b.sub_(0.5)),
        inside=lambda probe: (
            probe.forward("first", [x], [y]),
            probe.forward("first", [2 * x], [y]),
        ),
    )
    first = {metric: column[0] for metric, column in found["first"].items()}
    updates = w.double() - old[0].double(), b.double() - old[1].double()
    assert first["weight_rms"] == pytest.approx(rms(*old), **CLOSE)
    assert first["weight_max"] == pytest.approx(float(max(t.abs().max() for t in old)), **CLOSE)
    assert first["grad_rms"] == pytest.approx(rms(gw, gb), **CLOSE)
    assert first["grad_max"] == pytest.approx(float(gw.abs().max()), **CLOSE)
    assert first["grad_zero_share"] == pytest.approx((5 + 7) / 42)
    assert first["update_rms"] == pytest.approx(rms(*updates), **CLOSE)
    assert first["update_max"] == pytest.approx(0.5, **CLOSE)
    assert first["update_to_weight"] == pytest.approx(rms(*updates) / rms(*old), **CLOSE)
    assert first["input_rms"] == pytest.approx(rms(x, 2 * x), **CLOSE)
    assert first["input_max"] == pytest.approx(2 * float(x.abs().max()), **CLOSE)
    assert first["output_rms"] == pytest.approx(rms(y), **CLOSE)
    assert first["output_max"] == pytest.approx(float(y.max()), **CLOSE)
    assert first["output_zero_share"] == pytest.approx(float((y == 0).double().mean()))
    assert found["second"]["weight_rms"][0] == pytest.approx(rms(v), **CLOSE)
    assert found["second"]["update_to_weight"] == [0.0]
    assert "grad_rms" not in found["second"]
    assert set(first) | {"attention_logit_max"} == set(NormsProbe.metrics)


def test_a_skipped_step_moved_nothing() -> None:
    w = torch.ones(3)
    found = one_step(named("m", w), named("m", torch.ones(3)), lambda: None, skipped=True)["m"]
    assert found["update_rms"] == found["update_max"] == found["update_to_weight"] == [0.0]


@pytest.mark.parametrize("limit", [0, 100])
def test_sixteen_bit_updates_are_exact_differences(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.probes.tensor_sizes.TABLE_ELEMENTS", limit)
    w = torch.full((4,), 256.0, dtype=torch.bfloat16)
    found = one_step(named("m", w), [], lambda: w.add_(2.0))["m"]
    assert found["update_max"] == [2.0]
    assert found["weight_rms"] == [256.0]


@pytest.mark.parametrize("size", [1, 128, 256])
def test_the_update_of_a_single_tensor(size: int) -> None:
    w = torch.ones(size)
    found = one_step(named("m", w), [], lambda: w.add_(1.0))["m"]
    assert found["update_rms"] == found["update_max"] == [1.0]


@pytest.mark.parametrize(
    ("tensor", "largest"),
    [
        (torch.tensor([3 + 4j, 0]), 4.0),
        (torch.tensor([3 + 4j, 0]).conj(), 4.0),
        (torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True), 5.0),
        (torch.tensor([-7, 2]), 7.0),
        (torch.tensor(-2.5), 2.5),
        (torch.tensor([True, False]), 1.0),
        (torch.tensor([448.0]).to(torch.float8_e4m3fn), 448.0),
        (torch.tensor([1e300], dtype=torch.float64), 1e300),
    ],
)
def test_tensors_of_any_kind(tensor: Tensor, largest: float) -> None:
    gathered = gather(named("m", tensor))
    assert gathered is not None
    assert by_module([gathered.measured(zeros=True)]).largest.tolist() == [[largest]]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_compressed_sparse_tensors() -> None:
    values = measurable((3 * torch.eye(3)).to_sparse_csr())
    assert values is not None
    assert float(values.max()) == 3.0


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_what_has_no_values_is_not_applicable() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    assert measurable(quantized) is None
    assert measurable(torch.empty(0, 3)) is None
    assert gather(named("m", torch.empty(0), quantized)) is None
    found = one_step(named("m", torch.empty(0)), [], lambda: None)
    assert found == {}


@pytest.mark.parametrize("limit", [0, 1000])
def test_zeros_are_counted_among_real_elements(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fills a table up is no zero, and a NaN is none."""
    monkeypatch.setattr("harness.probes.tensor_sizes.TABLE_ELEMENTS", limit)
    values = torch.ones(130)
    values[:10], values[20] = 0.0, math.nan
    gathered = gather([*named("a", values, torch.zeros(64)), *named("b", torch.ones(1))])
    assert gathered is not None
    sizes = by_module([gathered.measured(zeros=True)])
    assert sizes.zero_share is not None
    assert sizes.zero_share.tolist() == [[pytest.approx(74 / 194), 0.0]]


def test_large_tensors_are_measured_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sizes, and never more magnitudes at once than a group holds."""
    tensors = named("m", torch.randn(40), -9 * torch.ones(70), torch.randn(30), torch.randn(20))
    expected = gather(tensors)
    monkeypatch.setattr("harness.probes.tensor_sizes.TABLE_ELEMENTS", 0)
    monkeypatch.setattr("harness.probes.tensor_sizes.CHUNK_ELEMENTS", 50)
    magnitudes, held = torch._foreach_abs, []

    def seen(group: list[torch.Tensor]) -> object:
        held.append(sum(tensor.numel() for tensor in group))
        return magnitudes(group)

    monkeypatch.setattr(torch, "_foreach_abs", seen)
    gathered = gather(tensors)
    assert gathered is not None
    assert expected is not None
    ours, theirs = by_module([gathered.measured()]), by_module([expected.measured()])
    assert ours.largest.tolist() == theirs.largest.tolist() == [[9.0]]
    assert held == [40, 70, 50]


def test_nonfinite_values_are_told_and_squares_out_of_range_are_not_made_up() -> None:
    def sizes(*values: float) -> tuple[float | None, float]:
        found = one_step(named("m", torch.tensor(values)), [], lambda: None)["m"]
        (root_mean_square,), (largest,) = found["weight_rms"], found["weight_max"]
        assert largest is not None
        return root_mean_square, largest

    assert sizes(math.inf, 1.0) == (math.inf, math.inf)
    assert all(math.isnan(x) for x in sizes(1.0, math.nan, 2.0) if x is not None)
    # Squared, 1e25 is beyond FP32's range and 1e-30 below it: neither infinite nor zero.
    assert sizes(*[1e25] * 100) == (None, pytest.approx(1e25))
    assert sizes(*[1e-30] * 100) == (None, pytest.approx(1e-30))


def test_zero_weights_have_no_ratio() -> None:
    w = torch.zeros(3)
    found = one_step(named("m", w), [], lambda: w.add_(1.0))["m"]
    assert found["update_rms"] == [1.0]
    assert found.get("update_to_weight", [None]) == [None]


def test_columns_of_steps_of_different_kinds_stay_aligned() -> None:
    """A gradient that is missing on one step, activations on every 50th only."""
    steps = 2 * ACTIVATIONS_EVERY + 3
    probe = NormsProbe(every=1, num_steps=steps)
    w = torch.ones(2)
    for step in range(steps):
        assert probe.due(step)
        probe.start(step, loss_scale=1.0)
        assert probe.wants_activations == (step in (0, 50, 100, 102))
        if probe.wants_activations:
            probe.forward("m", [], [torch.full((1,), float(step))])
        probe.gradients(named("m", torch.full((2,), float(step))) if step % 2 else [])
        probe.before_update(named("m", w))
        w += 1.0
        probe.after_update(named("m", w), skipped=False)
        if step % 10 == 3:
            probe.flush()
    probe.start(99, loss_scale=1.0)  # a step that an exception ended
    probe.flush()
    result = probe.result()
    columns = result["modules"]["m"]
    assert result["steps"] == list(range(steps))
    assert all(len(column) == steps for column in columns.values())
    assert columns["grad_max"] == [float(k) if k % 2 else None for k in range(steps)]
    assert columns["weight_max"] == [float(k + 1) for k in range(steps)]
    seen = {k: value for k, value in enumerate(columns["output_max"]) if value is not None}
    assert seen == {0: 0.0, 50: 50.0, 100: 100.0, 102: 102.0}


def test_rounding_to_six_digits() -> None:
    """Oracle: the format specification of floats."""
    values = np.random.default_rng(0).normal(size=200) * 10.0 ** np.arange(-100, 100)
    values = np.concatenate([values, [0.0, math.inf, -math.inf, 123456.7, 1e-310]])
    expected = [float(f"{value:.6g}") for value in values[:-1]]
    # The one rounding of the scaling may fall to the other side of a tie's neighbour.
    assert _rounded(values).tolist()[:-1] == pytest.approx(expected, rel=1e-15)
    assert _rounded(np.array([[math.nan]])).tolist() == [[pytest.approx(math.nan, nan_ok=True)]]
    assert repr(float(_rounded(np.array([0.00536303487]))[0])) == "0.00536303"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", ["no", "boolean", "added", "row"])
def test_largest_logit_against_the_whole_matrix(
    causal: bool, masked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.probes.attention_logits._BLOCK_ELEMENTS", 200)
    torch.manual_seed(1)
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 11, 8)
    boolean = torch.rand(2, 1, 9, 11) > 0.4
    mask = {
        "no": None,
        "boolean": boolean,
        "added": torch.zeros(9, 11).masked_fill(~boolean[0, 0], -1e9),
        "row": boolean[:, :, :1],
    }[masked]
    logits = (q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) * 0.3).abs()
    if causal:
        logits = logits.masked_fill(~torch.ones(9, 11, dtype=torch.bool).tril(), 0)
    if mask is not None:
        keep = mask if mask.dtype is torch.bool else mask > -1e4
        logits = logits.masked_fill(~keep, 0)
    found = largest_logit(q, k, mask=mask, is_causal=causal, scale=0.3)
    assert found is not None
    assert float(found) == pytest.approx(float(logits.max()), rel=1e-5)


class Fused(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)


class ByHand(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return logits.masked_fill(torch.ones_like(logits).triu(1) > 0, -1e9).softmax(-1) @ k


@pytest.mark.parametrize("kind", [Fused, ByHand])
def test_logits_are_found_in_the_module_that_forms_them(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"attention": kind(), "plain": nn.Linear(8, 8)})
    q, k = torch.randn(1, 2, 6, 8, requires_grad=True), torch.randn(1, 2, 6, 8)
    watch = AttentionLogits()
    with watch.watching(model):
        model["plain"](model["attention"](q, k)).sum()
    logits = (q @ k.transpose(-1, -2) / math.sqrt(8)).detach()
    visible = logits.masked_select(torch.ones(6, 6).tril() > 0)
    expected = visible.max() if kind is ByHand else visible.abs().max()
    ((module, largest),) = watch.largest
    assert module == "attention"
    assert float(largest) == pytest.approx(float(expected), rel=1e-5)
    with watch.watching(model):
        model["plain"](q)
    assert len(watch.largest) == 1


def test_multihead_attention_has_logits_without_and_with_returned_weights() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8, requires_grad=True)
    for weights in (False, True):
        watch = AttentionLogits()
        with watch.watching(model):
            model(x, x, x, need_weights=weights)
        ((module, largest),) = watch.largest
        assert module == "(model)"
        assert math.isfinite(float(largest))


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_training_with_norms_is_bitwise_the_training_without(policy: str) -> None:
    workload = make_workload({"kind": "char_gpt", "name": "small", "num_characters": 20_000})
    records = [
        train(
            workload,
            PrecisionPolicy(name=policy, compute_format=policy),
            RunSettings(steps=4, seed=0, device="cpu", num_threads=1, probes=probes),
            run_key="key",
            environment={},
        )
        for probes in (ONLY_NORMS, ProbeSettings.off())
    ]
    watched, plain = records
    assert watched.crash is None, watched.crash.traceback
    for name in ("loss", "grad_norm"):
        assert watched.series[name] == plain.series[name]
    assert watched.final == plain.final
    modules = watched.probes["norms"]["modules"]
    assert watched.probes["norms"]["steps"] == [0, 1, 2, 3]
    assert modules["blocks.0.attn"]["attention_logit_max"][0] > 0
    assert modules["head"]["output_rms"][0] > 0
    assert "norms" not in plain.probes
