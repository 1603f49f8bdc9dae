"""Products in a format that the device lacks: FP32 tensors, rounded where a product reads them.

Works for TF32, FP8 and any format given by its bits. Above autograd, so that a module kept in FP32
keeps its backward too: the operands of every product are rounded, and the gradient that comes back
to it, which is an operand of the backward products. A bias and its gradient are no operands.

Attention and recurrent layers run in their unfused forms, so that each product inside is rounded.
Left in FP32: products of sparse, nested or complex tensors.

Not modelled: accumulation order and width inside a product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.precision.emulation.product_rounding import (
    OperandRounder,
    ProductRounding,
    RoundingObserver,
)
from harness.precision.kernels.registry import Kernel, Override, exists, involves, overload
from harness.precision.passes import Passes, joined
from harness.precision.rounding_noise import RoundingNoise

# An autocast key that no built-in backend uses: dispatched above autograd, independent of whether
# the user's code switches autocast off, as TF32 on a GPU is.
ROUNDING_KEY = "AutocastPrivateUse1"
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv")
PRODUCTS = (*MATMULS, "convolution", "mkldnn_rnn_layer")
_RECURRENT = tuple(
    f"{layer}.{form}"
    for layer in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for form in ("input", "data")
)
# Which positional arguments are not operands of the product: the addend of addmm and its kind,
# the bias of a convolution.
_ADDEND = {"addmm": 0, "baddbmm": 0, "addbmm": 0, "addmv": 0, "convolution": 2}


class Directions(NamedTuple):
    """Whether something holds in the forward pass, and whether in the backward pass."""

    forward: bool
    backward: bool


BOTH = Directions(forward=True, backward=True)
NEITHER = Directions(forward=False, backward=False)


class RoundedProducts:
    """The kernels that round, and where they are switched off.

    Attributes:
        used: Names of the products that were rounded.
    """

    def __init__(
        self,
        rounding: ProductRounding,
        *,
        in_step: Callable[[], bool],
        noise: RoundingNoise,
        used: set[str],
        passes: Passes,
    ) -> None:
        """Create the kernels, not yet registered.

        Args:
            rounding: How operands are rounded.
            in_step: Says whether ops belong to a training step now, to a forward pass that
                checkpointing repeats too; others stay in FP32.
            noise: For stochastic rounding.
            used: Receives the name of every product that was rounded.
            passes: Told when a product runs for its gradients only.
        """
        self._passes = passes
        self.used = used
        self._rounder = OperandRounder(rounding, noise)
        self._in_step = in_step
        self._kept_ids: Collection[int] = frozenset()
        self._kept_forward = 0
        self._kept_backward = 0

    @property
    def running(self) -> str | None:
        """Name of the format that the product running now reads, None outside of one.

        During backward products, the gradients' format.
        """
        return self._rounder.running

    @property
    def is_rounding(self) -> bool:
        """Whether ops that run now are the rounding's own, none of the model's."""
        return self._rounder.is_rounding

    @contextmanager
    def observed(self, observer: RoundingObserver) -> Iterator[None]:
        """Call `observer` with every operand before and after its rounding, and the format."""
        before, self._rounder.observer = self._rounder.observer, observer
        try:
            yield
        finally:
            self._rounder.observer = before

    @contextmanager
    def keeping_fp32(self, directions: Directions = BOTH) -> Iterator[None]:
        """Leave products called inside in FP32; their backward passes as well or only those."""
        self._kept_forward += directions.forward
        self._kept_backward += directions.backward
        try:
            yield
        finally:
            self._kept_forward -= directions.forward
            self._kept_backward -= directions.backward

    def rounds(self) -> Directions:
        """Return whether a product called now rounds, and whether its backward products will."""
        if not self._in_step():
            return NEITHER
        return Directions(forward=not self._kept_forward, backward=not self._kept_backward)

    def overrides(
        self,
        kept_ops: Mapping[str, Directions] | None = None,
        *,
        kept_ids: Collection[int] = frozenset(),
    ) -> list[Override]:
        """Return the kernels to register at `ROUNDING_KEY`.

        Args:
            kept_ops: Ops that the policy keeps in FP32, with every product inside them, and in
                which directions.
            kept_ids: `id` of the weights whose products stay in FP32.
        """
        self._kept_ids = kept_ids
        kernels: dict[str, Kernel] = {op: self._product(op) for op in PRODUCTS if exists(op)}
        kernels |= {op: self._unfused(op) for op in _RECURRENT if exists(op)}
        attention = "scaled_dot_product_attention"
        kernels[attention] = self._unfused_attention()
        for op, directions in (kept_ops or {}).items():
            if exists(op):
                kernels[op] = self._kept(op, directions, kernels.get(op))
        return [
            Override(op=op, kernel=kernel, key=ROUNDING_KEY, with_keyset=True)
            for op, kernel in kernels.items()
        ]

    def _kept(self, name: str, directions: Directions, own: Kernel | None) -> Kernel:
        """Make an op, and every product inside it, compute in FP32; `own` is its kernel here."""
        op = overload(name)
        below = _below()

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            with self.keeping_fp32(directions):
                if own is not None:
                    return own(keyset, *args, **kwargs)
                return op.redispatch(keyset & below, *args, **kwargs)

        return kernel

    def _product(self, name: str) -> Kernel:
        op = overload(name)
        guard = torch._C._ExcludeDispatchKeyGuard
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, ROUNDING_KEY))
        below = _below()
        in_transform = torch._C._are_functorch_transforms_active

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if in_transform():
                # Every level of `torch.func` comes by; what it does to plain tensors is rounded.
                return op.redispatch(keyset & below, *args, **kwargs)
            with guard(keys):
                rounds = self._rounds_now(args)
                if not any(rounds):
                    return op(*args, **kwargs)
                self.used.add(name)
                call = _Call(op=op, args=args, kwargs=kwargs, addend=_ADDEND.get(name))
                if rounds == BOTH:
                    return self._rounded(call)
                return self._rounded_one_way(call, rounds)

        return kernel

    def _rounds_now(self, args: tuple[Any, ...]) -> Directions:
        rounds = self.rounds()
        if not any(rounds) or (self._kept_ids and involves(args, self._kept_ids)):
            return NEITHER
        tensors = [value for value in args if isinstance(value, Tensor)]
        if any(value.layout is not torch.strided or value.is_nested for value in tensors):
            return NEITHER
        if not (torch.is_grad_enabled() and any(value.requires_grad for value in tensors)):
            # There will be no backward.
            return BOTH if rounds.forward else NEITHER
        return rounds

    def _rounded(self, call: _Call) -> Any:
        operands = [
            self._rounder.operand(value)
            if index != call.addend and isinstance(value, Tensor) and value.dtype is torch.float32
            else value
            for index, value in enumerate(call.args)
        ]
        addend = None if call.addend is None else call.args[call.addend]
        if isinstance(addend, Tensor):
            operands[call.addend] = addend.detach()  # type: ignore[index]
        self._rounder.running = self._rounder.rounding.forward.name
        try:
            result = call.op(*operands, **call.kwargs)
        finally:
            self._rounder.running = None
        return _each(
            result, lambda value: self._rounder.result(value, addend, call.addend_gradient)
        )

    def _rounded_one_way(self, call: _Call, rounds: Directions) -> Any:
        """Join the values of one computation with the gradients of another."""

        def exact() -> Any:
            return call.op(*call.args, **call.kwargs)

        def rounded() -> Any:
            return self._rounded(call)

        for_values, for_graph = (rounded, exact) if rounds.forward else (exact, rounded)
        with torch.no_grad():
            values = for_values()
        with self._passes.graph():
            graph = for_graph()
        if isinstance(values, Tensor):
            return joined(graph, values)
        return tuple(joined(one, value) for one, value in zip(graph, values, strict=True))

    def _unfused(self, name: str) -> Kernel:
        """Make a recurrent layer consist of products that have kernels of their own."""
        op = overload(name)
        below = _below()

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if not any(self.rounds()):
                return op.redispatch(keyset & below, *args, **kwargs)
            with _without_fused_recurrent_kernels():
                return op.redispatch(keyset & below, *args, **kwargs)

        return kernel

    def _unfused_attention(self) -> Kernel:
        fused = overload("scaled_dot_product_attention")
        unfused = overload("_scaled_dot_product_attention_math")
        below = _below()

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if not any(self.rounds()):
                return fused.redispatch(keyset & below, *args, **kwargs)
            # The key stays in force: the products inside are rounded by their own kernels.
            return unfused(*args, **kwargs)[0]

        return kernel


@dataclass(frozen=True, kw_only=True)
class _Call:
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    addend: int | None

    def addend_gradient(self, grad: Tensor, shape: torch.Size) -> Tensor:
        """Return the gradient of what is added to a product, from the gradient of the sum."""
        if self.op is overload("convolution"):
            return grad.sum([dim for dim in range(grad.dim()) if dim != 1])
        beta = self.kwargs.get("beta", 1)
        total = grad.sum_to_size(shape)
        return total if beta == 1 else total * beta


def _below() -> Any:
    return torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, ROUNDING_KEY))


def _each(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(result, Tensor):
        return change(result) if result.dtype is torch.float32 else result
    return tuple(_each(value, change) if isinstance(value, Tensor) else value for value in result)


@contextmanager
def _without_fused_recurrent_kernels() -> Iterator[None]:
    cudnn, mkldnn = torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled()
    torch._C._set_cudnn_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(cudnn)
        torch._C._set_mkldnn_enabled(mkldnn)
