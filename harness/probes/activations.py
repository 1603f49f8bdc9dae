"""Shows probes what goes in and out of module calls, and the gradients of what comes out.

Watched are modules that hold parameters of their own and modules without children: what a
container's code does between them shows as the next one's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.precision.module_names import ROOT
from harness.probes.base import StepProbe
from harness.probes.tensors import real_view, tensors_within, unseen


class ActivationHooks:
    """Installs hooks on a model's modules for the time of one forward and backward pass.

    Attributes:
        skipped: Sentences on what could not be shown.
    """

    def __init__(self, model: nn.Module) -> None:
        self.skipped: set[str] = set()
        self._modules = list(self._watched(model))
        self._probes: Sequence[StepProbe] = ()
        self._handles: list[Any] = []

    def _watched(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        compiled: list[str] = []
        for name, module in model.named_modules():
            if any(name == c or name.startswith(f"{c}.") or not c for c in compiled):
                continue
            if _is_compiled(module):
                compiled.append(name)
                self.skipped.add(
                    f"activations of `{name or ROOT}`: torch.compile would be invalidated by hooks"
                )
            elif isinstance(module, torch.jit.ScriptModule):
                self.skipped.add(f"activations of `{name or ROOT}`: TorchScript module")
            elif (
                next(module.children(), None) is None
                or next(module.parameters(recurse=False), None) is not None
            ):
                yield name or ROOT, module

    @contextmanager
    def shown_to(self, probes: Sequence[StepProbe]) -> Iterator[None]:
        """Call the probes' `forward` and `output_gradient` until `end` or exit."""
        self._probes = probes
        self._handles = [
            module.register_forward_hook(self._hook(name), with_kwargs=True)
            for name, module in self._modules
        ]
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """Remove the hooks; hooks on tensors go with the tensors' graph."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._probes = [], ()

    def _hook(self, name: str) -> Callable[..., None]:
        def saw_call(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            del module
            if torch.compiler.is_compiling() or not self._probes:
                return
            if torch._C._are_functorch_transforms_active():
                # Its tensors are wrappers that end with the transform.
                self.skipped.add(f"calls of `{name}` inside torch.func transforms")
                return
            # A checkpoint computes its part again inside the backward pass: the call was seen, but
            # the gradients may flow through this second one.
            again = torch._C._current_graph_task_id() != -1
            with unseen():
                outputs = list(tensors_within(output))
                if not again:
                    seen_in = self._views((args, kwargs), name, "input")
                    seen_out = self._views(outputs, name, "output")
                    for probe in self._probes:
                        probe.forward(name, seen_in, seen_out)
                    if not outputs and output is not None:
                        kind = type(output).__name__
                        self.skipped.add(f"output of `{name}`: {kind} without tensors")
            for tensor in outputs:
                if tensor.requires_grad:
                    handle = tensor.register_hook(self._gradient_hook(name))  # type: ignore[no-untyped-call]
                    if tensor.is_leaf:  # of a module that returns its weight: it would stay on it
                        self._handles.append(handle)

        return saw_call

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def saw_gradient(gradient: Tensor) -> None:
            if not self._probes:
                return
            with unseen():
                for view in self._views([gradient], name, "output gradient"):
                    for probe in self._probes:
                        probe.output_gradient(name, view)

        return saw_gradient

    def _views(self, values: Any, name: str, what: str) -> list[Tensor]:
        views = []
        for tensor in tensors_within(values):
            view, reason = real_view(tensor)
            if view is None:
                self.skipped.add(f"{what} of `{name}`: {reason}")
            else:
                views.append(view)
        return views


def _is_compiled(module: nn.Module) -> bool:
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )
