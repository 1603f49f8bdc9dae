"""Weights before and after a run: the control's perturbation, and what training did to them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from harness.precision.magnitude import stored_values


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


def cpu_copies(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers (tied ones once, by their first name)."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: t.detach().to("cpu", copy=True) for name, t in tensors}


def final_state(model: nn.Module, start: Mapping[str, Tensor]) -> dict[str, float]:
    """Return counts over the trained model.

    Args:
        model: After training.
        start: `cpu_copies` of it before the first step.

    Returns:
        `nonfinite_weights` and `nonfinite_buffers` (elements), `moved_weight_share` (share of
        weights that differ from their start, 0 for a model without any), `unmoved_tensors`
        (parameters of which no element does), `unmoved_buffers` (floating ones, likewise),
        `num_parameters` (tied ones once). All elements of a parameter that came, or changed its
        shape, during training count as moved.
    """
    weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    total = sum(w.numel() for w in weights.values())
    changed = [_num_moved(w, start.get(name)) for name, w in weights.items()]
    moved = sum(changed)
    return {
        "nonfinite_weights": float(sum(_nonfinite(w) for w in weights.values())),
        "nonfinite_buffers": float(sum(_nonfinite(b.detach()) for b in model.buffers())),
        "moved_weight_share": moved / total if total else 0.0,
        "unmoved_tensors": float(
            sum(n == 0 < w.numel() for n, w in zip(changed, weights.values(), strict=True))
        ),
        "unmoved_buffers": float(
            sum(
                _num_moved(b.detach().cpu(), start.get(name)) == 0 < b.numel()
                for name, b in model.named_buffers()
                if b.is_floating_point()
            )
        ),
        "num_parameters": float(total),
    }


def _num_moved(weight: Tensor, start: Tensor | None) -> int:
    if start is None:
        return weight.numel()
    # Nested tensors have no shape to compare, and sparse ones store what they hold.
    ours, theirs = stored_values(weight), stored_values(start)
    if ours.shape != theirs.shape:
        return weight.numel()
    return int((ours != theirs).sum())


def _nonfinite(tensor: Tensor) -> int:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    values = stored_values(tensor)
    if values.element_size() == 1:
        values = values.float()  # torch has no `isfinite` of FP8
    return int(values.numel() - torch.isfinite(values).sum())
