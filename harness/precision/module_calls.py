"""Which module an op belongs to: the one whose call runs it, or recorded the node that runs it.

Forward ops run inside module calls. Backward ops run outside of them: autograd numbers the nodes
that a forward pass records, so the module is the innermost one during whose call the number was
given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from harness.precision.module_names import ROOT

Direction = Literal["forward", "backward"]


def autograd_position() -> int:
    """Return autograd's counter of recorded nodes: the number that the next one gets."""
    return int(torch._C._autograd._get_sequence_nr())


def hookable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules that hooks can be added to at run time.

    Not those of TorchScript, whose hooks are compiled with them: what runs inside belongs to the
    module that calls them.
    """
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield name, module


def in_backward() -> bool:
    """Return whether autograd's engine is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class ModuleCalls:
    """The calls of a model's modules during one step.

    Limits: an op of a loss outside of every module call has no module. What activation
    checkpointing records anew on a GPU's backward thread is counted by that thread's own numbers.
    """

    def __init__(self) -> None:
        self._open: list[tuple[str, int, int]] = []
        self._closed: list[tuple[str, int, int]] = []
        self._found: dict[int, str | None] = {}
        self._owners: dict[int, str] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[ModuleCalls]:
        """Follow the calls of all modules until the context ends; hooks read and change nothing."""
        handles: list[Any] = []
        self._owners = _owners(model)
        for name, module in hookable_modules(model):
            handles.append(module.register_forward_pre_hook(self._entering(name or ROOT)))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            task = torch._C._current_graph_task_id()
            self._open.append((name, autograd_position(), task))

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name, start, _ = self._open.pop()
        self._closed.append((name, start, autograd_position()))
        self._found.clear()

    def current(self) -> tuple[str | None, Direction]:
        """Return the module and the direction of the op that is running.

        A forward pass that checkpointing repeats inside backward is forward again.
        """
        task = torch._C._current_graph_task_id()
        if self._open and self._open[-1][2] == task:
            return self._open[-1][0], "forward"
        if task == -1:
            return None, "forward"
        return self._of_node(torch._C._current_autograd_node()), "backward"

    def _of_node(self, node: Any) -> str | None:
        if node is None:
            return None
        variable = getattr(node, "variable", None)  # an AccumulateGrad has no place of its own
        if variable is not None:
            return self._owners.get(id(variable))
        return self.recorded_by(node._sequence_nr())

    def recorded_by(self, position: int) -> str | None:
        """Return the module that recorded the node with this number; None outside of modules."""
        if position not in self._found:
            inside = [
                (end - start, name) for name, start, end in self._closed if start <= position < end
            ]
            # A module that is still being called: a derivative taken inside the forward pass.
            pending = [name for name, start, _ in self._open if start <= position]
            self._found[position] = min(inside)[1] if inside else pending[-1] if pending else None
        return self._found[position]


def _owners(model: nn.Module) -> dict[int, str]:
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), name or ROOT)
    return owners
