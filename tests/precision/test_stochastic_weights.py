"""16-bit weights whose updates are rounded at random."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from harness.precision.rounding_noise import RoundingNoise
from harness.precision.stochastic_weights import StochasticWeights

# Adagrad makes its state, here a value that BF16 holds, before its first step.
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3, initial_accumulator_value=0.125),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
}


def weights(dtype, n=4096, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(n, generator=generator).to(dtype))


def gradient(dtype, n=4096, seed=7):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def started(seed):
    noise = RoundingNoise()
    noise.start(seed)
    return noise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_is_the_optimizers_own_in_fp32_rounded_to_a_neighbour(name, dtype):
    """Oracle: the same optimizer on FP32 weights that are set to the 16-bit ones before a step."""
    low, wide = weights(dtype), nn.Parameter(weights(dtype).data.float())
    optimizer, oracle = OPTIMIZERS[name]([low]), OPTIMIZERS[name]([wide])
    memory, noise = low.data_ptr(), RoundingNoise()
    stochastic = StochasticWeights(optimizer, noise)
    infinity = torch.tensor(torch.inf)
    for step in range(5):
        low.grad = gradient(dtype, seed=step)
        wide.data, wide.grad = low.data.float(), low.grad.float()
        oracle.step()
        noise.start(step)
        with stochastic.stepping():
            assert low.dtype is low.grad.dtype is torch.float32
            optimizer.step()
        assert low.dtype is low.grad.dtype is dtype
        assert torch.equal(low.grad, gradient(dtype, seed=step))
        assert low.data_ptr() == memory
        exact, stored = wide.data, wide.data.to(dtype)
        lower = torch.where(
            stored.float() <= exact, stored, torch.nextafter(stored, -infinity.to(dtype))
        )
        upper = torch.where(
            stored.float() >= exact, stored, torch.nextafter(stored, infinity.to(dtype))
        )
        assert ((low.data == lower) | (low.data == upper)).all()
        # both neighbours occur: rounding to nearest would fail here
        assert 0.1 < (low.data == stored).float().mean() < 0.99
        # 4096 errors of at most a spacing s each, independent and of mean 0: below 5 s / 2 / 64
        spacing = upper.float() - lower.float()
        error = ((low.data.float() - exact) / spacing.clamp(min=1e-30)).mean()
        assert abs(error) < 5 / 2 / 64
    states = [v for v in optimizer.state[low].values() if torch.is_tensor(v)]
    assert states
    assert all(value.dtype is torch.float32 for value in states)


def test_small_updates_arrive_on_average_and_are_lost_to_nearest():
    """SGD moves weights near 1 by 2^-12 a step, a 32nd of BF16's spacing there."""
    for stochastic in (False, True):
        parameter = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer, noise = torch.optim.SGD([parameter], lr=2.0**-12), RoundingNoise()
        rounding = StochasticWeights(optimizer, noise)
        for step in range(64):
            parameter.grad = -torch.ones_like(parameter)
            noise.start(step)
            if stochastic:
                with rounding.stepping():
                    optimizer.step()
            else:
                optimizer.step()
        moved = (parameter.data.double() - 1).mean().item()
        if not stochastic:
            assert moved == 0
        else:
            # variance 64 * (1/32) * 2^-14 per weight; 5 standard errors of the mean of 4096
            assert abs(moved - 64 * 2.0**-12) < 5 * (2 * 2.0**-14 / 4096) ** 0.5


def test_other_dtypes_missing_gradients_and_unmoved_weights_are_left_alone():
    real, complex_, low, idle = (
        nn.Parameter(torch.randn(8)),
        nn.Parameter(torch.randn(8, dtype=torch.complex64)),
        weights(torch.bfloat16, 8),
        weights(torch.bfloat16, 8, seed=1),
    )
    before = idle.data.clone()
    optimizer = torch.optim.Adam([real, complex_, low, idle], lr=0.1)
    stochastic = StochasticWeights(optimizer, started(0))
    for parameter in (real, complex_, low):
        parameter.grad = torch.ones_like(parameter)
    with stochastic.stepping():
        assert (real.dtype, complex_.dtype) == (torch.float32, torch.complex64)
        optimizer.step()
    assert (low.dtype, complex_.dtype, idle.grad) == (torch.bfloat16, torch.complex64, None)
    assert torch.equal(idle.data, before)


def test_sparse_gradients_pass():
    embedding = nn.Embedding(10, 4, sparse=True, dtype=torch.bfloat16)
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    stochastic = StochasticWeights(optimizer, started(0))
    before = embedding.weight.data.clone()
    embedding(torch.tensor([1, 3])).sum().backward()
    with stochastic.stepping():
        optimizer.step()
    assert embedding.weight.dtype is torch.bfloat16
    assert embedding.weight.grad.is_sparse
    changed = (embedding.weight.data != before).any(1)
    assert changed.nonzero().flatten().tolist() == [1, 3]


def test_a_closure_sees_16_bit_weights_and_the_optimizer_fp32_ones():
    low = weights(torch.bfloat16, 64)
    target = weights(torch.float32, 64, seed=3).data
    optimizer = torch.optim.LBFGS([low], lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    noise = RoundingNoise()
    stochastic, losses, seen = StochasticWeights(optimizer, noise), [], set()

    def closure():
        optimizer.zero_grad(set_to_none=True)
        with stochastic.evaluating():
            seen.add(low.dtype)
            loss = (low.float() - target).square().sum()
            loss.backward()
            seen.add(low.grad.dtype)
        assert low.dtype is low.grad.dtype is torch.float32
        losses.append(loss.item())
        return loss.detach()

    for step in range(5):
        noise.start(step)
        with stochastic.stepping():
            optimizer.step(closure)
        assert low.dtype is torch.bfloat16
    assert seen == {torch.bfloat16}
    # What is left is rounding: at most a spacing of 2^-7 relative to each weight.
    assert losses[-1] < 64 * (2.0**-7 * 3) ** 2 < losses[0]


@pytest.mark.parametrize("inside", [False, True])
def test_an_exception_leaves_16_bit_weights(inside):
    low = weights(torch.bfloat16, 8)
    low.grad = torch.ones_like(low)
    before = low.data.clone()
    stochastic = StochasticWeights(torch.optim.SGD([low], lr=0.0), started(0))

    def fail():
        with stochastic.stepping(), stochastic.evaluating() if inside else nullcontext():
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    assert low.dtype is low.grad.dtype is torch.bfloat16
    assert torch.equal(low.data, before)


def test_the_seed_of_the_step_decides():
    def trained(seeds):
        low = weights(torch.bfloat16)
        optimizer, noise = torch.optim.SGD([low], lr=1e-3), RoundingNoise()
        stochastic = StochasticWeights(optimizer, noise)
        for seed in seeds:
            low.grad = gradient(torch.bfloat16)
            noise.start(seed)
            with stochastic.stepping():
                optimizer.step()
        return low.data

    state = torch.get_rng_state()
    assert torch.equal(trained([1, 2]), trained([1, 2]))
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in itertools.combinations(([1, 2], [1, 3], [2, 1]), 2):
        assert not torch.equal(trained(one), trained(other))
