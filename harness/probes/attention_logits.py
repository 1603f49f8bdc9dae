"""The largest attention logits of a forward pass: what goes into softmax, by module.

Seen below autograd, where composite ops are resolved: a fused attention kernel never forms its
logits, so they are computed again beside it, block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.precision.composites import WatchingMode, run_below
from harness.precision.module_calls import ModuleCalls
from harness.precision.module_names import ROOT
from harness.probes.tensors import unseen

_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")
# Logits that are held at once.
_BLOCK_ELEMENTS = 1 << 24


class AttentionLogits:
    """Collects maxima while a forward pass runs.

    Attributes:
        largest: One entry per softmax or fused attention, in order: the innermost running module's
            name and the largest logit, 0-dim FP32 on the device; NaN where one is. Of a softmax it
            is the largest input (masks are in it, far below zero), of a fused attention the largest
            magnitude at positions that are not masked.
    """

    def __init__(self) -> None:
        self.largest: list[tuple[str, Tensor]] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch what runs inside the context; changes no value."""
        with ModuleCalls().watching(model) as calls:

            def found(largest: Tensor) -> None:
                self.largest.append((calls.current()[0] or ROOT, largest))

            with _Watch(found):
                yield


class _Watch(WatchingMode):
    def __init__(self, found: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op; look at its inputs if it is an attention."""
        name = func._schema.name
        if name in _SOFTMAX:
            if args[0].numel():
                with unseen():  # by an audit around this mode, that is
                    self._found(args[0].detach().amax().float())
        elif name.startswith("aten::_scaled_dot_product_") and not name.endswith("_backward"):
            named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
            with unseen():
                largest = largest_logit(**_attention_arguments({**named, **kwargs}))
            if largest is not None:
                self._found(largest)
        return run_below(func, args, kwargs)


def _attention_arguments(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "query": given["query"],
        "key": given["key"],
        "mask": given.get("attn_mask", given.get("attn_bias")),
        "is_causal": bool(given.get("is_causal", False)),
        "scale": given.get("scale"),
    }


def largest_logit(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor | None:
    """Return the largest magnitude of `scale * query @ key^T` over what the mask leaves.

    Computed in FP32, in blocks of queries.

    Args:
        query: (..., heads, length, width), any floating dtype.
        key: (..., key heads, key length, width); fewer heads are shared by groups of queries.
        mask: Broadcasts to (..., heads, length, key length): boolean (True: attend) or added;
            positions where an added mask is below -1e4 count as masked.
        is_causal: Whether a query sees only the keys up to its own position.
        scale: Default 1 / sqrt(width).

    Returns:
        0-dim FP32 on the device; NaN if any is; None when there are no logits.
    """
    query, key = query.detach().float(), key.detach().float()
    length, width = query.shape[-2:]
    if query.numel() == 0 or key.numel() == 0:
        return None
    factor = 1.0 / math.sqrt(width) if scale is None else scale
    if query.dim() >= 4 and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    transposed = key.transpose(-1, -2)
    num_keys = key.shape[-2]
    rows = max(1, _BLOCK_ELEMENTS // max(1, num_keys * query[..., 0, 0].numel()))
    maxima: list[Tensor] = []
    for first in range(0, length, rows):
        logits = (query[..., first : first + rows, :] @ transposed).mul_(factor).abs_()
        seen = _visible(mask, first, logits.shape, is_causal=is_causal, device=logits.device)
        for where in seen:
            logits.masked_fill_(~where, 0.0)
        maxima.append(logits.amax())
    return torch.stack(maxima).amax()


def _visible(
    mask: Tensor | None,
    first: int,
    shape: Sequence[int],
    *,
    is_causal: bool,
    device: torch.device,
) -> list[Tensor]:
    rows, num_keys = shape[-2:]
    visible = []
    if is_causal:
        positions = torch.arange(first, first + rows, device=device)[:, None]
        visible.append(torch.arange(num_keys, device=device)[None, :] <= positions)
    if mask is not None:
        block = mask[..., first : first + rows, :] if mask.shape[-2] != 1 else mask
        visible.append(block if block.dtype is torch.bool else block > -1e4)
    return visible
