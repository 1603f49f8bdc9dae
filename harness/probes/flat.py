"""Many tensors as a few flat FP32 pieces, so that a statistic costs a few kernels, not hundreds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24


def flat_chunks(tensors: Iterable[Tensor], *, limit: int = CHUNK_ELEMENTS) -> Iterator[Tensor]:
    """Yield the elements of `tensors` in order, as flat FP32 tensors.

    A piece holds whole tensors up to `limit` elements together, or one larger tensor: the copies
    of a large model are never all alive at once. Empty tensors are passed over.

    Args:
        tensors: Real, strided, on one device; other floating dtypes are converted to FP32.
        limit: Elements to gather before a piece is yielded.
    """
    piece: list[Tensor] = []
    size = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.numel() == 0:
            continue
        if piece and size + flat.numel() > limit:
            yield _joined(piece)
            piece, size = [], 0
        piece.append(flat)
        size += flat.numel()
    if piece:
        yield _joined(piece)


def _joined(piece: list[Tensor]) -> Tensor:
    if len(piece) == 1:
        return piece[0].float()
    return torch.cat([part.float() for part in piece])
