"""What 16-bit storage makes of weight updates: a few sums per tensor, without waiting.

Everything is computed as FP32 arithmetic on joined tensors: on a CPU a comparison of floats costs
several times an addition.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.probes.flat import CHUNK_ELEMENTS

# Columns of a row: three counts of elements, then two sums.
COLUMNS = ("updates", "kept_bf16", "kept_fp16", "size", "along_bf16")


@dataclass(frozen=True)
class Piece:
    """Which elements of a list of tensors are looked at together.

    Attributes:
        modules: Owner of each row.
        sizes: Elements of each row, in order.
        members: Index of a tensor, first element, end.
        whole: Whether none of the tensors is cut.
    """

    modules: tuple[str, ...]
    sizes: tuple[int, ...]
    members: tuple[tuple[int, int, int], ...]
    whole: bool

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a flat copy of the elements, in the widest dtype among the tensors."""
        parts = [tensors[index] for index, _, _ in self.members]
        if self.whole and len(parts) > 1 and len({t.dtype for t in parts}) == 1:
            return torch._utils._flatten_dense_tensors(parts)  # type: ignore[no-untyped-call,no-any-return]
        spans = zip(parts, self.members, strict=True)
        return torch.cat([t.reshape(-1)[start:end] for t, (_, start, end) in spans])


@functools.lru_cache(maxsize=8)
def pieces(
    modules: tuple[str, ...], sizes: tuple[int, ...], limit: int = CHUNK_ELEMENTS
) -> tuple[Piece, ...]:
    """Return all elements of a list of tensors in order, in pieces of at most `limit`.

    Larger tensors come in several pieces, so that the copies of a large model are never all alive
    and counts stay below 2^24, where FP32 holds every integer. Empty ones are passed over.

    Args:
        modules: Owner of each tensor.
        sizes: Elements of each tensor.
        limit: Elements of a piece.
    """
    rows: list[list[tuple[str, int, int, int]]] = [[]]
    taken = 0
    for index, (module, size) in enumerate(zip(modules, sizes, strict=True)):
        for start in range(0, size, limit):
            end = min(start + limit, size)
            if taken and taken + end - start > limit:
                rows.append([])
                taken = 0
            rows[-1].append((module, index, start, end))
            taken += end - start
    return tuple(_piece(members, tensor_sizes=sizes) for members in rows if members)


def _piece(members: Sequence[tuple[str, int, int, int]], *, tensor_sizes: Sequence[int]) -> Piece:
    modules: list[str] = []
    sizes: list[int] = []
    for module, _, start, end in members:
        if modules and modules[-1] == module:
            sizes[-1] += end - start
        else:
            modules.append(module)
            sizes.append(end - start)
    whole = all(end - start == tensor_sizes[index] for _, index, start, end in members)
    return Piece(tuple(modules), tuple(sizes), tuple(m[1:] for m in members), whole)


def what_if_rows(old: Tensor, new: Tensor, *, sizes: Sequence[int]) -> Tensor:
    """Return what BF16 and FP16 weights would have kept of the updates of wider ones.

    With `w` the weight before it rounded to the format and `dw` the update, both rounded to
    nearest, an update is kept if `w + dw` does not round back to `w`; a weight beyond the range
    is infinite and keeps nothing. `size` sums `|dw|`, `along` sums
    `sign(dw) * (rounded(w + dw) - w)`.

    Args:
        old: Flat, FP32 or FP64.
        new: The same after the update.
        sizes: Elements, one after the other, that make a row.

    Returns:
        FP32 of shape (rows, 5), see `COLUMNS`; counts are exact up to 2^24 elements, sums within
        about 1e-5. NaN updates count as none and make sums NaN.
    """
    # Subtracted before FP64 weights lose bits.
    update = (new - old).float()
    old = old.float()
    columns = torch.empty(len(COLUMNS), old.numel(), device=old.device)
    updates, kept_bf16, kept_fp16, size, along = columns.unbind()
    direction = torch.sign(update)
    torch.abs(direction, out=updates)
    torch.abs(update, out=size)
    stored = old.half().float()
    # The sign of NaN, here infinite minus infinite, is 0 in torch.
    change = (stored + update).half().float().sub_(stored)
    torch.abs(change.sign_(), out=kept_fp16)
    stored = old.bfloat16().float()
    change = (stored + update).bfloat16().float().sub_(stored)
    torch.mul(change, direction, out=along)
    torch.abs(change.sign_(), out=kept_bf16)
    return _row_sums(columns, sizes)


def _row_sums(columns: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.stack([part.sum(1) for part in torch.split(columns, list(sizes), dim=1)])


def observed_rows(old: Tensor, new: Tensor, gradient: Tensor, *, sizes: Sequence[int]) -> Tensor:
    """Return how many weights with a non-zero gradient changed.

    Args:
        old: Flat, BF16 or FP16.
        new: The same after the update.
        gradient: Flat, of any floating dtype; elements that are NaN count as zero.
        sizes: Elements, one after the other, that make a row.

    Returns:
        FP32 of shape (rows, 5), see `COLUMNS`, those that are not known 0.
    """
    columns = torch.zeros(3, old.numel(), device=old.device)
    updates, kept_bf16, kept_fp16 = columns.unbind()
    torch.abs(torch.sign(gradient.float()), out=updates)
    kept = kept_bf16 if old.dtype is torch.bfloat16 else kept_fp16
    torch.mul(new.float().sub_(old.float()).sign_().abs_(), updates, out=kept)
    rows = _row_sums(columns, sizes)
    return torch.cat([rows, torch.zeros_like(rows[:, :2])], dim=1)
