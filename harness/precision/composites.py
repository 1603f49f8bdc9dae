"""Takes composite ops apart for a dispatch mode where autograd did not: in inference mode.

Elsewhere autograd has resolved them before a mode sees anything. Inference mode passes by autograd,
and a linear layer comes as `linear`: its products, FLOPs and formats would go unseen, and what a
mode's handler calls runs without the kernels above it, those of emulated products among them, so
that watching would change what is computed.

Limit: of a composite that CUDA's lists do not name (`cross_entropy`), parts that they do name run
as autocast found them; inference mode does not tell whether autocast was on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.precision.emulation.products import PRODUCTS, ROUNDING_KEY


def _resolved(
    mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run a composite op part by part, each seen by `mode`.

    Returns:
        The result; `NotImplemented` for an op that is no composite, and outside of inference mode.
    """
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if not torch.is_inference_mode_enabled() or not (
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite)
    ):
        return NotImplemented
    key = getattr(torch._C.DispatchKey, ROUNDING_KEY)
    # Included, and excluded only while a mode's handler runs: products that round never call a
    # composite.
    rounds = torch._C._dispatch_tls_is_dispatch_key_included(key)
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    if rounds:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with mode:
            # Not `func.decompose`, which prefers Python's version: `dropout` draws otherwise there.
            return func._op_dk(composite, *args, **kwargs)
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


class WatchingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that looks at every op as autograd would have resolved it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Hand the op on to `watch`, or the parts of a composite one by one."""
        kwargs = kwargs or {}
        parts = _resolved(self, func, args, kwargs)
        return self.watch(func, args, kwargs) if parts is NotImplemented else parts

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op through `run_below`, look at it, and return its result."""
        raise NotImplementedError


def run_below(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an op for a mode's handler as it would run unwatched.

    Some ops call products in their own kernels (`bilinear`, `cdist`, `pinv`). Emulation rounds
    those where no mode is active, but what a handler calls runs without the kernels above modes.
    """
    key = getattr(torch._C.DispatchKey, ROUNDING_KEY)
    # A product itself has been rounded when a mode sees it.
    if (
        not torch._C._dispatch_tls_is_dispatch_key_included(key)
        or not torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        or func._schema.name.removeprefix("aten::") in PRODUCTS
    ):
        return func(*args, **kwargs)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        return func(*args, **kwargs)
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
