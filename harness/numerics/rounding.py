"""Rounds FP32 tensors to the values of another format, to nearest with ties to even.

Bit-exact against the hardware casts, for every input including subnormals, infinities, NaN and
signed zeros. Straight-through gradients and where to round are `precision.emulation`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.numerics.formats import FP32, Format

_FP32_MANTISSA_BITS = FP32.mantissa_bits


def round_to_format(values: Tensor, fmt: Format) -> Tensor:
    """Return `values` rounded to the nearest values of `fmt`, in FP32 storage.

    Overflow gives an infinity of the same sign, or NaN in a format without infinity (E4M3),
    whatever the installed torch's own cast does there. NaN stays NaN.

    Args:
        values: FP32, any shape, any device.
        fmt: The target format.

    Returns:
        FP32 tensor of the same shape; a new tensor unless `fmt` is FP32.

    Raises:
        ValueError: The dtype is not float32.

    Source: IEEE 754-2019, 4.3.1 (roundTiesToEven); OCP 8-bit floating point 1.0, section 5.2
    (overflow of E4M3 without saturation).
    """
    if values.dtype is not torch.float32:
        raise ValueError(f"round_to_format takes float32, got {values.dtype}")
    if fmt is FP32:
        return values
    if fmt.storage_dtype == "float32":
        return round_mantissa(values, fmt.mantissa_bits)
    rounded = values.to(getattr(torch, fmt.storage_dtype)).to(torch.float32)
    if fmt.has_infinity:
        return rounded
    # torch before 2.12 gave NaN here, later releases saturate: decide before the cast.
    return torch.where(overflows(values, fmt) | values.isinf(), torch.nan, rounded)


def round_mantissa(values: Tensor, mantissa_bits: int) -> Tensor:
    """Return FP32 `values` rounded to fewer mantissa bits, to nearest with ties to even.

    Adds half of the last kept bit, less one where that bit is even, to the bit pattern, then
    clears the bits below: a carry runs into the exponent as it should, up to infinity.

    Args:
        values: FP32, any shape.
        mantissa_bits: Bits to keep, 1 to 22; the exponent keeps FP32's range.
    """
    drop = _FP32_MANTISSA_BITS - mantissa_bits
    bits = values.view(torch.int32)
    last_kept = torch.bitwise_and(torch.bitwise_right_shift(bits, drop), 1)
    rounded = last_kept.add_((1 << (drop - 1)) - 1).add_(bits).bitwise_and_(-(1 << drop))
    # A NaN with a full mantissa would carry into the sign bit.
    return torch.where(values.isnan(), values, rounded.view(torch.float32))


def overflows(values: Tensor, fmt: Format) -> Tensor:
    """Return where finite `values` round beyond the largest finite value of `fmt`.

    Args:
        values: Floating-point, any shape.
        fmt: The format.

    Returns:
        Boolean tensor; False for infinities and NaN, which have not overflowed here.
    """
    magnitude = values.abs()
    # The tie rounds to even: up, unless the format's last code is even (see Format).
    beyond = (
        magnitude >= fmt.overflow_threshold
        if fmt.has_infinity
        else magnitude > fmt.overflow_threshold
    )
    return beyond & values.isfinite()
