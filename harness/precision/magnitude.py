"""The largest magnitude in a tensor, on the device: non-finite exactly where an element is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# torch's kernels compute in these; others (FP8) are read through FP32.
_COMPUTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def magnitude(tensor: Tensor) -> Tensor:
    """Return the largest absolute value as a 0-dim FP64 tensor on the device.

    NaN if an element is NaN, infinite if one is infinite, 0 for an empty tensor. A complex tensor
    is seen as pairs of reals. One pass, no temporaries, no wait for the device.
    """
    if tensor._is_zerotensor():
        # Zeros without memory, from forward-mode derivatives: torch's norm kernel reads address 0.
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    value = stored_values(tensor.detach())
    if value.is_quantized:
        value = value.dequantize()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if value.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=value.device)
    if value.dtype not in _COMPUTABLE:
        value = value.float()
    # dtype=float64 would convert every element first.
    largest: Tensor = torch.linalg.vector_norm(value, math.inf)
    return largest.double()


def stored_values(value: Tensor) -> Tensor:
    """Return the stored values of a tensor of any layout as a strided one, in order."""
    if value.layout is torch.sparse_coo:
        return value.coalesce().values()
    if value.layout is torch.jagged or value.layout in _COMPRESSED:
        return value.values()
    if value.is_nested:
        return torch.cat([part.flatten() for part in value.unbind()])
    return value if value.layout is torch.strided else value.to_dense()


def floating_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the floating-point and complex tensors among an op's arguments or results.

    Those on the meta device have no values and are left out: nested tensors keep lengths in such.
    """
    for value in values:
        if isinstance(value, Tensor):
            if (value.is_floating_point() or value.is_complex()) and not value.is_meta:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from floating_tensors(value)
        elif isinstance(value, dict):
            yield from floating_tensors(value.values())


class Magnitudes:
    """Magnitudes of the tensors of one step, each computed once as long as it is not changed."""

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, tensor: Tensor) -> Tensor:
        """Return `magnitude(tensor)`."""
        version = 0 if tensor.is_inference() else tensor._version
        known: tuple[int, Tensor] | None = self._known.get(tensor)  # type: ignore[no-untyped-call]
        if known is not None and known[0] == version:
            return known[1]
        value = magnitude(tensor)
        self._known[tensor] = (version, value)
        return value

    def renew(self, tensor: Tensor) -> Tensor:
        """Return the magnitude of a tensor that an op has just written, whatever is known of it."""
        self._known.pop(tensor, None)  # type: ignore[no-untyped-call]
        return self.of(tensor)
