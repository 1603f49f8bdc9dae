"""Kernels of ops whose forward and backward pass a policy treats differently.

Each runs the op twice, as the policy has it forward and as it has it backward; the values of one
run get the graph of the other (`passes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from harness.precision.kernels.registry import Kernel, Override, overload
from harness.precision.passes import Passes, detached, joined_tree

# What ops update in place although their schemas do not say so.
_RUNNING_STATISTICS = ("running_mean", "running_var")


def merged(
    forward: Iterable[Override],
    backward: Iterable[Override],
    *,
    differing: frozenset[str],
    passes: Passes,
) -> list[Override]:
    """Return the kernels for a policy, from those of a policy per direction.

    Args:
        forward: Kernels as if the forward entries were all there is.
        backward: The same for the backward entries, and for the same ops.
        differing: The ops that the two treat differently; both have a kernel for each.
        passes: Is told which of two runs is which.
    """
    graphs = {override.op: override for override in backward}
    return [
        Override(
            op=override.op,
            kernel=_joining(
                override.op, _with_keyset(override), _with_keyset(graphs[override.op]), passes
            ),
            key=override.key,
            with_keyset=True,
        )
        if override.op in differing
        else override
        for override in forward
    ]


def _with_keyset(override: Override) -> Kernel:
    """Return an override's kernel as one that takes the key set first."""
    kernel = override.kernel
    if override.with_keyset:
        return kernel
    if kernel is not torch.library.fallthrough_kernel:
        return lambda keyset, *args, **kwargs: kernel(*args, **kwargs)
    op = overload(override.op)
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, override.key))
    return lambda keyset, *args, **kwargs: op.redispatch(keyset & below, *args, **kwargs)


def _joining(name: str, values_of: Kernel, graph_of: Kernel, passes: Passes) -> Kernel:
    fresh = _fresh_statistics(name)
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    autograd = torch._C.DispatchKey.AutogradFunctionality
    in_transform = torch._C._are_functorch_transforms_active

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        needs_graph = torch.is_grad_enabled() and not is_excluded(autograd)
        if not needs_graph or not _takes_gradient((*args, *kwargs.values())):
            return values_of(keyset, *args, **kwargs)
        if in_transform():
            raise RuntimeError(
                f"an entry of the policy gives {name} a direction (forward: or backward:), which "
                "cannot be combined with torch.func transforms"
            )
        graph_args = fresh(args)
        with passes.values(host=False):
            values = detached(values_of(keyset, *args, **kwargs))
        with passes.graph():
            graph = graph_of(keyset, *graph_args, **kwargs)
        return joined_tree(graph, values)

    return kernel


def _takes_gradient(values: Iterable[Any]) -> bool:
    return any(
        value.requires_grad
        if isinstance(value, Tensor)
        else isinstance(value, (list, tuple)) and _takes_gradient(value)
        for value in values
    )


def _fresh_statistics(name: str) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return what copies the running statistics among an op's arguments: updated once, not twice.

    They are `None` or tensors of a layer's width.
    """
    arguments = [argument.name for argument in overload(name)._schema.arguments]
    places = {place for place, argument in enumerate(arguments) if argument in _RUNNING_STATISTICS}

    def fresh(args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not places:
            return args
        return tuple(
            value.clone() if place in places and isinstance(value, Tensor) else value
            for place, value in enumerate(args)
        )

    return fresh
