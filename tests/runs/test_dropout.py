"""Dropout under the harness: torch's semantics, one mask in every dtype, every caller caught."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from tiny_workloads import BF16, FP16, FP32, TF32, TinyWorkload, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.precision.execution import SWITCHES, applied
from harness.precision.policy import PrecisionPolicy
from harness.runs import dropout
from harness.runs.determinism import seed_torch
from harness.runs.dropout import drop_threshold, paired_dropout

CPU = torch.device("cpu")
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "feature": lambda x: F.dropout2d(x, 0.3),
    "feature_": lambda x: F.dropout2d(x.clone(), 0.3, inplace=True),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
}


def drawn(op: Callable[[Tensor], Tensor], x: Tensor, seed: int = 0) -> tuple[Tensor, int]:
    with paired_dropout(CPU) as masks:
        seed_torch(seed, CPU)
        with masks.recording():
            y = op(x)
        return y, int(masks.value())


@pytest.mark.parametrize("name", OPS)
def test_one_mask_in_every_dtype(name: str) -> None:
    x = torch.linspace(0.5, 2, 8 * 6 * 25).reshape(8, 6, 5, 5)
    wide, fingerprint = drawn(OPS[name], x)
    for dtype in (torch.bfloat16, torch.float16):
        low, same = drawn(OPS[name], x.to(dtype))
        assert same == fingerprint
        assert low.dtype == dtype
        # computed in FP32 from the rounded input, rounded once
        assert torch.equal(low, drawn(OPS[name], x.to(dtype).float())[0].to(dtype))
    assert drawn(OPS[name], x, seed=1)[1] != fingerprint
    assert not torch.equal(wide, x)


def test_rate_and_scale_are_those_of_dropout() -> None:
    """Oracle: kept elements are x / (1 - p), their number is binomial."""
    y, _ = drawn(lambda x: F.dropout(x, 0.1), torch.ones(200_000))
    assert y.unique().tolist() == [0.0, pytest.approx(1 / 0.9, rel=1e-6)]
    # 6 standard deviations of a binomial share: 6 * sqrt(0.1 * 0.9 / 200000) = 0.004
    assert float((y == 0).float().mean()) == pytest.approx(0.1, abs=0.004)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    """Oracle: the defining property of alpha dropout on a standard normal input."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    y, _ = drawn(lambda x: F.alpha_dropout(x, 0.3, training=True), x)
    # 6 standard errors of a mean and of a standard deviation of 1e5 values: 0.02 and 0.02
    assert float(y.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(y.std()) == pytest.approx(1.0, abs=0.02)


def test_feature_dropout_drops_whole_channels() -> None:
    y, _ = drawn(lambda x: F.dropout2d(x, 0.5), torch.ones(16, 8, 3, 3))
    per_channel = (y == 0).flatten(2).float().mean(-1)
    assert set(per_channel.unique().tolist()) == {0.0, 1.0}


def test_gradient_is_the_mask() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(64, dtype=dtype, requires_grad=True)
        y, _ = drawn(lambda x: F.dropout(x, 0.5), x)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, y.detach())


def test_edge_probabilities() -> None:
    x = torch.ones(8)
    assert (
        drawn(lambda x: F.dropout(x, 0.0), x)[0] is x
        or drawn(lambda x: F.dropout(x, 0.0), x)[1] == 0
    )
    assert torch.equal(drawn(lambda x: F.dropout(x, 1.0), x)[0], torch.zeros(8))
    assert torch.equal(drawn(lambda x: F.dropout(x, 0.5, training=False), x)[0], x)
    assert drawn(lambda x: F.dropout(x, 0.5), torch.ones(0))[0].numel() == 0
    assert drop_threshold(1e-9) == -32767
    assert drop_threshold(0.5) == 0


