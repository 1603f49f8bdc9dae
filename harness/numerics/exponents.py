"""One-pass exponent histogram of a tensor, on the device, without waiting for it.

Under- and overflow of any format at any loss scale are read off it afterwards by
`exponent_counts.counts`, which needs no torch and is re-exported here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.numerics import exponent_kernel
from harness.numerics.exponent_counts import EXPONENT_BIAS, NONFINITE_BIN, NUM_BINS, counts

__all__ = [
    "EXPONENT_BIAS",
    "NONFINITE_BIN",
    "NUM_BINS",
    "counts",
    "exponent_histogram",
    "exponent_histograms",
]

# On a CPU, what is counted together stays in the second-level cache.
_CACHED_ELEMENTS = 1 << 18
_PIECE_ELEMENTS = 1 << 20
# From here on the table of pairs, 256 times as large, pays.
_PAIRS_FROM = 1 << 18


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
    flat = values.detach()
    if not (flat.dim() == 1 and flat.is_contiguous()):
        flat = flat.reshape(-1)
    if flat.device.type == "cpu":
        return _of_one(flat)
    return exponent_histograms([flat])[0][0]


def exponent_histograms(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return one exponent histogram and the number of exact zeros per tensor.

    Args:
        tensors: At least one; all real, strided, floating and on one device. Other dtypes than
            FP32 are converted, which is exact for 16-bit and 8-bit formats; FP64 values beyond
            FP32's range count as infinite or zero.

    Returns:
        int64 counts of shape (tensors, 256), as of `exponent_histogram`, and int64 exact zeros of
        shape (tensors,), both on the device. A tensor without elements has zeros.

    Raises:
        ValueError: There is no tensor.
    """
    if not tensors:
        raise ValueError("exponent_histograms takes at least one tensor")
    device = tensors[0].device
    if device.type == "cpu":
        return _on_cpu([_fp32(t) for t in tensors])
    flat = [t.reshape(-1) for t in tensors]
    if exponent_kernel.is_available(device):
        return exponent_kernel.exponent_histograms(flat)
    return _scattered(flat)


def _on_cpu(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    if len(tensors) == 1:
        histograms = _of_one(tensors[0].reshape(-1))[None]
    elif sum(sizes := [t.numel() for t in tensors]) <= _CACHED_ELEMENTS:
        histograms = _counted_together(tensors, sizes)
    else:
        rows = []
        for batch in _batches(sizes):
            if len(batch) == 1:
                rows.append(_of_one(tensors[batch[0]].reshape(-1))[None])
            else:
                members = [tensors[k] for k in batch]
                rows.append(_counted_together(members, [sizes[k] for k in batch]))
        histograms = torch.cat(rows)
    return histograms, _exact_zeros_on_cpu(histograms, tensors)


def _batches(sizes: Sequence[int]) -> list[list[int]]:
    """Return runs of indices with few elements together, so that each stays in the cache."""
    batches: list[list[int]] = [[]]
    taken = 0
    for index, size in enumerate(sizes):
        if batches[-1] and taken + size > _CACHED_ELEMENTS:
            batches.append([])
            taken = 0
        batches[-1].append(index)
        taken += size
    return batches


def _counted_together(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Count small tensors in one go: a call costs as much as some 10,000 elements."""
    joined = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    bins = torch.bitwise_right_shift(joined.view(torch.int32), 23).bitwise_and_(NUM_BINS - 1)
    bins += _first_bins(tuple(sizes))
    return torch.bincount(bins, minlength=len(sizes) * NUM_BINS).view(-1, NUM_BINS)


@functools.lru_cache(maxsize=16)
def _first_bins(sizes: tuple[int, ...]) -> Tensor:
    starts = torch.arange(0, len(sizes) * NUM_BINS, NUM_BINS, dtype=torch.int32)
    return starts.repeat_interleave(torch.tensor(sizes), output_size=sum(sizes))


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg() if tensor.dtype is torch.float32 else tensor.float()


def _of_one(flat: Tensor) -> Tensor:
    if flat.numel() <= _PIECE_ELEMENTS:
        return _of_piece(flat)
    pieces = torch.split(flat, _PIECE_ELEMENTS)
    histogram = _of_piece(pieces[0])
    for piece in pieces[1:]:
        histogram += _of_piece(piece)
    return histogram


def _of_piece(flat: Tensor) -> Tensor:
    # Narrowing to a byte drops the sign, and bytes are the fastest thing that bincount counts.
    exponents = torch.bitwise_right_shift(flat.view(torch.int32), 23).to(torch.uint8)
    if flat.numel() < _PAIRS_FROM or flat.numel() % 2:
        return torch.bincount(exponents, minlength=NUM_BINS)
    # Two at a time: half as many counts, and repeated zeros do not wait for each other as much.
    pairs = exponents.view(torch.int16).to(torch.int32).bitwise_and_(NUM_BINS**2 - 1)
    counted = torch.bincount(pairs, minlength=NUM_BINS**2).view(NUM_BINS, NUM_BINS)
    return counted.sum(0).add_(counted.sum(1))


def _exact_zeros_on_cpu(histograms: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Tell zeros from FP32 subnormals, which share bin 0, only where that bin is not empty.

    Reading the bin through numpy waits for nothing on a CPU and is no device read.
    """
    zeros = histograms[:, 0].clone()
    values = zeros.numpy()
    for index in values.nonzero()[0].tolist():
        flat = tensors[index].reshape(-1)
        values[index] = flat.numel() - int(_count_nonzero(flat).numpy())
    return zeros


def _count_nonzero(flat: Tensor) -> Tensor:
    """Count FP32 elements but +0 and -0, on integers: the sign shifted out.

    On a CPU `count_nonzero` of floats branches on every element: 40 times as slow where zeros are
    scattered, as behind a ReLU.
    """
    return torch.count_nonzero(torch.bitwise_left_shift(flat.view(torch.int32), 1))


def _scattered(flat: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Count with a scatter: bincount on CUDA reads the largest value back to size its output."""
    device = flat[0].device
    histograms = torch.zeros(len(flat) * NUM_BINS, dtype=torch.int64, device=device)
    zeros = torch.zeros(len(flat), dtype=torch.int64, device=device)
    for index, tensor in enumerate(flat):
        wide = _fp32(tensor)
        bits = torch.bitwise_and(torch.bitwise_right_shift(wide.view(torch.int32), 23), 255)
        bins = bits.to(torch.int64) + index * NUM_BINS
        histograms.scatter_add_(0, bins, torch.ones_like(bins))
        zeros[index] = wide.numel() - _count_nonzero(wide)
    return histograms.view(len(flat), NUM_BINS), zeros
