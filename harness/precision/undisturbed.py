"""Runs a model beside its training (a trace, an evaluation) and leaves nothing behind in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Kept by `nn.Module` in dicts of their own: assigning a buffer anew changes the dict's entry.
_REGISTRIES = ("_parameters", "_buffers", "_modules")


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back every parameter, buffer and attribute of `model` and its modules on exit.

    A loss or a forward pass may count its calls, keep a hidden state, average in buffers or move a
    target network; a policy that is traced once more than another would then train another model.
    Attributes are put back by reference: what changes inside a list of the user's own stays so.
    """
    attributes = [(module, dict(vars(module)), module.training) for module in model.modules()]
    registries = [
        (registry, dict(registry))
        for module in model.modules()
        for registry in (vars(module)[name] for name in _REGISTRIES)
        if isinstance(registry, dict)  # TorchScript's are views that cannot be assigned to
    ]
    values = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        for module, before, training in attributes:
            _put_back(vars(module), before)
            module.training = training  # TorchScript keeps it elsewhere
        for registry, before in registries:
            _put_back(registry, before)
        with torch.no_grad():
            for tensor, value in values:
                # An unchanged tensor is not written to.
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _put_back(current: dict[str, Any], before: dict[str, Any]) -> None:
    current.clear()
    current.update(before)
