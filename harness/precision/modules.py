"""Finds the modules that a policy keeps in FP32: by name pattern, by type, by place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from harness.precision.directions import Direction, entries_for, split_direction
from harness.precision.module_names import matches
from harness.precision.passes import random_state_kept
from harness.precision.policy import PrecisionPolicy
from harness.precision.undisturbed import undisturbed

# "RMSNorm" and "LayerNorm2d" are normalizations; "NormalizingFlow" and "NormedLinear" are not.
_NORMALIZATION_CLASS = re.compile(r"Norm(?![a-z])")
_TORCH_NORMALIZATIONS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
    nn.RMSNorm,
)
_LINEAR_LAYERS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)


def resolve(patterns: Iterable[str], model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that patterns match, in the model's order.

    What a pattern matches: `module_names.matches`. A matched container that is never called itself
    (`ModuleList`, `ModuleDict`) stands for its members.

    Args:
        patterns: Patterns of `policy.fp32_modules`; a direction before one is passed over.
        model: The model; its root has no name and matches nothing.

    Raises:
        ValueError: A pattern matches no module (the message names the closest ones) or is not a
            regular expression.
    """
    modules = dict(model.named_modules())
    names = [name for name in modules if name]
    matched: set[str] = set()
    for pattern in patterns:
        wanted = split_direction(pattern)[1]
        hits = [name for name in names if matches(wanted, name)]
        if not hits:
            raise ValueError(
                f"policy.fp32_modules: {pattern!r} matches no module; {_closest(wanted, names)}"
            )
        for hit in hits:
            matched.update(_callable_members(hit, modules[hit]))
    return tuple(name for name in names if name in matched)


def select(
    policy: PrecisionPolicy,
    model: nn.Module,
    head: OutputHead,
    *,
    direction: Direction = "forward",
) -> tuple[str, ...]:
    """Return the names of all modules that a policy keeps in FP32, in the model's order.

    Args:
        policy: Its `fp32_modules` must match something; its `fp32_selectors` need not.
        model: The model.
        head: From `output_head`, if the policy selects it.
        direction: Patterns of the other direction do not count, but are checked.
    """
    resolve(policy.fp32_modules, model)
    chosen = set(resolve(entries_for(policy.fp32_modules, direction), model))
    if "normalization" in policy.fp32_selectors:
        chosen.update(normalizations(model))
    if "output_head" in policy.fp32_selectors and head.module is not None:
        chosen.add(head.module)
    return tuple(name for name, _ in model.named_modules() if name in chosen)


def normalizations(model: nn.Module) -> tuple[str, ...]:
    """Return the names of torch's normalization modules and of classes called `...Norm...`."""
    return tuple(
        name
        for name, module in model.named_modules()
        if name
        and (
            isinstance(module, _TORCH_NORMALIZATIONS)
            or _NORMALIZATION_CLASS.search(type(module).__name__)
        )
    )


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """Where a model's last linear layer is.

    Attributes:
        module: Name of the layer that is called last; None if there is no such layer.
        weight: The parameter of a product that comes after every layer (a language model that
            multiplies by its embedding); then `module` is None.
    """

    module: str | None = None
    weight: Tensor | None = None


def output_head(model: nn.Module, trace_forward: Callable[[], object] | None = None) -> OutputHead:
    """Return the linear or convolution layer, or the product with a parameter, that comes last.

    Args:
        model: Left as it was: weights, buffers, attributes and torch's random state.
        trace_forward: Runs one forward pass; without it the layer registered last is taken.
    """
    layers = {n: m for n, m in model.named_modules() if n and isinstance(m, _LINEAR_LAYERS)}
    if trace_forward is None:
        return OutputHead(module=list(layers)[-1] if layers else None)
    called: list[OutputHead] = []
    handles = [
        module.register_forward_hook(_noting(called, OutputHead(module=name)))
        for name, module in layers.items()
    ]
    try:
        # With gradients: a loss may contain derivatives of the model.
        with undisturbed(model), _random_state_kept(model), _WeightProducts(model, called):
            trace_forward()
    finally:
        for handle in handles:
            handle.remove()
    return called[-1] if called else OutputHead()


def _noting(called: list[OutputHead], head: OutputHead) -> Callable[..., None]:
    # Runs after the layer's own product was noted, and so takes its place as the last one.
    def hook(*_: object) -> None:
        called.append(head)

    return hook


class _WeightProducts(TorchFunctionMode):
    """Notes every product with a parameter, or with a view of one."""

    _FUNCTIONS = frozenset({"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "einsum"})

    def __init__(self, model: nn.Module, called: list[OutputHead]) -> None:
        super().__init__()
        self._weights = {id(weight): weight for weight in model.parameters()}
        self._called = called

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in self._FUNCTIONS:
            operands = [*args, *(args[-1] if args and isinstance(args[-1], (list, tuple)) else ())]
            for value in operands:
                base = getattr(value, "_base", None)
                weight = self._weights.get(id(value if base is None else base))
                if weight is not None:
                    self._called.append(OutputHead(weight=weight))
        return func(*args, **(kwargs or {}))


def _random_state_kept(model: nn.Module) -> AbstractContextManager[None]:
    # The CPU's generator is kept for a model on any device.
    devices = [parameter.device for parameter in model.parameters()]
    return random_state_kept(devices[0] if devices else torch.device("cpu"))


def _callable_members(name: str, module: nn.Module) -> Iterator[str]:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child_name, child in module.named_children():
            yield from _callable_members(f"{name}.{child_name}", child)
    else:
        yield name


def _closest(pattern: str, names: list[str]) -> str:
    wanted = pattern.removeprefix("re:")
    components = {part for name in names for part in name.split(".") if not part.isdigit()}
    # A top-level module is a name and a component: offered once.
    close = difflib.get_close_matches(wanted, sorted({*names, *components}), n=3, cutoff=0.4)
    shown = close or names[:6]
    if not shown:
        return "the model has no named modules"
    return f"closest: {', '.join(shown)}"
