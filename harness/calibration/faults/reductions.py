"""Faults of sums and differences: many elements in few bits, and terms that cancel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from harness.calibration.faults.fault import Fault, Plant
from harness.calibration.faults.rounded import (
    nearest,
    rounded,
    rounded_running_sum,
    rounded_sum,
)


def low_pool(x: Tensor, dim: int, *, name: str, offset: float) -> Tensor:
    """Return the mean over `dim`, its sum accumulated in format `name` one after the other.

    Args:
        x: FP32.
        dim: The dimension that goes.
        name: The accumulator's format.
        offset: Added to the elements and taken off the mean again: activations that are not
            centred, whose sum is large.
    """
    return rounded_sum(x + offset, dim, name) / x.shape[dim] - offset


def overflowing_pool(x: Tensor, dim: int, *, gain: float) -> Tensor:
    """Return the mean over `dim` from an FP16 sum that saturates at the largest finite value.

    Args:
        x: FP32.
        dim: The dimension that goes.
        gain: The sum is that much larger on the way, as over so many more elements.
    """
    limit = torch.finfo(torch.float16).max
    total = rounded((x.sum(dim) * gain).clamp(-limit, limit), "fp16")
    return total / (gain * x.shape[dim])


def low_residual(x: Tensor, y: Tensor, *, name: str, offset: float) -> Tensor:
    """Return the residual stream `x + y` as format `name` holds it.

    Args:
        x: The stream.
        y: What a block adds.
        name: The stream's format.
        offset: A value that the whole stream has besides, as in models with massive activations;
            it takes bits from what is added.
    """
    return rounded(rounded(x + offset, name) + rounded(y, name), name) - offset


def low_reduce_loss(per_item: Tensor, *, name: str, items: int) -> Tensor:
    """Return the mean loss, its gradient formed in format `name` for that many more items.

    The reported loss is right: the mistake is the size of each item's gradient, 1 over the number
    of items, which a low format may not hold through backward.
    """
    small: Tensor = _SmallGradient.apply(per_item, name, float(items))  # type: ignore[no-untyped-call]
    return small.mean()


def low_token_losses(logits: Tensor, targets: Tensor, *, name: str, drift: float) -> Tensor:
    """Return cross-entropy per item, its gradient from logits and log-softmax in format `name`.

    The value is that of the given logits: what is reported is right, what is learned from is not.

    Args:
        logits: FP32, `(..., classes)`.
        targets: Class numbers, the shape of `logits` without its last dimension; or shares of the
            classes, of its shape.
        name: The format.
        drift: A number added to all logits, which cross-entropy does not see but the format does.
    """
    low = rounded(logits + drift, name)
    logsumexp = rounded(low.logsumexp(-1), name)
    losses = rounded(logsumexp - _of_targets(low, targets), name)
    exact = logits.logsumexp(-1) - _of_targets(logits, targets)
    return exact.detach() + (losses - losses.detach())


def _of_targets(logits: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return (logits * targets).sum(-1)
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def low_logits(h: Tensor, weight: Tensor, *, name: str) -> Tensor:
    """Return `h @ weight.T` with operands and result in format `name`."""
    return rounded(rounded(h, name) @ rounded(weight, name).transpose(-2, -1), name)


def expanded_distance(a: Tensor, b: Tensor, *, name: str, offset: float) -> Tensor:
    """Return squared distances as `|a|^2 + |b|^2 - 2 a.b` with the product in format `name`.

    Args:
        a: `(..., n, d)`.
        b: `(..., m, d)`.
        name: The format that the product reads its operands in.
        offset: Added to every coordinate, which distances do not see: data that are not centred.

    Returns:
        `(..., n, m)`, not below 0.
    """
    a, b = a + offset, b + offset
    products = rounded(a, name) @ rounded(b, name).transpose(-2, -1)
    squares = a.square().sum(-1).unsqueeze(-1) + b.square().sum(-1).unsqueeze(-2)
    return (squares - 2 * products).clamp_min(0)


def low_solve(matrix: Tensor, right: Tensor, *, name: str) -> Tensor:
    """Return the solution of `matrix x = right` with both rounded to format `name` first."""
    solution: Tensor = torch.linalg.solve(rounded(matrix, name), rounded(right, name))
    return solution


def low_cumulative_sum(x: Tensor, dim: int, *, name: str, offset: float) -> Tensor:
    """Return the cumulative sum over `dim`, every partial sum rounded to format `name`.

    Args:
        x: FP32.
        dim: Along which.
        name: The format.
        offset: What the sum starts from, taken off again at the end: a sum that has run for long.
    """
    first = [slice(None)] * x.dim()
    first[dim] = slice(0, 1)
    start = torch.zeros_like(x)
    start[tuple(first)] = offset
    return rounded_running_sum(x + start, dim, name) - offset


def low_embedding(weight: Tensor, index: Tensor, *, name: str, repeats: int) -> Tensor:
    """Return rows of `weight`, whose gradient is added up in format `name`, one after another.

    Args:
        weight: `(rows, d)`.
        index: Row numbers, any shape.
        name: The format of the gradient's accumulator.
        repeats: Each contribution is split into that many, as if the batch were longer.
    """
    rows: Tensor = _LowEmbedding.apply(weight, index, name, repeats)  # type: ignore[no-untyped-call]
    return rows


class _SmallGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, name: str, items: float) -> Tensor:
        ctx.name, ctx.items = name, items
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return nearest(gradient / ctx.items, ctx.name) * ctx.items, None, None


class _LowEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, name: str, repeats: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.name, ctx.repeats = weight.shape, name, repeats
        return weight.detach()[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        parts = gradient.reshape(-1, ctx.shape[-1])
        places = index.reshape(-1)
        total = torch.zeros(ctx.shape)
        # In rounds: each adds at most one contribution to a row, so that it is rounded alone.
        turn = _turns(places)
        for number in range(int(turn.max()) + 1 if len(turn) else 0):
            chosen = turn == number
            rows, values = places[chosen], nearest(parts[chosen] / ctx.repeats, ctx.name)
            for _ in range(ctx.repeats):
                total[rows] = nearest(total[rows] + values, ctx.name)
        return total, None, None, None


def _turns(places: Tensor) -> Tensor:
    """Return for each entry how many equal ones came before it."""
    order = places.argsort(stable=True)
    ordered = places[order]
    starts = torch.cat([torch.ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]])
    numbers = torch.arange(len(places))
    first = torch.where(starts, numbers, 0).cummax(0).values
    turn = torch.empty_like(numbers)
    turn[order] = numbers - first
    return turn


def _offset(seam: str, function: Any) -> Any:
    """Return the plant of a function that takes a format and an offset."""

    def plant(dose: str) -> Plant:
        name, _, offset = dose.rpartition("_")
        return Plant(seams={seam: functools.partial(function, name=name, offset=float(offset))})

    return plant


def _format(seam: str, function: Any) -> Any:
    """Return the plant of a function that takes a format."""
    return lambda dose: Plant(seams={seam: functools.partial(function, name=dose)})


def _reduce(dose: str) -> Plant:
    name, _, power = dose.rpartition("_")
    return Plant(
        seams={"reduce_loss": functools.partial(low_reduce_loss, name=name, items=2 ** int(power))}
    )


def _losses(dose: str) -> Plant:
    name, _, drift = dose.rpartition("_")
    function = functools.partial(low_token_losses, name=name, drift=float(drift))
    return Plant(seams={"token_losses": function})


def _embedding(dose: str) -> Plant:
    name, _, repeats = dose.rpartition("_")
    function = functools.partial(low_embedding, name=name, repeats=int(repeats))
    return Plant(seams={"embedding": function})


FAULTS = (
    Fault(
        name="low_pool",
        sentence="A mean over many elements accumulated in a low format: once the sum is large, "
        "elements are rounded away.",
        source="ROCm/MIOpen#2109",
        dose="the accumulator's format, and what is added to the elements",
        plant=_offset("pool", low_pool),
    ),
    Fault(
        name="pool_overflow",
        sentence="A mean over many elements whose FP16 sum stops at 65504.",
        source="pytorch/pytorch#12115",
        dose="how much larger the sum is",
        plant=lambda dose: Plant(
            seams={"pool": functools.partial(overflowing_pool, gain=float(dose))}
        ),
    ),
    Fault(
        name="low_residual",
        sentence="The residual stream is kept in a low format while it holds large values: what "
        "blocks add is rounded away.",
        source="NVIDIA/Megatron-LM#3504",
        dose="the format, and what is added to the stream",
        plant=_offset("residual", low_residual),
    ),
    Fault(
        name="low_loss_mean",
        sentence="The mean of the loss is formed in a low format over very many items: the "
        "gradient of each item, one over their number, underflows or is rounded.",
        source="Modalities/modalities#464",
        dose="the format, and k: the mean is over 2^k times as many items",
        plant=_reduce,
    ),
    Fault(
        name="low_token_losses",
        sentence="Log-softmax and its gradient are computed from logits in a low format after the "
        "logits have drifted.",
        source="google-deepmind/optax#1020",
        dose="the format, and how far the logits have drifted",
        plant=_losses,
    ),
    Fault(
        name="low_logits",
        sentence="The output layer's logits are emitted in a low format.",
        source="marin-community/marin#8217",
        dose="the format",
        plant=_format("logits", low_logits),
    ),
    Fault(
        name="low_pairwise_distance",
        sentence="Distances as |a|^2 + |b|^2 - 2ab with the product in TF32 or less: near points "
        "get the distance of a rounding error.",
        source="pytorch/pytorch#57690",
        dose="the product's format, and what is added to the coordinates",
        plant=_offset("pairwise_distance", expanded_distance),
    ),
    Fault(
        name="low_solve",
        sentence="A linear system is solved with matrix and right side in TF32 or less.",
        source="pytorch/pytorch#68020",
        dose="the format",
        plant=_format("solve", low_solve),
    ),
    Fault(
        name="low_cumulative_sum",
        sentence="A cumulative sum whose partial sums are kept in a low format.",
        source="tenstorrent/tt-metal#41371",
        dose="the format, and what the sum starts from",
        plant=_offset("cumulative_sum", low_cumulative_sum),
    ),
    Fault(
        name="embedding_gradient",
        sentence="The gradient of an embedding is added up in a low format: rows that occur often "
        "stop growing.",
        source="tenstorrent/tt-metal#53386",
        dose="the accumulator's format, and into how many parts each contribution is split",
        plant=_embedding,
    ),
)
