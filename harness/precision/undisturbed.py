"""Runs a model beside its training (a trace, an evaluation) and leaves nothing behind in it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Kept by `nn.Module` in dicts of their own: assigning a buffer anew changes the dict's entry.
_REGISTRIES = ("_parameters", "_buffers", "_modules")


@contextmanager
def undisturbed(model: nn.Module, *, also: Iterable[Tensor] = ()) -> Iterator[None]:
    """Put back parameters, gradients, buffers and attributes of `model` and its modules on exit.

    A loss or a forward pass may count its calls, keep a hidden state, average in buffers, move a
    target network or call `backward` by itself; a policy that is traced once more than another
    would then train another model. Attributes are put back by reference: what changes inside a list
    of the user's own stays so.

    Args:
        model: The model.
        also: Tensors outside of it that are put back too.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    tensors = (*model.parameters(), *model.buffers(), *also)
    values = [(t, t.detach().clone(), t._version) for t in tensors if not t.is_inference()]
    try:
        with attributes_kept(model):
            yield
    finally:
        with torch.no_grad():
            for tensor, value, version in values:
                # An unchanged tensor is not written to.
                if not _is_dense(value):  # torch compares and measures none of these
                    if tensor._version != version:
                        tensor.copy_(value)
                elif tensor.shape != value.shape:
                    tensor.data = value
                elif not torch.equal(tensor, value):
                    tensor.copy_(value)
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back every attribute of `model` and its modules on exit, and their random generators.

    By reference: the elements of tensors stay as they are then.
    """
    modules = list(model.modules())
    attributes = [(module, dict(vars(module)), module.training) for module in modules]
    registries = [
        (registry, dict(registry))
        for module in modules
        for registry in (vars(module).get(name) for name in _REGISTRIES)
        if isinstance(registry, dict)  # TorchScript's are views that cannot be assigned to
    ]
    generators = [
        put_back
        for module in modules
        for value in vars(module).values()
        if (put_back := _generator_position(value)) is not None
    ]
    try:
        yield
    finally:
        for module, before, training in attributes:
            _put_back(vars(module), before)
            module.training = training  # TorchScript keeps it elsewhere
        for registry, before in registries:
            _put_back(registry, before)
        for put_back in generators:
            put_back()


def _put_back(current: dict[str, Any], before: dict[str, Any]) -> None:
    current.clear()
    current.update(before)


def _generator_position(value: object) -> Callable[[], object] | None:
    """Return what puts a random generator back to where it is now; None for anything else."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        position = value.getstate()
        return lambda: value.setstate(position)
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
        before = copy.deepcopy(getattr(bits, "state", None))
        return lambda: setattr(bits, "state", before)
    return None
