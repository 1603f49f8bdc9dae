"""Runs chosen modules of a model in FP32 while the rest of it computes lower.

For the 16-bit formats FP32 inputs with autocast off are enough: the backward pass follows the
dtypes. TF32 leaves no trace in a dtype, so there the region also says when backward passes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

# Wraps the forward of one module: (forward, args, kwargs) -> outputs.
Region = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def in_region(model: nn.Module, names: Iterable[str], region: Region) -> Iterator[None]:
    """Run the forward of the named modules through `region` until the context ends.

    The instance's `forward` is replaced, so that hooks and subclass calls keep their order.
    """
    patched: list[tuple[nn.Module, Any]] = []
    try:
        for name in names:
            module = model.get_submodule(name)
            patched.append((module, module.__dict__.get("forward")))
            module.forward = _through(region, module.forward)
        yield
    finally:
        for module, own in reversed(patched):
            if own is None:
                del module.forward
            else:
                module.forward = own


def _through(region: Region, forward: Callable[..., Any]) -> Callable[..., Any]:
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        return region(forward, args, kwargs)

    return in_fp32


def fp32_region(device_type: str, inside: Callable[[], AbstractContextManager[object]]) -> Region:
    """Return the region in which inputs are FP32 and autocast is off.

    Args:
        device_type: `cpu` or `cuda`.
        inside: Context around the forward of the module, e.g. one that switches rounding off.
    """

    def region(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map(_to_fp32, (args, kwargs))
        with torch.autocast(device_type, enabled=False), inside():
            return forward(*args, **kwargs)

    return region


def _to_fp32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value


def ieee_region(read: Callable[[], str], write: Callable[[str], None]) -> Region:
    """Return the region that switches a device from TF32 to IEEE arithmetic, forward and backward.

    Autograd runs nodes from the last created to the first, so the nodes of a module run between
    those put at its outputs and those at its inputs. Where no input takes a gradient, IEEE
    arithmetic lasts until the backward pass ends, which errs on the safe side.

    What was found is put back, not TF32: a region may lie inside another, and an evaluation in
    IEEE arithmetic passes through it too.

    Args:
        read: Returns the device's switch, `ieee` or another value.
        write: Sets it.
    """

    def enter() -> None:
        found = read()
        if found != "ieee":
            write("ieee")
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(functools.partial(write, found))

    def region(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = read()
        leave = functools.partial(write, found)
        args, kwargs = tree_map(_calling(leave), (args, kwargs))
        write("ieee")
        try:
            outputs = forward(*args, **kwargs)
        finally:
            leave()
        return tree_map(_calling(enter), outputs)

    return region


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, action: Callable[[], object]) -> Tensor:
        ctx.action = action
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.action()
        return grads[0], None


def _calling(action: Callable[[], object]) -> Callable[[Any], Any]:
    def mark(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad:
            return _CallInBackward.apply(value, action)  # type: ignore[no-untyped-call]
        return value

    return mark
