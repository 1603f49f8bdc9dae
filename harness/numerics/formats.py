"""The floating-point formats as values: range, spacing and unit roundoff; nothing here needs torch.

Rounding a tensor to a format is `rounding`; counting what a format would lose is `exponent_counts`.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import Literal

# How a value between two neighbours of a format is rounded; `rounding` does it.
Rounding = Literal["nearest", "toward_zero", "stochastic"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "toward_zero", "stochastic")


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format.

    Attributes:
        name: Short name: `fp32`, `tf32`, `bf16`, `fp16`, `fp8_e4m3`, `fp8_e5m2`, or
            `e<exponent bits>m<mantissa bits>`.
        exponent_bits: Bits of the biased exponent.
        mantissa_bits: Stored bits of the significand, without the implicit one.
        max_finite: Largest finite value.
        min_normal: Smallest positive normal value.
        min_subnormal: Smallest positive value, 2^-(mantissa_bits) * min_normal.
        unit_roundoff: Largest relative error of rounding to nearest in the normal range,
            2^-(mantissa_bits + 1).
        storage_dtype: Name of the torch dtype that holds a value; `float32` for formats that are
            emulated. TF32 is a compute format: FP32 storage, of which a matmul reads 10 mantissa
            bits.
        has_infinity: Whether values beyond the range become infinite; E4M3 ("fn") has NaN only.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max_finite: float
    min_normal: float
    min_subnormal: float
    unit_roundoff: float
    storage_dtype: str
    has_infinity: bool = True

    @property
    def overflow_threshold(self) -> float:
        """Smallest magnitude that rounds (to nearest, ties to even) beyond `max_finite`.

        That is `max_finite` plus half the spacing there: 65520 for FP16. The tie itself goes up
        where the last mantissa bit of `max_finite` is 1, which holds for every IEEE-like format;
        E4M3 keeps its last code for NaN, so its `max_finite` is even and the tie 464 goes down.
        """
        exponent_of_max = 2.0 ** floor_log2(self.max_finite)
        return self.max_finite + exponent_of_max * self.unit_roundoff


def floor_log2(value: float) -> int:
    """Return the exponent of the largest power of two that is not above a positive number."""
    return math.frexp(value)[1] - 1


def _ieee_like(name: str, exponent_bits: int, mantissa_bits: int, storage_dtype: str) -> Format:
    bias = 2 ** (exponent_bits - 1) - 1
    min_normal = 2.0 ** (1 - bias)
    return Format(
        name=name,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        max_finite=(2.0 - 2.0**-mantissa_bits) * 2.0**bias,
        min_normal=min_normal,
        min_subnormal=min_normal * 2.0**-mantissa_bits,
        unit_roundoff=2.0 ** -(mantissa_bits + 1),
        storage_dtype=storage_dtype,
    )


# IEEE 754-2019, table 3.5.
FP32 = _ieee_like("fp32", 8, 23, "float32")
FP16 = _ieee_like("fp16", 5, 10, "float16")
# NVIDIA A100 architecture white paper: FP32's exponent with FP16's mantissa, in FP32 storage.
TF32 = _ieee_like("tf32", 8, 10, "float32")
# Intel, BFLOAT16 hardware numerics definition (2018): the upper half of an FP32.
BF16 = _ieee_like("bf16", 8, 7, "bfloat16")
# OCP 8-bit floating point specification, revision 1.0, table 2. E5M2 is IEEE-like; E4M3 gives up
# infinity for one more binade, of which the last code is NaN: its largest value is 1.75 * 2^8.
FP8_E5M2 = _ieee_like("fp8_e5m2", 5, 2, "float8_e5m2")
FP8_E4M3 = Format(
    name="fp8_e4m3",
    exponent_bits=4,
    mantissa_bits=3,
    max_finite=448.0,
    min_normal=2.0**-6,
    min_subnormal=2.0**-9,
    unit_roundoff=2.0**-4,
    storage_dtype="float8_e4m3fn",
    has_infinity=False,
)

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (FP32, TF32, BF16, FP16, FP8_E4M3, FP8_E5M2)}


_EXPONENT_MANTISSA = re.compile(r"e([2-8])m([1-9]|1[0-9]|2[0-2])")


def is_format(name: str) -> bool:
    """Return whether `get_format` knows `name`."""
    return name in FORMATS or _EXPONENT_MANTISSA.fullmatch(name) is not None


@functools.cache
def get_format(name: str) -> Format:
    """Return the format called `name`.

    Args:
        name: One of `FORMATS`, or `e<E>m<M>` with 2 <= E <= 8 and 1 <= M <= 22 for the IEEE-like
            format with E exponent and M stored mantissa bits: its last exponent code holds
            infinities and NaN, its first one zeros and subnormals. Values are kept in FP32, of
            which each such format is a subset: `e5m2` has the values of `fp8_e5m2`.

    Raises:
        ValueError: No such format; the message lists the known ones.

    >>> get_format("e3m4").max_finite
    15.5
    """
    if name in FORMATS:
        return FORMATS[name]
    match = _EXPONENT_MANTISSA.fullmatch(name)
    if match is None:
        raise ValueError(
            f"unknown format {name!r}; known: {', '.join(FORMATS)}, "
            "e<exponent bits 2-8>m<mantissa bits 1-22>"
        )
    return _ieee_like(name, int(match[1]), int(match[2]), "float32")
