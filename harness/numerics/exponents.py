"""One-pass exponent histogram of a tensor, on the device, without waiting for it.

Under- and overflow of any format at any loss scale are read off it afterwards by
`exponent_counts.counts`, which needs no torch and is re-exported here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.numerics.exponent_counts import EXPONENT_BIAS, NONFINITE_BIN, NUM_BINS, counts

__all__ = ["EXPONENT_BIAS", "NONFINITE_BIN", "NUM_BINS", "counts", "exponent_histogram"]


def exponent_histogram(values: Tensor) -> Tensor:
    """Return how many elements have each biased FP32 exponent.

    Bin 0 counts zeros and FP32 subnormals, bin 255 NaN and infinities; bin b otherwise counts
    2^(b-127) <= |x| < 2^(b-126).

    Args:
        values: FP32, any shape, any device; flat and contiguous costs no copy. Empty gives zeros.

    Returns:
        int64 tensor of 256 counts on the same device.

    Raises:
        ValueError: The dtype is not float32.
    """
    if values.dtype is not torch.float32:
        raise ValueError(f"exponent_histogram takes float32, got {values.dtype}")
    bits = values.detach().reshape(-1).view(torch.int32)
    exponents = torch.bitwise_and(torch.bitwise_right_shift(bits, 23), 255)
    if values.device.type == "cpu":
        return torch.bincount(exponents, minlength=NUM_BINS)
    # bincount on CUDA reads the largest value back to size its output; a scatter does not wait.
    ones = torch.ones_like(exponents, dtype=torch.int64)
    histogram = torch.zeros(NUM_BINS, dtype=torch.int64, device=values.device)
    return histogram.scatter_add_(0, exponents.to(torch.int64), ones)
