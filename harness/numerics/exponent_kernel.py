"""The exponent histogram as one fused pass on a GPU, there where Triton is installed.

CUDA builds of torch bring Triton along; other builds fall back to a scatter (`exponents`). One
launch reads every tensor where it lies, through a table of addresses: no joined copy.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.numerics.exponent_counts import NUM_BINS

# Elements that one program of the kernel reads, in blocks that it counts at once.
CHUNK_ELEMENTS = 1 << 14
BLOCK_ELEMENTS = 1 << 10
_READ_AS_THEY_ARE = (torch.float32, torch.bfloat16, torch.float16)


def is_available(device: torch.device) -> bool:
    """Return whether the fused kernel runs on a device: CUDA, with Triton installed."""
    return device.type == "cuda" and _triton_kernel() is not None


@functools.cache
def _triton_kernel() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from harness.numerics import exponent_triton

    return exponent_triton


def exponent_histograms(flat: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return what `exponents.exponent_histograms` returns.

    Args:
        flat: Flat contiguous tensors on one device, at least one.
    """
    kernel = _triton_kernel()
    assert kernel is not None, "is_available comes first"
    device = flat[0].device
    counted = torch.zeros(len(flat), NUM_BINS + 1, dtype=torch.int64, device=device)
    by_dtype: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(flat):
        if tensor.numel():
            known = tensor if tensor.dtype in _READ_AS_THEY_ARE else tensor.float()
            by_dtype.setdefault(known.dtype, []).append((index, known))
    for dtype, members in by_dtype.items():
        table = torch.from_numpy(chunk_table(members))
        if device.type == "cuda":
            # From pinned memory: a pageable copy may wait for the device.
            table = table.pin_memory().to(device, non_blocking=True)
        kernel.launch(table, counted, dtype)
    return counted[:, :NUM_BINS], counted[:, NUM_BINS]


def chunk_table(members: Sequence[tuple[int, Tensor]]) -> NDArray[np.int64]:
    """Return where each chunk of each tensor lies.

    Args:
        members: Index and flat contiguous tensor; at least one element in all.

    Returns:
        Shape (chunks, 3): address of the first element, number of elements, index.
    """
    parts = []
    for index, tensor in members:
        starts = np.arange(0, tensor.numel(), CHUNK_ELEMENTS, dtype=np.int64)
        rows = np.empty((len(starts), 3), dtype=np.int64)
        rows[:, 0] = tensor.data_ptr() + starts * tensor.element_size()
        rows[:, 1] = np.minimum(tensor.numel() - starts, CHUNK_ELEMENTS)
        rows[:, 2] = index
        parts.append(rows)
    return np.concatenate(parts)
