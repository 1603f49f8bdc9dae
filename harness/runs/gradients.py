"""Gradients of any kind (dense, sparse, complex, 16-bit, missing): norm, clipping, counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.probes.flat import flat_chunks


def optimized_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that the optimizer updates, each once, in order."""
    unique: dict[int, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            unique.setdefault(id(parameter), parameter)
    return list(unique.values())


def gradient_views(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients as real strided tensors that share their memory.

    Missing gradients are passed over. A sparse gradient is coalesced in place (duplicate rows
    would count wrongly in a norm) and stands for its stored values; a complex one is seen as pairs
    of reals.
    """
    views = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout == torch.sparse_coo:
            if not gradient.is_coalesced():
                gradient = parameter.grad = gradient.coalesce()
            gradient = gradient._values()
        if gradient.is_complex():
            if gradient.is_conj():
                gradient = parameter.grad = gradient.resolve_conj()
            gradient = torch.view_as_real(gradient)
        views.append(gradient)
    return views


def global_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the L2 norm over all elements: 0-dim FP32 on the device, 0 without gradients.

    Computed as `torch.nn.utils.clip_grad_norm_` does, the norm of the tensors' norms, but in FP32
    whatever the gradients' dtype. Infinite when the squares leave FP32's range.
    """
    if not gradients:
        return torch.zeros((), device=device)
    same = all(g.dtype is torch.float32 for g in gradients)
    wide = gradients if same else [g.float() for g in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(wide), 2)))
    return norm


def clip_(gradients: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`.

    The factor is `max_norm / (norm + 1e-6)`, at most 1, as in `torch.nn.utils.clip_grad_norm_`; a
    non-finite norm makes the gradients NaN, as there.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # On a CPU reading a number waits for nothing, and multiplying by 1 changes nothing.
    if gradients and not (factor.device.type == "cpu" and float(factor) == 1.0):
        torch._foreach_mul_(list(gradients), factor)


def count_nonfinite(gradients: Sequence[Tensor], norm: Tensor, *, zero: Tensor) -> Tensor:
    """Return the number of NaN and infinite elements: 0-dim int64 on the device.

    Args:
        gradients: As `gradient_views` returns them.
        norm: Their global norm. Where it can be read for free (on a CPU) and is finite, the
            elements are not read again.
        zero: What counting starts from: a 0-dim int64 zero on the device.
    """
    if norm.device.type == "cpu" and math.isfinite(float(norm)):
        return zero
    total = zero
    for flat in flat_chunks(gradients):
        total = total + (flat.numel() - torch.count_nonzero(torch.isfinite(flat)))
    return total
