"""Runs a piece of a model twice: one run gives the values, the other the graph for backward.

So a module or an op can compute one direction in FP32 and the other one lower: the values of one
run are returned, gradients go through the graph of the other. What a piece does beside computing
happens once: both runs draw the same random numbers, the first leaves no trace in the module, and
`Passes` says which run is which to whoever counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.precision.tensor_trees import StructureError, leaves, map_tensors


class Passes:
    """Which of two runs of one piece of a model is going on."""

    def __init__(
        self,
        device: torch.device,
        *,
        paused: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Create it.

        Args:
            device: Whose generator is put back, beside the CPU's.
            paused: Context in which random draws are not counted, since they come again.
        """
        self._device = device
        self._paused = paused
        self._graph_depth = 0

    @property
    def gives_no_values(self) -> bool:
        """Whether what runs now only builds a graph: its results are thrown away."""
        return self._graph_depth > 0

    @contextmanager
    def values(self, *, host: bool = True) -> Iterator[None]:
        """Be the run that gives the values: random draws come again afterwards.

        Gradients stay on, because torch chooses other kernels without them; `detached` drops the
        graph.

        Args:
            host: Whether Python code runs, which may draw from NumPy's and Python's generators.
        """
        kept = random_state_kept if host else _torch_random_state_kept
        with self._paused(), kept(self._device):
            yield

    @contextmanager
    def graph(self) -> Iterator[None]:
        """Be the run that gives the graph."""
        self._graph_depth += 1
        try:
            yield
        finally:
            self._graph_depth -= 1


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Put back on exit what torch, NumPy and Python draw from next; nothing waits for a GPU."""
    numpy_state, python = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with _torch_random_state_kept(device):
            yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python)


@contextmanager
def _torch_random_state_kept(device: torch.device) -> Iterator[None]:
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


def detached(values: Any) -> Any:
    """Return results without their graph; a tensor that is in them twice stays one."""
    done: dict[int, Tensor] = {}

    def detach(value: Tensor) -> Tensor:
        return done.setdefault(id(value), value.detach() if value.requires_grad else value)

    return map_tensors(detach, values)


def joined(graph: Tensor, values: Tensor) -> Tensor:
    """Return a tensor with the elements of `values` and the gradient function of `graph`.

    Args:
        graph: Receives the gradient, in its own dtype.
        values: Same shape, without a gradient; any dtype, which the result has.

    Raises:
        RuntimeError: The shapes differ.
    """
    if graph.shape != values.shape:
        raise RuntimeError(
            f"its two runs returned shapes {tuple(values.shape)} and {tuple(graph.shape)}: what it "
            "computes depends on rounding too much for one direction to be in FP32 alone"
        )
    if not graph.requires_grad or not (values.is_floating_point() or values.is_complex()):
        return values
    # An alias: a weight, a buffer or a part of one is not to get the function itself.
    return _Joined.apply(graph, _Held(values.detach()))  # type: ignore[no-any-return, no-untyped-call]


class _Held:
    """Carries a tensor past autograd: an input that is returned would become a view of itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Tensor, values: _Held) -> Tensor:
        ctx.dtype = graph.dtype
        return values.tensor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def joined_tree(graph: Any, values: Any) -> Any:
    """Return `values` with every tensor in it joined to the one at its place in `graph`.

    Raises:
        RuntimeError: The two differ in structure or shapes.
    """
    for leaf in leaves(graph):
        held = vars(leaf).values() if hasattr(leaf, "__dict__") else ()
        if not isinstance(leaf, Tensor) and any(
            isinstance(part, Tensor) and part.requires_grad for part in held
        ):
            raise RuntimeError(f"it returns a {type(leaf).__name__}, whose gradients would be lost")
    done: dict[int, Tensor] = {}

    def join(value: Tensor, other: Tensor) -> Tensor:
        # A tensor returned twice stays one tensor.
        if id(value) not in done:
            done[id(value)] = joined(other, value)
        return done[id(value)]

    try:
        return map_tensors(join, values, graph)
    except StructureError as error:
        raise RuntimeError(f"its two runs returned different results: {error}") from error
