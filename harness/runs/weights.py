"""Weights before and after a run: the control's perturbation, and what training did to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def perturb_(model: nn.Module, size: float, *, seed: int) -> None:
    """Multiply every floating weight by `1 + size * U(-1, 1)`, in place; nothing for `size` 0.

    Tied weights are perturbed once; buffers, integer and complex weights are left alone. The
    factors come from a CPU generator of their own, in order of registration.
    """
    if size == 0:
        return
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float32)
                factor = 1 + size * (2 * noise - 1)
                parameter.mul_(factor.to(device=parameter.device, dtype=parameter.dtype))


def cpu_copies(model: nn.Module) -> list[Tensor]:
    """Return copies of all parameters (tied ones once) on the CPU."""
    return [p.detach().to("cpu", copy=True) for p in model.parameters()]


def final_state(model: nn.Module, start: Sequence[Tensor]) -> dict[str, float]:
    """Return counts over the trained model.

    Args:
        model: After training.
        start: `cpu_copies` of it before the first step.

    Returns:
        `nonfinite_weights` and `nonfinite_buffers` (elements), `moved_weight_share` (share of
        weights that differ from their start, 0 for a model without any), `unmoved_tensors`
        (parameters of which no element does), `num_parameters` (tied ones once).
    """
    weights = [p.detach().cpu() for p in model.parameters()]
    total = sum(w.numel() for w in weights)
    changed = [int((w != s).sum()) for w, s in zip(weights, start, strict=True)]
    moved = sum(changed)
    return {
        "nonfinite_weights": float(sum(_nonfinite(w) for w in weights)),
        "nonfinite_buffers": float(sum(_nonfinite(b.detach()) for b in model.buffers())),
        "moved_weight_share": moved / total if total else 0.0,
        "unmoved_tensors": float(
            sum(n == 0 < w.numel() for n, w in zip(changed, weights, strict=True))
        ),
        "num_parameters": float(total),
    }


def _nonfinite(tensor: Tensor) -> int:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    return int(tensor.numel() - torch.isfinite(tensor).sum())
