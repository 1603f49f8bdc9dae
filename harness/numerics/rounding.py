"""Rounds FP32 tensors to the values of another format: to nearest, toward zero, at random.

Bit-exact against the hardware casts, for every input including subnormals, infinities, NaN and
signed zeros, and without waiting for the device. Straight-through gradients and where to round are
`precision.emulation.products`'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.numerics.formats import FP32, ROUNDINGS, Format, Rounding

_FP32_MANTISSA_BITS = FP32.mantissa_bits
_FP32_BIAS = 127
_EXPONENT_CODE = 0xFF
_RANDOM_BITS = 53


def round_to_format(
    values: Tensor,
    fmt: Format,
    *,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
    saturate: bool = False,
) -> Tensor:
    """Return `values` rounded to values of `fmt`, in FP32 storage.

    Zeros keep their sign, NaN stays NaN, and a value that `fmt` holds is never moved.

    * `nearest`: ties to even. Overflow gives an infinity of the same sign, or NaN in a format
      without infinity (E4M3), whatever the installed torch's own cast does there.
    * `toward_zero`: the neighbour of smaller magnitude; finite values never overflow, beyond
      `max_finite` they become it.
    * `stochastic`: the neighbour above with the probability that makes the expectation the value
      itself, also among subnormals and below the smallest of them: exact for the formats with
      FP32's exponent, to 2^-53 of the spacing for others. A value beyond `max_finite` has no finite
      neighbour above and rounds to nearest.

    An infinity stays one, and becomes NaN in a format without infinity.

    Args:
        values: FP32, any shape (also empty), any device.
        fmt: The target format.
        rounding: How.
        generator: Source of the random bits of `stochastic`, on the device of `values`; None takes
            torch's default one.
        saturate: Overflow and infinities give `max_finite` of the same sign instead.

    Returns:
        FP32 tensor of the same shape; a new tensor unless `fmt` is FP32.

    Raises:
        ValueError: The dtype is not float32, or `rounding` is unknown.

    Source: IEEE 754-2019, 4.3.1 (roundTiesToEven), 4.3.2 (roundTowardZero); OCP 8-bit floating
    point 1.0, section 5.2 (overflow of E4M3, saturation); Croci et al., Stochastic rounding:
    implementation, error analysis and applications (2022), section 2.
    """
    if values.dtype is not torch.float32:
        raise ValueError(f"round_to_format takes float32, got {values.dtype}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is not allowed; allowed: {', '.join(ROUNDINGS)}")
    if fmt is FP32:
        return values
    if saturate:
        values = values.clamp(-fmt.max_finite, fmt.max_finite)
    if rounding == "nearest" and fmt.has_infinity:
        if fmt.storage_dtype != "float32":
            return _cast(values, fmt)
        if fmt.exponent_bits == FP32.exponent_bits:
            return round_mantissa(values, fmt.mantissa_bits)
    rounded = _round_bounded(
        values.clamp(-fmt.max_finite, fmt.max_finite), fmt, rounding=rounding, generator=generator
    )
    beyond = values.isinf()
    if rounding != "toward_zero":
        beyond = beyond | overflows(values, fmt)
    limit = torch.full_like(values, torch.inf if fmt.has_infinity else torch.nan)
    return torch.where(beyond, limit.copysign_(values), rounded)


def round_mantissa(values: Tensor, mantissa_bits: int) -> Tensor:
    """Return FP32 `values` rounded to fewer mantissa bits, to nearest with ties to even.

    Adds half of the last kept bit, less one where that bit is even, to the bit pattern, then
    clears the bits below: a carry runs into the exponent as it should, up to infinity.

    Args:
        values: FP32, any shape.
        mantissa_bits: Bits to keep, 1 to 22; the exponent keeps FP32's range.
    """
    drop = _FP32_MANTISSA_BITS - mantissa_bits
    bits = values.resolve_neg().view(torch.int32)
    last_kept = torch.bitwise_and(torch.bitwise_right_shift(bits, drop), 1)
    rounded = last_kept.add_((1 << (drop - 1)) - 1).add_(bits).bitwise_and_(-(1 << drop))
    # A NaN with a full mantissa would carry into the sign bit.
    return torch.where(values.isnan(), values, rounded.view(torch.float32))


def overflows(values: Tensor, fmt: Format) -> Tensor:
    """Return where finite `values` round (to nearest) beyond the largest finite value of `fmt`.

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


def _cast(values: Tensor, fmt: Format) -> Tensor:
    return values.to(getattr(torch, fmt.storage_dtype)).to(torch.float32)


def _round_bounded(
    values: Tensor, fmt: Format, *, rounding: Rounding, generator: torch.Generator | None
) -> Tensor:
    """Round values that do not exceed `max_finite`."""
    if rounding == "nearest" and fmt.storage_dtype != "float32":
        return _cast(values, fmt)
    if fmt.exponent_bits == FP32.exponent_bits:
        return _round_bits(values, fmt, rounding, generator)
    return _round_multiples(values, fmt, rounding, generator)


def _round_bits(
    values: Tensor, fmt: Format, rounding: Rounding, generator: torch.Generator | None
) -> Tensor:
    """Round to a format with FP32's exponent: low bits of the pattern go, among subnormals too."""
    drop = _FP32_MANTISSA_BITS - fmt.mantissa_bits
    bits = values.resolve_neg().view(torch.int32)
    if rounding == "stochastic":
        # Carries with the probability (dropped bits) / 2^drop.
        noise = torch.randint(
            1 << drop, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
        )
        bits = noise.add_(bits)
    cut = torch.bitwise_and(bits, -(1 << drop)).view(torch.float32)
    return torch.where(values.isnan(), values, cut)


def _round_multiples(
    values: Tensor, fmt: Format, rounding: Rounding, generator: torch.Generator | None
) -> Tensor:
    """Round to multiples of the spacing that the format has at each value.

    The spacing is a power of two, so dividing by it is exact, and so is the product afterwards.
    """
    bits = values.resolve_neg().view(torch.int32)
    code = bits.bitwise_right_shift(_FP32_MANTISSA_BITS).bitwise_and_(_EXPONENT_CODE)
    # Below the normal range the spacing stays. NaN's code has no inverse power in FP32.
    lowest = 2 - 2 ** (fmt.exponent_bits - 1) + _FP32_BIAS
    code = code.clamp_(lowest, _EXPONENT_CODE - 1)
    spacing = (code - fmt.mantissa_bits).bitwise_left_shift_(_FP32_MANTISSA_BITS)
    inverse = (2 * _FP32_BIAS + fmt.mantissa_bits - code).bitwise_left_shift_(_FP32_MANTISSA_BITS)
    multiple = values * inverse.view(torch.float32)
    if rounding == "nearest":
        rounded = multiple.round()
    elif rounding == "toward_zero":
        rounded = multiple.trunc()
    else:
        # Of magnitudes: 1 - 2^-130, the distance of a tiny negative value from -1, is 1 in FP32.
        rounded = _stochastic_integers(multiple.abs_(), generator)
    return torch.copysign(rounded * spacing.view(torch.float32), values)


def _stochastic_integers(magnitudes: Tensor, generator: torch.Generator | None) -> Tensor:
    below = magnitudes.floor()
    # 53 bits, which FP64 holds, so that values far below the smallest subnormal keep their chance.
    drawn = torch.randint(
        1 << _RANDOM_BITS, magnitudes.shape, device=magnitudes.device, generator=generator
    )
    return below + (drawn < (magnitudes - below).double() * 2.0**_RANDOM_BITS)
