"""The Triton kernel behind `exponent_kernel`; importing this module needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.numerics.exponent_kernel import BLOCK_ELEMENTS, CHUNK_ELEMENTS

_ELEMENT: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    table, counted, element: tl.constexpr, chunk: tl.constexpr, block: tl.constexpr
) -> None:
    """Count the exponents and exact zeros of one chunk; one program each."""
    program = tl.program_id(0)
    row = table + program * 3
    values = tl.load(row).to(tl.pointer_type(element))
    length = tl.load(row + 1)
    index = tl.load(row + 2)
    bins = tl.arange(0, 256)
    histogram = tl.zeros([256], dtype=tl.int32)
    zeros = tl.zeros([block], dtype=tl.int32)
    offsets = tl.arange(0, block)
    for start in range(0, chunk, block):
        inside = start + offsets < length
        value = tl.load(values + start + offsets, mask=inside, other=0.0)
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
        histogram += tl.histogram((bits >> 23) & 255, 256)
        zeros += ((bits & 0x7FFFFFFF) == 0).to(tl.int32)
    # What lies beyond the tensor was read as zero.
    padding = (chunk - length).to(tl.int32)
    histogram -= tl.where(bins == 0, padding, 0)
    place = counted + index * 257
    tl.atomic_add(place + bins, histogram.to(tl.int64), mask=histogram > 0)
    tl.atomic_add(place + 256, (tl.sum(zeros) - padding).to(tl.int64))


def launch(table: Tensor, counted: Tensor, dtype: torch.dtype) -> None:
    """Add the counts of the chunks in `table` to `counted`, on the current stream.

    Args:
        table: int64 of shape (chunks, 3), see `exponent_kernel.chunk_table`, on the device.
        counted: int64 of shape (tensors, 257): 256 exponents, then exact zeros.
        dtype: Of the tensors that the table points to.
    """
    with torch.cuda.device_of(counted):  # type: ignore[no-untyped-call]
        _count[(len(table),)](
            table, counted, element=_ELEMENT[dtype], chunk=CHUNK_ELEMENTS, block=BLOCK_ELEMENTS
        )
