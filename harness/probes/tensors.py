"""Any tensor as a real strided view that a statistic can read, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from harness.precision.tensor_trees import leaves

_ORDINARY = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


@contextmanager
def unseen() -> Iterator[None]:
    """Compute without gradients, autocast, and any mode that counts or changes ops.

    A probe's own casts must not appear in an audit, nor be rounded by an emulation.
    """
    # Putting modes aside costs as much as the rest; mostly there is none.
    modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        modes,
        torch._C._ExcludeDispatchKeyGuard(_AUTOCAST),
    ):
        yield


def real_view(tensor: Tensor) -> tuple[Tensor | None, str]:
    """Return the elements of a tensor as a real strided one, and why not where that fails.

    Complex values are seen as pairs of reals, sparse and nested ones as their stored values.

    Returns:
        A detached view or, for what must be resolved or coalesced, a copy; and an empty string. Or
        None and the reason: integer, boolean and quantized values have no floating-point exponent.
    """
    tensor = tensor.detach()
    if tensor.dtype in _ORDINARY and tensor.layout is torch.strided and not tensor.is_nested:
        return (tensor.resolve_neg() if tensor.is_neg() else tensor), ""
    if tensor.is_meta:
        return None, "tensors on the meta device have no values"
    if tensor.is_quantized:
        return None, "quantized values are integers"
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None, f"{str(tensor.dtype).removeprefix('torch.')} values are not floating-point"
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout is torch.jagged or tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    if tensor.is_nested:
        return None, "nested tensors of strided layout are not supported"
    if tensor.layout is not torch.strided:
        return None, f"layout {str(tensor.layout).removeprefix('torch.')} is not supported"
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor, ""


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a module was called with or returned.

    Nested containers and dataclasses are looked into.
    """
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))
