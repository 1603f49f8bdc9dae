"""FP32 again, and low precision as it should be: what no rule may reject.

Null arms differ from the reference by nothing but rounding: other first bits of the weights, or the
same formulas in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from harness.calibration.tasks.seams import LAYER_NORM_EPS
from harness.precision.policy import LossScaleSettings

_DYNAMIC = LossScaleSettings(kind="dynamic")

# Size of the disturbance of the initial weights: of BF16's rounding, half of it, FP32's last bit.
PERTURBATIONS: Mapping[str, float] = MappingProxyType(
    {"fp32_noise@a": 2.0**-8, "fp32_noise@b": 2.0**-9, "fp32_ulp": 2.0**-23}
)

HARMLESS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tf32": {"compute_format": "tf32"},
        "bf16": {"compute_format": "bf16"},
        "fp16": {"compute_format": "fp16", "loss_scale": _DYNAMIC},
        "bf16_stochastic": {
            "compute_format": "bf16",
            "param_format": "bf16",
            "weight_rounding": "stochastic",
            "low_precision_ops": ("all",),
        },
        "fp8": {
            "compute_format": "fp8_e4m3",
            "gradient_format": "fp8_e5m2",
            "operand_scaling": "per_tensor",
        },
        "e8m6": {"compute_format": "e8m6"},
    }
)

SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "fp32": "FP32 everywhere; the reference.",
        "fp32_noise": "FP32 from weights disturbed by about one rounding of BF16 or half of it.",
        "fp32_ulp": "FP32 from weights disturbed in their last bit.",
        "fp32_order": "FP32 with the same formulas written another way, so that sums round "
        "differently.",
        "fp32_shards": "FP32 with the gradient added up over two halves of the batch.",
        "tf32": "TF32 products.",
        "bf16": "BF16 autocast, FP32 weights.",
        "fp16": "FP16 autocast, FP32 weights, dynamic loss scaling.",
        "bf16_stochastic": "BF16 weights whose updates are rounded stochastically.",
        "fp8": "FP8 products, E4M3 forward and E5M2 gradients, a scale per tensor.",
        "e8m6": "Products in a format with one mantissa bit less than BF16.",
    }
)


def attention_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return attention's scores, scaled after the product instead of before it."""
    return q @ k.transpose(-2, -1) * scale


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return layer normalization written out."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred * (variance + LAYER_NORM_EPS).rsqrt() * weight + bias


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel, written out."""
    flat = x.transpose(0, 1).flatten(1)
    mean = flat.mean(1)
    return mean, (flat - mean[:, None]).square().mean(1)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return cross-entropy as the logarithm of a sum less the target's logit."""
    if targets.is_floating_point():
        return logits.logsumexp(-1) - (logits * targets).sum(-1)
    return logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def logits(h: Tensor, weight: Tensor) -> Tensor:
    """Return `h @ weight.T`, the inner dimension in two halves."""
    half = h.shape[-1] // 2
    first = h[..., :half] @ weight[..., :half].transpose(-2, -1)
    return first + h[..., half:] @ weight[..., half:].transpose(-2, -1)


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the solution of `matrix x = right`, unknowns in the opposite order."""
    turned: Tensor = torch.linalg.solve(matrix.flip(-1, -2), right.flip(-2))
    return turned.flip(-2)


def pool(x: Tensor, dim: int) -> Tensor:
    """Return the mean, each element divided before the sum."""
    return (x / x.shape[dim]).flip(dim).sum(dim)


def cumulative_sum(x: Tensor, dim: int) -> Tensor:
    """Return the cumulative sum, as the total less what is still to come."""
    rest = x.flip(dim).cumsum(dim).flip(dim) - x
    return x.sum(dim, keepdim=True) - rest


# Seam -> the same formula in another order; a task takes those that it has.
ANOTHER_ORDER: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            attention_scores,
            norm,
            batch_statistics,
            token_losses,
            logits,
            solve,
            pool,
            cumulative_sum,
        )
    }
)
