"""Runs chosen modules of a model in FP32 while the rest of it computes lower.

For the 16-bit formats FP32 inputs with autocast off are enough: the backward pass follows the
dtypes. TF32 leaves no trace in a dtype, so there the region also says when backward passes it. A
region of one direction runs the module twice (`passes`), but for a GPU's TF32, which is a switch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.precision.directions import DIRECTIONS, Direction
from harness.precision.passes import Passes, detached, joined_tree
from harness.precision.tensor_trees import map_tensors
from harness.precision.undisturbed import attributes_kept

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

    An input that the module changes in place is changed for its caller too, rounded to its format.

    Args:
        device_type: `cpu` or `cuda`.
        inside: Context around the forward of the module, e.g. one that switches rounding off.
    """

    def region(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        copies = _Copies(_to_fp32)
        args, kwargs = copies.of((args, kwargs))
        with torch.autocast(device_type, enabled=False), inside():
            result = forward(*args, **kwargs)
            for original, changed in copies.changed():
                original.copy_(changed)
            return result

    return region


def _to_fp32(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


class _Copies:
    """Copies of a module's inputs, and which of them it has changed in place."""

    def __init__(self, copy: Callable[[Tensor], Tensor]) -> None:
        self._copy = copy
        self._made: dict[int, tuple[Tensor, Tensor, int]] = {}

    def of(self, inputs: Any) -> Any:
        """Return the inputs with their tensors copied; one given twice stays one."""
        return map_tensors(self._one, inputs)

    def _one(self, value: Tensor) -> Tensor:
        if id(value) not in self._made:
            made = self._copy(value)
            self._made[id(value)] = value, made, _version(made)
        return self._made[id(value)][1]

    def changed(self) -> list[tuple[Tensor, Tensor]]:
        """Return (input, its copy) for every copy that was written to."""
        return [
            (value, made)
            for value, made, version in self._made.values()
            if made is not value and _version(made) != version
        ]


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def directed_region(
    module: nn.Module, direction: Direction, *, kept: Region, passes: Passes
) -> Region:
    """Return the region in which one direction of a module is computed in FP32.

    The module runs twice, once in FP32 and once as without the region. Attributes that it sets
    (a loss of its own) are those of the run that has the graph; buffers those of the run that gives
    the values.

    Args:
        module: The module.
        direction: `forward`: values in FP32, gradients lower; `backward` the reverse.
        kept: The region of both directions.
        passes: Says which of the runs is which.
    """

    def plain(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs)

    first, second = (kept, plain) if direction == "forward" else (plain, kept)

    def region(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return first(forward, args, kwargs)
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"policy.fp32_modules: {direction}: entries cannot be combined with torch.func "
                "transforms around the module"
            )
        for_values, buffers = _Copies(_private), _Buffers(module)
        try:
            with passes.values(), attributes_kept(module):
                value_args, value_kwargs = for_values.of((args, kwargs))
                values = detached(first(forward, value_args, value_kwargs))
                buffers.note()
        finally:
            buffers.restore()
        changed = for_values.changed()
        changed_ids = {id(value) for value, _ in changed}
        for_graph = _Copies(lambda value: value.clone() if id(value) in changed_ids else value)
        with passes.graph():
            graph_args, graph_kwargs = for_graph.of((args, kwargs))
            graph = second(forward, graph_args, graph_kwargs)
        buffers.put()
        return _result(values, graph, changed, for_graph)

    return region


def _private(value: Tensor) -> Tensor:
    if isinstance(value, nn.Parameter):
        return value
    # Not a leaf, which could not be changed in place.
    return value.detach().requires_grad_(value.requires_grad).clone()


def _result(values: Any, graph: Any, changed: list[tuple[Tensor, Tensor]], copies: _Copies) -> Any:
    for original, value in changed:
        original.copy_(joined_tree(copies.of(original), value.detach().clone()))
    return joined_tree(graph, values)


class _Buffers:
    """The buffers of a module that runs twice: both runs start alike, the first one's results stay.

    Written through `data`, since autograd may have saved a buffer that only then gets its value.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = self._values()
        self._weights = self._versions()
        self._after: list[tuple[Tensor, Tensor]] = []

    def _values(self) -> list[tuple[Tensor, Tensor]]:
        return [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]

    def _versions(self) -> int:
        return sum(_version(weight) for weight in self._module.parameters())

    def note(self) -> None:
        if self._versions() != self._weights:
            raise RuntimeError(
                "policy.fp32_modules: the module changes its own weights in its forward pass, so "
                "it cannot run twice; write the entry without a direction"
            )
        self._after = self._values()

    def restore(self) -> None:
        for buffer, value in self._before:
            buffer.data.copy_(value)

    def put(self) -> None:
        current = {id(buffer) for buffer in self._module.buffers()}
        for buffer, value in self._after:
            if id(buffer) in current:
                buffer.data.copy_(value)


def ieee_region(
    read: Callable[[], str],
    write: Callable[[str], None],
    *,
    directions: Collection[Direction] = DIRECTIONS,
) -> Region:
    """Return the region that switches a device from TF32 to IEEE arithmetic.

    Autograd runs nodes from the last created to the first, so the nodes of a module run between
    those put at its outputs and those at its inputs. Where no input takes a gradient, IEEE
    arithmetic lasts until the backward pass ends, which errs on the safe side.

    What was found is put back, not TF32: a region may lie inside another, and an evaluation in
    IEEE arithmetic passes through it too.

    Args:
        read: Returns the device's switch, `ieee` or another value.
        write: Sets it.
        directions: Where to: forward, backward or both.
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
        if "backward" in directions:
            args, kwargs = map_tensors(_calling(leave), (args, kwargs))
        if "forward" in directions:
            write("ieee")
        try:
            outputs = forward(*args, **kwargs)
        finally:
            leave()
        return map_tensors(_calling(enter), outputs) if "backward" in directions else outputs

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


def _calling(action: Callable[[], object]) -> Callable[[Tensor], Tensor]:
    def mark(value: Tensor) -> Tensor:
        if value.requires_grad:
            return _CallInBackward.apply(value, action)  # type: ignore[no-any-return, no-untyped-call]
        return value

    return mark
