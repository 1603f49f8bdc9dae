"""Finds the modules that a policy keeps in FP32: by name pattern, by type, by place."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from harness.precision.policy import PrecisionPolicy

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

    A pattern matches dotted components from the end of a name, each a glob: `norm` matches `norm`
    and `blocks.0.norm`, `blocks.*.attn` matches `net.blocks.3.attn`. `re:` starts a regular
    expression on the whole name. A matched container that is never called itself (`ModuleList`,
    `ModuleDict`) stands for its members.

    Args:
        patterns: Patterns of `policy.fp32_modules`.
        model: The model; its root has no name and matches nothing.

    Raises:
        ValueError: A pattern matches no module (the message names the closest ones) or is not a
            regular expression.
    """
    modules = dict(model.named_modules())
    names = [name for name in modules if name]
    matched: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if _matches(pattern, name)]
        if not hits:
            raise ValueError(
                f"policy.fp32_modules: {pattern!r} matches no module; {_closest(pattern, names)}"
            )
        for hit in hits:
            matched.update(_callable_members(hit, modules[hit]))
    return tuple(name for name in names if name in matched)


def select(
    policy: PrecisionPolicy,
    model: nn.Module,
    *,
    trace_forward: Callable[[], object] | None = None,
) -> tuple[str, ...]:
    """Return the names of all modules that a policy keeps in FP32, in the model's order.

    Args:
        policy: Its `fp32_modules` must match something; its `fp32_selectors` need not.
        model: The model.
        trace_forward: Runs one forward pass of the model; tells `output_head` which linear layer
            is called last.
    """
    chosen = set(resolve(policy.fp32_modules, model))
    if "normalization" in policy.fp32_selectors:
        chosen.update(normalizations(model))
    if "output_head" in policy.fp32_selectors:
        head = output_head(model, trace_forward)
        chosen.update(() if head is None else (head,))
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


def output_head(model: nn.Module, trace_forward: Callable[[], object] | None = None) -> str | None:
    """Return the name of the linear or convolution layer that is called last, None without one.

    Args:
        model: Left as it was: buffers, random state and training mode included.
        trace_forward: Runs one forward pass; without it the layer registered last is taken.
    """
    layers: list[tuple[str, nn.Module]]
    layers = [(n, m) for n, m in model.named_modules() if n and isinstance(m, _LINEAR_LAYERS)]
    if not layers:
        return None
    if trace_forward is None:
        return layers[-1][0]
    called: list[str] = []
    handles = [module.register_forward_hook(_noting(called, name)) for name, module in layers]
    try:
        with _undisturbed(model), torch.no_grad():
            trace_forward()
    finally:
        for handle in handles:
            handle.remove()
    return called[-1] if called else None


def _noting(called: list[str], name: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        called.append(name)

    return hook


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back every buffer and torch's random state."""
    saved: list[tuple[Tensor, Tensor]] = [(b, b.detach().clone()) for b in model.buffers()]
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in saved:
                    buffer.copy_(value)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as error:
            raise ValueError(
                f"policy.fp32_modules: {pattern!r} is not a regular expression: {error}"
            ) from None
    wanted = pattern.split(".")
    parts = name.split(".")[-len(wanted) :]
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _callable_members(name: str, module: nn.Module) -> Iterator[str]:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child_name, child in module.named_children():
            yield from _callable_members(f"{name}.{child_name}", child)
    else:
        yield name


def _closest(pattern: str, names: list[str]) -> str:
    wanted = pattern.removeprefix("re:")
    components = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    close = difflib.get_close_matches(wanted, [*names, *components], n=3, cutoff=0.4)
    shown = close or names[:6]
    if not shown:
        return "the model has no named modules"
    return f"closest: {', '.join(shown)}"
