"""Faults of statistics that normalize or average: variances, running means, moving weights."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from harness.calibration.faults.fault import Fault, Plant
from harness.calibration.faults.rounded import nearest, rounded
from harness.calibration.tasks.seams import LAYER_NORM_EPS


def overflowing_norm(x: Tensor, weight: Tensor, bias: Tensor, *, gain: float) -> Tensor:
    """Return layer normalization whose sum of squares is formed in FP16.

    Where it overflows, the variance is infinite and the normalized row zero.

    Args:
        x: `(..., d)`, normalized over its last dimension.
        weight: `(d,)`.
        bias: `(d,)`.
        gain: The row is that much larger on the way, as a residual stream becomes; exact layer
            normalization does not see it.
    """
    centred = (x - x.mean(-1, keepdim=True)) * gain
    low = centred.to(torch.float16)
    variance = (low * low).sum(-1, keepdim=True).to(x.dtype) / x.shape[-1]
    # Where the sum is infinite so is its gradient times zero: NaN, unless it is a constant there.
    scale = torch.where(variance.isinf(), 0.0, (variance + LAYER_NORM_EPS * gain**2).rsqrt())
    return centred * scale * weight + bias


def cancelling_norm(x: Tensor, weight: Tensor, bias: Tensor, *, name: str, offset: float) -> Tensor:
    """Return layer normalization with the variance as `E[x^2] - E[x]^2` in format `name`.

    Args:
        x: `(..., d)`.
        weight: `(d,)`.
        bias: `(d,)`.
        name: The format of both moments; their difference is kept from falling below 0.
        offset: Added to `x`, which exact layer normalization does not see: rows that are not
            centred, whose moments cancel.
    """
    mean, variance = _cancelling(x + offset, (-1,), name)
    return (x + offset - mean) * (variance + LAYER_NORM_EPS).rsqrt() * weight + bias


def overflowing_batch_statistics(x: Tensor, *, gain: float) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel from squares summed in FP16, saturating.

    Args:
        x: `(n, channels, ...)`.
        gain: The activations are that much larger on the way.
    """
    dims = (0, *range(2, x.dim()))
    limit = torch.finfo(torch.float16).max
    mean = x.mean(dims)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    squares = ((x - mean.view(shape)) * gain).square().sum(dims)
    variance = rounded(squares.clamp_max(limit), "fp16") * x.shape[1] / (x.numel() * gain**2)
    return mean, variance


def cancelling_batch_statistics(x: Tensor, *, name: str, offset: float) -> tuple[Tensor, Tensor]:
    """Return mean and variance per channel, the variance as `E[x^2] - E[x]^2` in format `name`.

    Args:
        x: `(n, channels, ...)`.
        name: The format of both moments.
        offset: Added to `x` on the way: channels that are not centred.
    """
    dims = (0, *range(2, x.dim()))
    mean, variance = _cancelling(x + offset, dims, name)
    return mean.flatten() - offset, variance.flatten()


def low_running_statistics(old: Tensor, new: Tensor, momentum: float, *, name: str) -> Tensor:
    """Return `old + momentum * (new - old)` as format `name` holds it.

    What is less than half a spacing of the old value is lost at every update.
    """
    return nearest(nearest(old, name) + momentum * (new - nearest(old, name)), name)


def low_ema(old: Tensor, new: Tensor, decay: float, *, name: str) -> Tensor:
    """Return `decay * old + (1 - decay) * new` as format `name` holds it."""
    return nearest(nearest(old, name) * decay + new * (1 - decay), name)


def _cancelling(x: Tensor, dims: tuple[int, ...], name: str) -> tuple[Tensor, Tensor]:
    mean = rounded(x.mean(dims, keepdim=True), name)
    squares = rounded(x.square().mean(dims, keepdim=True), name)
    return mean, rounded(squares - rounded(mean.square(), name), name).clamp_min(0)


def _norm_cancels(dose: str) -> Plant:
    name, _, offset = dose.rpartition("_")
    return Plant(
        seams={"norm": functools.partial(cancelling_norm, name=name, offset=float(offset))}
    )


def _batch_cancels(dose: str) -> Plant:
    name, _, offset = dose.rpartition("_")
    function = functools.partial(cancelling_batch_statistics, name=name, offset=float(offset))
    return Plant(seams={"batch_statistics": function})


FAULTS = (
    Fault(
        name="norm_overflow",
        sentence="A normalization that squares in FP16: where the sum of squares overflows, the "
        "row becomes zero.",
        source="pytorch/pytorch#133085",
        dose="how much larger the rows are",
        plant=lambda dose: Plant(
            seams={"norm": functools.partial(overflowing_norm, gain=float(dose))}
        ),
    ),
    Fault(
        name="norm_cancellation",
        sentence="A normalization whose variance is the mean square less the squared mean in a low "
        "format: both are large and cancel.",
        source="tracel-ai/burn#5607",
        dose="the format, and what is added to the rows",
        plant=_norm_cancels,
    ),
    Fault(
        name="batch_statistics_overflow",
        sentence="BatchNorm's variance from squares summed in FP16: sums stop at 65504 and large "
        "channels are not scaled down.",
        source="tensorflow/tensorflow#8535",
        dose="how much larger the activations are",
        plant=lambda dose: Plant(
            seams={
                "batch_statistics": functools.partial(
                    overflowing_batch_statistics, gain=float(dose)
                )
            }
        ),
    ),
    Fault(
        name="batch_statistics_cancellation",
        sentence="BatchNorm's variance as the mean square less the squared mean in a low format.",
        source="tenstorrent/tt-metal#45968",
        dose="the format, and what is added to the activations",
        plant=_batch_cancels,
    ),
    Fault(
        name="running_statistics",
        sentence="BatchNorm's running statistics are cast with the model: small updates are lost, "
        "and evaluation normalizes with old statistics.",
        source="NVIDIA/apex#144",
        dose="the format",
        plant=lambda dose: Plant(
            seams={"running_statistics": functools.partial(low_running_statistics, name=dose)}
        ),
    ),
    Fault(
        name="low_ema",
        sentence="The moving average of the weights is kept in a low format, where nearly every "
        "update is rounded away.",
        source="d8ahazard/sd_dreambooth_extension#1415",
        dose="the format",
        plant=lambda dose: Plant(seams={"ema": functools.partial(low_ema, name=dose)}),
    ),
)
