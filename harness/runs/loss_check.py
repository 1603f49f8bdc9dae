"""What a workload's loss must be, and in which format it was really computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_SIXTEEN_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MIN_DISTINCT = 3


def checked_loss(loss: object, *, first: bool) -> Tensor:
    """Return `loss` if training can use it.

    Args:
        loss: What `loss_fn` returned in FP32.
        first: Whether this is step 0, where the loss must also be finite; reading it waits for
            the device.

    Raises:
        ValueError: It is no tensor, not a real scalar, has no gradient, or is not finite.
    """
    if not isinstance(loss, Tensor):
        raise ValueError(f"loss_fn returned {kind_of(loss)}; it must return a scalar tensor")
    if loss.ndim != 0:
        raise ValueError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}; "
            "it must return a scalar (reduce it, for example with .mean())"
        )
    if not loss.is_floating_point():
        raise ValueError(f"loss_fn returned {loss.dtype}; it must return a real floating loss")
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss without a gradient; it must depend on the model's "
            "parameters (no .detach(), .item() or no_grad on the way)"
        )
    if first and not math.isfinite(value := loss.item()):
        raise ValueError(f"the loss is {value} at step 0 in FP32; there is nothing to compare with")
    return loss


def kind_of(value: object) -> str:
    """Return what to call a value of the wrong type in a message."""
    return "None" if value is None else f"a value of type {type(value).__name__}"


def sixteen_bit_format(losses: Sequence[Tensor]) -> str | None:
    """Return `bf16` or `fp16` if FP32 training computed these losses in it, else None.

    Either openly (their dtype), or cast up afterwards: then every value is on the format's grid. Of
    fewer than three different values nothing is concluded; three FP32 values are all on the BF16
    grid by chance once in 2^48 (16 mantissa bits each).
    """
    values = [loss.detach().float() for loss in losses]
    telling = len({value.item() for value in values}) >= _MIN_DISTINCT
    for name, dtype in _SIXTEEN_BITS.items():
        if losses and losses[0].dtype == dtype:
            return name
        if telling and all(bool(value.to(dtype).float() == value) for value in values):
            return name
    return None
