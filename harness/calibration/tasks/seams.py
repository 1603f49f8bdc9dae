"""The delicate computations of the tasks, as functions that a fault replaces one by one.

Each default is what careful code does: statistics, exponentials, losses and solves in FP32
whatever format comes in, in the order that loses least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Signatures differ: each default below has its own.
Seam = Callable[..., Any]
LAYER_NORM_EPS = 1e-5


def softmax(scores: Tensor) -> Tensor:
    """Return the softmax over the last dimension."""
    return torch.softmax(scores, dim=-1)


def attention_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return `scale * q @ k^T`; queries and keys of shape (..., length, width)."""
    return (q * scale) @ k.transpose(-2, -1)


def mask(scores: Tensor, keep: Tensor) -> Tensor:
    """Return the scores, those that may not be seen (`keep` false) at minus infinity."""
    return scores.masked_fill(~keep, -torch.inf)


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return layer normalization over the last dimension (Ba et al. 2016)."""
    return F.layer_norm(x, weight.shape, weight, bias, LAYER_NORM_EPS)


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel of `x` (batch, channels, ...), in FP32."""
    var, mean = torch.var_mean(x.float(), dim=(0, *range(2, x.ndim)), correction=0)
    return mean, var


def running_statistics(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    """Return the moving average after `new`, the statistics of one batch."""
    return old.float().lerp(new.float(), momentum)


def exp(x: Tensor) -> Tensor:
    """Return the exponential, in FP32."""
    return torch.exp(x.float())


def positions(index: Tensor) -> Tensor:
    """Return integer places in a document as floats."""
    return index.float()


def timesteps(t: Tensor) -> Tensor:
    """Return integer noise levels as floats."""
    return t.float()


def residual(x: Tensor, y: Tensor) -> Tensor:
    """Return the residual stream `x` after a branch's output `y`."""
    return x.float() + y


def pool(x: Tensor, dim: int) -> Tensor:
    """Return the mean over one dimension, in FP32."""
    return x.float().mean(dim)


def pairwise_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return squared distances (n, m) of rows (n, d) and (m, d), from differences, in FP32."""
    return (a.float()[:, None] - b.float()[None]).square().sum(-1)


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the solution x of `matrix @ x = right`, in FP32."""
    x: Tensor = torch.linalg.solve(matrix.float(), right.float())
    return x


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each row of logits (n, classes), in nats, in FP32.

    Targets are classes, int64 (n,), or their shares, FP32 (n, classes), as for `cross_entropy`.
    """
    return F.cross_entropy(logits.float(), targets, reduction="none")


def reduce_loss(per_item_losses: Tensor) -> Tensor:
    """Return the mean over all items."""
    return per_item_losses.float().mean()


def embedding(weight: Tensor, index: Tensor) -> Tensor:
    """Return the rows of `weight` at `index`; gradients of repeated rows add up."""
    return F.embedding(index, weight)


def cumulative_sum(x: Tensor, dim: int) -> Tensor:
    """Return running sums along one dimension, in FP32."""
    return torch.cumsum(x.float(), dim)


def ema(old: Tensor, new: Tensor, decay: float) -> Tensor:
    """Return the moving average of weights after `new`."""
    return old.float().lerp(new.float(), 1 - decay)


def logits(h: Tensor, weight: Tensor) -> Tensor:
    """Return `h @ weight^T`, one column per class."""
    return F.linear(h, weight)


DEFAULTS: Mapping[str, Seam] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            softmax,
            attention_scores,
            mask,
            norm,
            batch_statistics,
            running_statistics,
            exp,
            positions,
            timesteps,
            residual,
            pool,
            pairwise_distance,
            solve,
            token_losses,
            reduce_loss,
            embedding,
            cumulative_sum,
            ema,
            logits,
        )
    }
)


class Seamed(nn.Module):
    """A module that computes its delicate places through `self.seams`; `bind` exchanges them."""

    def __init__(self) -> None:
        super().__init__()
        self.seams: Mapping[str, Seam] = DEFAULTS


class Norm(nn.LayerNorm):
    """Layer normalization through the seam `norm`."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=LAYER_NORM_EPS)
        self.seams: Mapping[str, Seam] = DEFAULTS

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (..., width) normalized."""
        return self.seams["norm"](x, self.weight, self.bias)  # type: ignore[no-any-return]


def bind(model: nn.Module, seams: Mapping[str, Seam]) -> None:
    """Let a model and all modules within compute through these functions from now on."""
    if vars(model).get("seams") is seams:
        return
    for module in model.modules():
        own = vars(module)
        if "seams" in own:
            own["seams"] = seams
