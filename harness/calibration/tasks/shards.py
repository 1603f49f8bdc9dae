"""A batch in equal parts whose gradients are added one after the other.

As gradient accumulation adds micro-batches, and an all-reduce adds the parts of several devices;
here in one process, so that the format of the sums can be chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ShardRule:
    """How the parts' gradients become one.

    Attributes:
        shards: Number of equal parts, at least 2.
        accumulate: (sum so far, next) -> sum; the first part's gradient is the first sum.
        send: What a part's gradient goes through before it is added.
    """

    shards: int
    accumulate: Callable[[Tensor, Tensor], Tensor]
    send: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        if self.shards < 2:
            raise ValueError(f"shards={self.shards} is not allowed; allowed: >= 2")


class _Aliases(torch.autograd.Function):
    """Hands out a parameter once per part; adds what comes back as the rule says."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, rule: ShardRule) -> tuple[Tensor, ...]:
        ctx.rule = rule
        ctx.dtype = parameter.dtype
        return tuple(parameter.view_as(parameter) for _ in range(rule.shards))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rule: ShardRule = ctx.rule
        total = rule.send(gradients[0])
        for gradient in gradients[1:]:
            total = rule.accumulate(total, rule.send(gradient))
        return total.to(ctx.dtype), None


def sharded_loss(model: nn.Module, parts: Sequence[tuple[Any, ...]], rule: ShardRule) -> Tensor:
    """Return the mean of the parts' losses, whose backward adds gradients as the rule says.

    Args:
        model: Called with each part's tensors, returns that part's scalar loss.
        parts: `rule.shards` of them, of equal size.
        rule: How gradients are added; each part's is of its loss over the number of parts.

    Raises:
        ValueError: Another number of parts.
    """
    if len(parts) != rule.shards:
        raise ValueError(f"{len(parts)} parts for a rule of {rule.shards} shards")
    aliases: dict[str, tuple[Tensor, ...]] = {
        name: _Aliases.apply(parameter, rule)  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters()
    }
    losses = [
        torch.func.functional_call(model, {name: own[k] for name, own in aliases.items()}, part)
        for k, part in enumerate(parts)
    ]
    return torch.stack(losses).mean()
