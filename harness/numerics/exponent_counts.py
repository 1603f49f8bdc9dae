"""What a format would lose at a loss scale, read off an exponent histogram; needs no torch.

One histogram of FP32's 256 biased exponents answers for every format and every scale afterwards.
Thresholds therefore sit on powers of two; each deviation is stated at `counts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.numerics.formats import Format, floor_log2

NUM_BINS = 256
# Bin b < 255 holds 2^(b - 127) <= |x| < 2^(b - 126); bin 0 holds zeros and FP32 subnormals.
EXPONENT_BIAS = 127
NONFINITE_BIN = 255


def counts(histogram: Sequence[int], fmt: Format, scale: float = 1.0) -> dict[str, int]:
    """Return how many elements a format would flush, store as subnormal, or overflow.

    With `S = scale`, thresholds are rounded to powers of two:

    * `flushed`: `|S x|` < half of the smallest subnormal. Exact but for `|S x|` equal to that half,
      which rounds to even, zero, and is counted as subnormal here.
    * `subnormal`: half of the smallest subnormal <= `|S x|` < the smallest normal. Values less than
      half a spacing below the smallest normal round up to it and are still counted.
    * `near_max`: `|S x|` >= the power of two at or below max_finite, that is above about half of
      max_finite; includes `overflow`.
    * `overflow`: `|S x|` >= the next power of two above max_finite. Misses the sliver between the
      rounding threshold (65520 for FP16) and that power (65536).
    * `nonzero`: finite non-zero elements, the denominator of the four above.
    * `nonfinite`: NaN or infinite elements.

    Bin 0 holds zeros together with FP32 subnormals and is counted as zero: a gradient below
    2^-126 is not told from an exact zero.

    Args:
        histogram: 256 counts by biased FP32 exponent, as `exponents.exponent_histogram` returns.
        fmt: The format.
        scale: Loss scale S > 0; rounded down to a power of two, as the thresholds are.

    Raises:
        ValueError: The histogram does not have 256 bins, or the scale is not positive and finite.
    """
    if len(histogram) != NUM_BINS:
        raise ValueError(f"exponent histogram has {len(histogram)} bins; expected {NUM_BINS}")
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale={scale!r} is not allowed; allowed: a positive finite number")
    shift = EXPONENT_BIAS - floor_log2(scale)
    flushed_below = _bin(floor_log2(fmt.min_subnormal) - 1 + shift)
    normal_from = _bin(floor_log2(fmt.min_normal) + shift)
    top_from = _bin(floor_log2(fmt.max_finite) + shift)
    overflow_from = _bin(floor_log2(fmt.max_finite) + 1 + shift)
    finite = [int(n) for n in histogram[1:NONFINITE_BIN]]
    return {
        "flushed": sum(finite[: flushed_below - 1]),
        "subnormal": sum(finite[flushed_below - 1 : normal_from - 1]),
        "near_max": sum(finite[top_from - 1 :]),
        "overflow": sum(finite[overflow_from - 1 :]),
        "nonzero": sum(finite),
        "nonfinite": int(histogram[NONFINITE_BIN]),
    }


def scale_window(
    histogram: Sequence[int], fmt: Format, *, max_flushed_share: float = 1e-3
) -> tuple[int, int] | None:
    """Return which loss scales a format would have survived, as two powers of two.

    The first is the smallest s for which a scale of 2^s flushes at most `max_flushed_share` of the
    non-zero elements, the second the largest s for which nothing overflows, both as `counts` tells
    it and with its deviations: in the top binade of the format (for FP16 values between 65520 and
    65536 after scaling, for E4M3 from 464 on) an overflow is not seen, so that scale is the last
    that can be safe, not the first that cannot. The window is empty where the first is above the
    second.

    Args:
        histogram: 256 counts by biased FP32 exponent, of unscaled gradients.
        fmt: The format.
        max_flushed_share: Of the non-zero elements, between 0 and 1.

    Returns:
        None without a non-zero element, or with a non-finite one, whose size is unknown.

    Raises:
        ValueError: The histogram does not have 256 bins.
    """
    if len(histogram) != NUM_BINS:
        raise ValueError(f"exponent histogram has {len(histogram)} bins; expected {NUM_BINS}")
    filled = [b for b in range(1, NONFINITE_BIN) if histogram[b]]
    if not filled or histogram[NONFINITE_BIN]:
        return None
    allowed = max_flushed_share * sum(int(histogram[b]) for b in filled)
    below = 0
    kept_from = filled[-1]
    for b in filled:
        below += int(histogram[b])
        if below > allowed:
            kept_from = b
            break
    low = floor_log2(fmt.min_subnormal) - 1 + EXPONENT_BIAS - kept_from
    high = floor_log2(fmt.max_finite) + EXPONENT_BIAS - filled[-1]
    return low, high


def _bin(index: int) -> int:
    """Clip a threshold to the bins of finite non-zero FP32 values."""
    return min(max(index, 1), NONFINITE_BIN)
