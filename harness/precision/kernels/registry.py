"""Replaces kernels of the ATen registry for a while.

Working in the dispatcher, below Python, catches what composite C++ ops (`cross_entropy`,
`multi_head_attention_forward`) call inside; a `TorchFunctionMode` misses those.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

Kernel = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Override:
    """One kernel to install.

    Attributes:
        op: Registry name without `aten::`, e.g. `softmax.int`.
        kernel: The Python kernel; called with positional arguments and the keyword-only ones.
        key: Dispatch key, e.g. `AutocastCPU`.
        with_keyset: The kernel's first argument is the dispatch key set of the call.
    """

    op: str
    kernel: Kernel
    key: str
    with_keyset: bool = False


@contextmanager
def registered(overrides: Iterable[Override]) -> Iterator[None]:
    """Install kernels until the context ends; then the ones before, if any, are back.

    Nests: the innermost registration wins.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            # torch warns once per process that a kernel is replaced, which is the purpose here.
            warnings.simplefilter("ignore")
            for override in overrides:
                library.impl(
                    override.op,
                    override.kernel,
                    override.key,
                    with_keyset=override.with_keyset,
                    allow_override=True,
                )
        yield
    finally:
        library._destroy()


@functools.cache
def fall_through(key: str) -> Any:
    """Let every op without a kernel at `key` pass on to the next key.

    Once per process, for a key that no backend in use has: it changes nothing until the key is
    included in a thread's set.
    """
    library: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(torch.library.fallthrough_kernel, key)
    return library


@contextmanager
def key_included(name: str, included: bool) -> Iterator[None]:
    """Add a dispatch key to this thread's set, or take an outer policy's away, for a while."""
    key = getattr(torch._C.DispatchKey, name)
    before = torch._C._dispatch_tls_is_dispatch_key_included(key)
    if included:
        fall_through(name)
    _include(key, included)
    try:
        yield
    finally:
        _include(key, before)


def _include(key: torch._C.DispatchKey, included: bool) -> None:
    # Autocast keys are excluded by default, which wins over being included.
    torch._C._dispatch_tls_set_dispatch_key_included(key, included)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, not included)


def overload(name: str) -> OpOverload:
    """Return the op called `name` (`sum`, `sum.dim_IntList`)."""
    base, _, variant = name.partition(".")
    packet = getattr(torch.ops.aten, base)
    return getattr(packet, variant or "default")  # type: ignore[no-any-return]


def exists(name: str) -> bool:
    """Return whether this torch has the op `name`."""
    base, _, variant = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return packet is not None and (variant or "default") in packet.overloads()


def functional_overloads(base: str) -> tuple[str, ...]:
    """Return the overloads of an ATen op that return new tensors, `()` if there is no such op.

    In-place and `out=` variants write into a tensor of a fixed format, so no policy can change
    the format they run in.
    """
    if not base.isidentifier():
        return ()
    packet = getattr(torch.ops.aten, base, None)
    if packet is None:
        return ()
    names = []
    for variant in packet.overloads():
        op = getattr(packet, variant)
        if not op._schema.is_mutable and any(
            isinstance(argument.type, torch.TensorType) for argument in op._schema.arguments
        ):
            names.append(base if variant == "default" else f"{base}.{variant}")
    return tuple(names)


def involves(values: Iterable[Any], ids: Collection[int]) -> bool:
    """Return whether one of an op's arguments is, or is a view of, a tensor with one of the ids."""
    for value in values:
        if isinstance(value, Tensor):
            if id(value if value._base is None else value._base) in ids:
                return True
        elif isinstance(value, (list, tuple)) and involves(value, ids):
            return True
    return False
