"""Norm, clipping and counts against torch's own, over gradients of every kind."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from harness.runs.gradients import (
    clip_,
    count_nonfinite,
    global_norm,
    gradient_views,
    optimized_parameters,
)

CPU = torch.device("cpu")
ZERO = torch.zeros((), dtype=torch.int64)


def parameters(*gradients: torch.Tensor | None) -> list[nn.Parameter]:
    result = []
    for gradient in gradients:
        dtype = torch.float32 if gradient is None else gradient.dtype
        shape = (2,) if gradient is None else gradient.shape
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = gradient
        result.append(parameter)
    return result


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_dense_fp32_is_bitwise_torch(max_norm: float) -> None:
    """Oracle: clip_grad_norm_."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(n, generator=generator) for n in (3, 50, 7)]
    ours, theirs = parameters(*[g.clone() for g in gradients]), parameters(*gradients)
    views = gradient_views(ours)
    norm = global_norm(views, CPU)
    clip_(views, norm, max_norm=max_norm)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    assert torch.equal(norm, expected)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_mixed_kinds() -> None:
    indices = torch.tensor([[0, 0, 2]])
    sparse = torch.sparse_coo_tensor(
        indices, torch.tensor([[1.0], [2.0], [4.0]]), (3, 1), check_invariants=True
    )
    complex_ = torch.tensor([3.0 + 4.0j])
    params = parameters(
        sparse, complex_, complex_.conj(), None, torch.tensor([12.0], dtype=torch.bfloat16)
    )
    views = gradient_views(params)
    norm = global_norm(views, CPU)
    assert norm.dtype is torch.float32
    # (1+2)^2 + 4^2 from the sparse rows, 25 twice, 144
    assert float(norm) == pytest.approx(math.sqrt(9 + 16 + 25 + 25 + 144), rel=1e-6)
    clip_(views, norm, max_norm=float(norm) / 2)
    dense = params[0].grad.to_dense()  # type: ignore[union-attr]
    assert dense.flatten().tolist() == pytest.approx([1.5, 0.0, 2.0], rel=1e-5)
    assert params[1].grad is not None
    assert complex(params[1].grad[0]) == pytest.approx(1.5 + 2j, rel=1e-5)
    assert params[4].grad is not None
    assert float(params[4].grad[0]) == 6.0


def test_16_bit_norms_do_not_overflow() -> None:
    views = gradient_views(parameters(torch.full((100,), 6e4, dtype=torch.float16)))
    assert float(global_norm(views, CPU)) == pytest.approx(6e5, rel=1e-3)


def test_nothing_and_nonfinite() -> None:
    assert float(global_norm([], CPU)) == 0.0
    clip_([], torch.zeros(()), max_norm=1.0)
    bad = gradient_views(parameters(torch.tensor([1.0, math.inf, math.nan]), torch.ones(2)))
    norm = global_norm(bad, CPU)
    assert not math.isfinite(float(norm))
    assert int(count_nonfinite(bad, norm, zero=ZERO)) == 2
    good = gradient_views(parameters(torch.full((2,), 1e25)))
    # finite elements whose squares overflow: the norm is infinite, the count is not
    assert math.isinf(float(global_norm(good, CPU)))
    assert int(count_nonfinite(good, global_norm(good, CPU), zero=ZERO)) == 0


def test_parameters_of_several_groups_are_listed_once() -> None:
    a, b = parameters(None, None)
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=1.0)
    assert [id(p) for p in optimized_parameters(optimizer)] == [id(a), id(b)]