class Attention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, dropout=0.3, batch_first=True)
        self.need_weights = need_weights
        self.out = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (4, 4))
        y, _ = self.attention(x, x, x, need_weights=self.need_weights)
        return self.out(y.flatten(0, 1))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = x.reshape(2, 2, 4, 12)
        return self.out(F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)).flatten(0, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 8, num_layers=2, dropout=0.3)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.3))
        self.out = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.body, x, use_reentrant=False))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention_weights": lambda: Attention(True),
    "attention_fused": lambda: Attention(False),
    "sdpa": Fused,
    "lstm": Recurrent,
    "checkpoint": Checkpointed,
    "inplace": lambda: nn.Sequential(
        nn.Linear(12, 8),
        nn.Dropout(0.3, inplace=True),
        nn.SELU(),
        nn.AlphaDropout(0.2),
        nn.Linear(8, 4),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_caller_is_caught_under_every_policy(name: str) -> None:
    workload = TinyWorkload(model=MODELS[name])
    reference = run(workload, FP32, steps=4).fingerprints
    assert all(reference.dropout)
    for policy in (TF32, BF16, FP16):
        assert run(workload, policy, steps=4).fingerprints == reference


@pytest.mark.parametrize("policy", [BF16, FP16], ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", ["attention_weights", "attention_fused"])
def test_attention_with_dropout_multiplies_in_the_compute_format(
    name: str, policy: PrecisionPolicy
) -> None:
    """As on a GPU: torch's own way on a CPU widens 16-bit queries and keys to FP32."""
    audit = run(TinyWorkload(model=MODELS[name]), policy, steps=2).probes["audit"]
    products = {row["format"] for row in audit["rows"] if row["family"] == "matmul"}
    assert products == {policy.name}
    assert audit["low_precision_flop_share"] == 1.0


def test_checkpointing_recomputes_with_the_same_masks() -> None:
    """Bitwise: recomputation changes neither losses nor gradients."""

    class Plain(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.body(x))

    plain, recomputed = run(TinyWorkload(model=Plain)), run(TinyWorkload(model=Checkpointed))
    assert recomputed.series["loss"] == plain.series["loss"]
    assert recomputed.series["grad_norm"] == plain.series["grad_norm"]
    assert recomputed.fingerprints == plain.fingerprints


@pytest.mark.parametrize("draw", ["randn", "rand", "bernoulli", "exponential"])
def test_16_bit_random_draws_are_fp32_draws_rounded(draw: str) -> None:
    """torch's own 16-bit draws move the generator differently, and everything after with it."""
    ops: dict[str, Callable[[torch.dtype], Tensor]] = {
        "randn": lambda dtype: torch.randn(5, dtype=dtype),
        "rand": lambda dtype: torch.rand(5, dtype=dtype),
        "bernoulli": lambda dtype: torch.empty(5, dtype=dtype).bernoulli_(0.4),
        "exponential": lambda dtype: torch.empty(5, dtype=dtype).exponential_(),
    }
    results = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with paired_dropout(CPU) as masks:
            seed_torch(3, CPU)
            with masks.recording():
                value = ops[draw](dtype)
            results[dtype] = value, torch.rand(3), int(masks.value())
    wide, after, fingerprint = results[torch.float32]
    assert fingerprint != 0
    for dtype in (torch.bfloat16, torch.float16):
        low, then, same = results[dtype]
        assert torch.equal(low, wide.to(dtype))
        assert torch.equal(then, after)
        assert same == fingerprint


def test_masks_outside_of_a_recording_are_not_counted() -> None:
    with paired_dropout(CPU) as masks:
        F.dropout(torch.ones(8), 0.5)
        assert int(masks.value()) == 0
        with masks.recording():
            F.dropout(torch.ones(8), 0.5)
        once = int(masks.value())
        F.dropout(torch.ones(8), 0.5)
        assert int(masks.value()) == once != 0


def test_kernels_for_fused_ops_compute_attention_and_recurrence() -> None:
    """CPU twin of the CUDA-only kernels: registered at the CPU's key, compared with torch's ops."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 8, generator=generator) for _ in range(3))
    q.requires_grad_()
    mask = torch.rand(5, 5, generator=generator) > 0.3
    mask[:, 0] = True
    lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5).eval()
    cases = [
        {},
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": mask.float(), "scale": 0.1},
    ]
    expected = [F.scaled_dot_product_attention(q, k, v, **case) for case in cases]
    (expected_grad,) = torch.autograd.grad(expected[1].sum(), q)
    states = lstm(q.detach()[0])[0]
    enabled = torch.backends.cudnn.enabled

    def keep_all(x: Tensor, p: float, train: bool) -> Tensor:
        return x

    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dropout.register_fused(library, "AutogradCPU", keep_all)
        for case, want in zip(cases, expected, strict=True):
            for p in (0.0, 0.5):
                got = F.scaled_dot_product_attention(q, k, v, dropout_p=p, **case)
                # a handful of FP32 roundings in another order
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        got = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        (grad,) = torch.autograd.grad(got.sum(), q)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)
        assert torch.equal(lstm(q.detach()[0])[0], states)
        lstm.train()
        # Under a policy, whose new precision switches the old ones of cuDNN contradict.
        with applied(FP32, lstm, device=CPU):
            assert bool(lstm(q.detach()[0])[0].isfinite().all())
            assert {switch.fp32_precision for switch in SWITCHES.values()} == {"ieee"}
        assert torch.backends.cudnn.enabled == enabled
    finally:
        library._destroy()
