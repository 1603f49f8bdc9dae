"""Random draws other than dropout: one draw in every dtype, whatever the values are."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_workloads import BF16, FP16, FP32, TF32, TinyWorkload, class_batches, run
from torch import Tensor, nn
from torch.nn import functional as F

from harness.analysis.pairing import pairing_fault
from harness.runs.determinism import seed_torch
from harness.runs.dropout import paired_dropout
from harness.runs.random_draws import HostGenerators

CPU = torch.device("cpu")


def drawn(op: Callable[[], Tensor], seed: int = 0) -> tuple[Tensor, int]:
    with paired_dropout(CPU) as masks:
        seed_torch(seed, CPU)
        with masks.recording():
            result = op()
        return result, int(masks.value())


def test_bernoulli_is_one_draw_although_its_probability_is_rounded() -> None:
    p = torch.linspace(0, 1, 40_001)
    wide, fingerprint = drawn(lambda: torch.bernoulli(p))
    low, same = drawn(lambda: torch.bernoulli(p.to(torch.bfloat16)))
    assert same == fingerprint != 0
    assert low.dtype == torch.bfloat16
    # a result flips where the draw lies between p and its rounding, at most half of 2^-8 apart
    assert 0 < int((low.float() != wide).sum()) < 40_001 * 2**-9
    assert (wide[0], wide[-1]) == (0, 1)
    # 6 standard deviations of a mean of 40001 such draws: 6 * sqrt(1/6 / 40001) = 0.013
    assert float(wide.mean()) == pytest.approx(0.5, abs=0.013)


SAMPLERS = {
    "gamma": torch._standard_gamma,
    "dirichlet": torch._sample_dirichlet,
    "poisson": torch.poisson,
    "binomial": lambda x: torch.binomial(torch.full_like(x, 30), x / 8),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_do_not_shift_the_draws_after_them(name: str) -> None:
    """They take from the generator as the values ask, and values differ between policies."""

    def after(x: Tensor) -> Tensor:
        SAMPLERS[name](x)
        return torch.randn(4)

    x = torch.linspace(0.1, 7, 999)
    expected, fingerprint = drawn(lambda: after(x))
    for other in (x * 1.01, x.to(torch.bfloat16), x.to(torch.float16)):
        result, same = drawn(lambda other=other: after(other))
        assert torch.equal(result, expected)
        assert same == fingerprint
    assert not torch.equal(drawn(lambda: after(x), seed=1)[0], expected)
    # The seed still decides, and the mean is the distribution's.
    rate = torch.full((20_000,), 4.0)
    sample = drawn(lambda: SAMPLERS[name](rate))[0]
    assert torch.equal(sample, drawn(lambda: SAMPLERS[name](rate))[0])
    mean = {"gamma": 4.0, "poisson": 4.0, "binomial": 15.0, "dirichlet": 1 / 20_000}[name]
    # 6 standard errors at most: the largest standard deviation is binomial's 2.7
    assert float(sample.mean()) == pytest.approx(mean, abs=0.12)


def test_rrelu_in_every_dtype() -> None:
    """Oracle: positive elements stay, negative ones are multiplied by a slope in [1/8, 1/3]."""
    x = torch.linspace(-2, 2, 1000)
    wide, fingerprint = drawn(lambda: F.rrelu(x, training=True))
    assert torch.equal(wide[x > 0], x[x > 0])
    slope = wide[x < 0] / x[x < 0]
    assert 0.125 <= float(slope.min()) < 0.15
    assert 0.31 < float(slope.max()) <= 1 / 3 + 1e-6
    for dtype in (torch.float16, torch.bfloat16):
        low, same = drawn(lambda dtype=dtype: F.rrelu(x.to(dtype), training=True))
        assert (low.dtype, same) == (dtype, fingerprint)
        # one rounding of the input and one of the result
        assert torch.allclose(low.float(), wide, rtol=2**-7, atol=0)
    assert torch.equal(F.rrelu(x), drawn(lambda: F.rrelu(x))[0])
    inplace = drawn(lambda: F.rrelu(x.clone(), training=True, inplace=True))[0]
    assert torch.equal(inplace, wide)


class Stochastic(nn.Module):
    """Samples gates from its own activations, then drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.outer = nn.Linear(12, 24), nn.Dropout(0.2), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.inner(x))
        gate = torch.bernoulli(p.detach()) + p - p.detach()
        noise = torch.distributions.Gamma(p.float() + 0.5, 1.0).rsample()
        return self.outer(self.drop(F.rrelu(gate, training=self.training) * noise))


