"""Values as a lower format holds them, forward and backward, for code that casts by hand.

A tensor cast to BF16 and back has its gradient cast to BF16 and back too: that is what autograd
does with a cast, and what these functions do for every format, also those that no tensor has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.numerics.formats import get_format
from harness.numerics.rounding import round_to_format


def rounded(values: Tensor, name: str) -> Tensor:
    """Return FP32 `values` as format `name` holds them; their gradient is rounded likewise.

    Overflow gives infinities (NaN in E4M3), in the gradient as well.

    Args:
        values: FP32, any shape.
        name: A format known to `numerics.formats`.
    """
    result: Tensor = _Rounded.apply(values, name)  # type: ignore[no-untyped-call]
    return result


def nearest(values: Tensor, name: str) -> Tensor:
    """Return FP32 `values` rounded to format `name`, outside autograd."""
    return round_to_format(values, get_format(name))


def rounded_sum(values: Tensor, dim: int, name: str, *, parts: int = 0) -> Tensor:
    """Return the sum over `dim`, added one after the other in format `name`.

    Each partial sum is rounded, so in BF16 adding ones stops at 256. The gradient of a sum is a
    copy of its own, rounded to the format.

    Args:
        values: FP32, any shape.
        dim: The dimension that goes.
        name: The format of the accumulator.
        parts: Add that many FP32 sums of neighbouring elements instead of single elements, as a
            kernel with one accumulator per block does; 0: single elements.
    """
    result: Tensor = _RoundedSum.apply(values, dim, name, parts)  # type: ignore[no-untyped-call]
    return result


def rounded_running_sum(values: Tensor, dim: int, name: str) -> Tensor:
    """Return the cumulative sum over `dim` with every partial sum rounded to format `name`.

    The gradient is the FP32 reversed cumulative sum of the incoming one, rounded at its end.
    """
    result: Tensor = _RoundedRunningSum.apply(values, dim, name)  # type: ignore[no-untyped-call]
    return result


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, name: str) -> Tensor:
        ctx.name = name
        return nearest(values.detach(), name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return nearest(gradient, ctx.name), None


class _RoundedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, name: str, parts: int) -> Tensor:
        ctx.shape, ctx.dim, ctx.name = values.shape, dim, name
        pieces = _pieces(values.detach(), dim, parts)
        total = torch.zeros_like(pieces[0])
        for piece in pieces:
            total = nearest(total + nearest(piece, name), name)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return (
            nearest(gradient, ctx.name).unsqueeze(ctx.dim).expand(ctx.shape),
            None,
            None,
            None,
        )


class _RoundedRunningSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, name: str) -> Tensor:
        ctx.dim, ctx.name = dim, name
        total = torch.zeros_like(values.detach().select(dim, 0))
        sums = []
        for piece in values.detach().unbind(dim):
            total = nearest(total + nearest(piece, name), name)
            sums.append(total)
        return torch.stack(sums, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        reversed_sum = gradient.flip(ctx.dim).cumsum(ctx.dim).flip(ctx.dim)
        return nearest(reversed_sum, ctx.name), None, None


def _pieces(values: Tensor, dim: int, parts: int) -> tuple[Tensor, ...]:
    if not parts or parts >= values.shape[dim]:
        return values.unbind(dim)
    return tuple(block.sum(dim) for block in values.tensor_split(parts, dim))