@pytest.mark.parametrize("policy", [TF32, BF16, FP16], ids=lambda p: p.name)
def test_a_model_that_samples_from_its_activations_stays_paired(policy) -> None:
    workload = TinyWorkload(model=Stochastic, data=class_batches)
    assert pairing_fault(run(workload, policy), run(workload, FP32)) is None


MEAN = torch.linspace(-2, 2, 60).reshape(6, 10)
NORMALS = {
    "both": lambda dtype: torch.normal(MEAN.to(dtype), MEAN.abs().to(dtype)),
    "mean": lambda dtype: torch.normal(MEAN.to(dtype), 0.5),
    "deviation": lambda dtype: torch.normal(1.5, MEAN.abs().to(dtype)),
    "broadcast": lambda dtype: torch.normal(MEAN.to(dtype), MEAN[:, :1].abs().to(dtype)),
    "distribution": lambda dtype: torch.distributions.Normal(MEAN.to(dtype), 1.0).sample(),
}


@pytest.mark.parametrize("name", NORMALS)
def test_normal_with_tensors_is_torchs_in_fp32_and_one_draw_in_every_dtype(name: str) -> None:
    """ATen draws inside of it, past every other kernel: other numbers, other state afterwards."""
    seed_torch(0, CPU)
    expected = NORMALS[name](torch.float32), torch.rand(3)

    def op(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return NORMALS[name](dtype), torch.rand(3)

    wide, fingerprint = drawn(lambda: op(torch.float32))
    assert torch.equal(wide[0], expected[0])
    assert torch.equal(wide[1], expected[1])
    assert fingerprint != 0
    for dtype in (torch.bfloat16, torch.float16):
        low, same = drawn(lambda dtype=dtype: op(dtype))
        assert same == fingerprint
        assert low[0].dtype is dtype
        assert torch.equal(low[1], wide[1])
        # Rounded mean, deviation and result: 3 * 2^-8 of numbers up to 2 + 4 * 2.
        assert (low[0].float() - wide[0]).abs().max() < 3 * 2**-8 * 10


def test_normal_refuses_what_torch_refuses() -> None:
    for std in (torch.tensor([-1.0]), torch.tensor([1.0], dtype=torch.complex64)):
        with pytest.raises(RuntimeError, match="normal expects"):
            drawn(lambda std=std: torch.normal(torch.zeros(1), std))


@pytest.mark.parametrize(
    "draw",
    [
        lambda dtype: torch.empty(40, 2, dtype=dtype).t().normal_(),
        lambda dtype: torch.empty(9, 9, dtype=dtype)[:, 1:5].uniform_(),
        lambda dtype: torch.empty(40, dtype=dtype).log_normal_(),
        lambda dtype: torch.empty(40, dtype=dtype).cauchy_(),
        lambda dtype: torch.empty(40, dtype=dtype).geometric_(0.3),
    ],
    ids=["transposed", "slice", "log_normal", "cauchy", "geometric"],
)
def test_draws_of_any_layout_are_fp32_draws_rounded(draw: Callable[[torch.dtype], Tensor]) -> None:
    wide, fingerprint = drawn(lambda: draw(torch.float32))
    assert fingerprint != 0
    for dtype in (torch.bfloat16, torch.float16):
        low, same = drawn(lambda dtype=dtype: draw(dtype))
        assert same == fingerprint
        assert torch.equal(low, wide.to(dtype))
    # The layout does not matter to the numbers.
    contiguous, _ = drawn(lambda: torch.empty(2, 40).normal_())
    assert torch.equal(drawn(lambda: torch.empty(40, 2).t().normal_())[0], contiguous)


def test_a_sampler_takes_one_number_of_a_generator_of_the_users() -> None:
    def after(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        torch.poisson(x, generator=generator)
        return torch.rand(3, generator=generator)

    x = torch.linspace(0.1, 90, 999)
    assert torch.equal(drawn(lambda: after(x))[0], drawn(lambda: after(x * 0.9))[0])


def test_generators_of_the_host_are_looked_at_in_one_step_of_eight() -> None:
    random.seed(0)
    watch = HostGenerators()
    assert [watch.drawn() for _ in range(9)] == [0] * 9
    random.random()
    np.random.rand()  # noqa: NPY002 - the global one
    later = [watch.drawn() for _ in range(16)]
    assert len({number for number in later if number}) == 1
    assert sum(number != 0 for number in later) == 2
    again = HostGenerators()
    assert again.drawn() == 0  # relative to where it began
