"""How products compute on a device that lacks a format or is slow in it.

Two cases on a CPU:

* 16-bit formats (`sixteen_bit_overrides`): tensors really are FP16 or BF16; below autograd, so in
  forward and backward alike, a matmul, convolution or attention that gets them computes in FP32 and
  rounds its results once. That is what tensor cores do up to the order of accumulation.
* TF32 (`tf32_overrides`): tensors are FP32; above autograd, so that a module kept in FP32 keeps its
  backward too, the operands of every product and the gradient that comes back are rounded.

Not modelled: accumulation order and width inside a product, and what a fused attention or recurrent
kernel rounds between its own products (for TF32, attention is computed in its unfused form).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from harness.numerics.formats import TF32
from harness.numerics.rounding import round_mantissa
from harness.precision.kernels import Kernel, Override, exists, involves, overload

MATMULS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv")
CONVOLUTIONS = ("convolution", "convolution_backward")
ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
RECURRENT = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")

# An autocast key that no built-in backend uses: dispatched above autograd, independent of whether
# the user's code switches autocast off, as TF32 on a GPU is.
TF32_KEY = "AutocastPrivateUse1"
TF32_PRODUCTS = (*MATMULS, "convolution", "mkldnn_rnn_layer")

_LOW_DTYPES = frozenset({torch.float16, torch.bfloat16})


def native_bf16_matmul() -> bool:
    """Return whether this CPU multiplies BF16 in hardware.

    Decided from the instruction set, not from a timing, so that a machine always decides alike.
    """
    return bool(torch.cpu._is_avx512_bf16_supported()) or bool(torch.cpu._is_amx_tile_supported())


def sixteen_bit_overrides(low: torch.dtype, ops: Iterable[str], used: set[str]) -> list[Override]:
    """Return kernels that compute `ops` in FP32 when all their operands have the format `low`.

    Mixed formats go to the original kernel, which raises as it does without the harness.

    Args:
        low: `torch.float16` or `torch.bfloat16`.
        ops: Registry names among `MATMULS`, `CONVOLUTIONS`, `ATTENTION`, `RECURRENT`.
        used: Receives the name of every op that was emulated.
    """
    return [
        Override(op=op, kernel=_sixteen_bit_kernel(op, low, used), key="CPU")
        for op in ops
        if exists(op)
    ]


def _sixteen_bit_kernel(name: str, low: torch.dtype, used: set[str]) -> Kernel:
    original = torch.library.get_kernel(f"aten::{name}", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    call = original.call_boxed
    # Attention's log-sum-exp and the workspace are FP32 natively as well.
    allowed = (low, torch.float32) if name in (ATTENTION[1], RECURRENT[1]) else (low,)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, Tensor) and (
                value.dtype not in allowed and value.is_floating_point()
            ):
                return call(keys, *args, **kwargs)
        if args[0].dtype is not low:
            return call(keys, *args, **kwargs)
        used.add(name)
        mask = kwargs.get("attn_mask")
        if mask is not None:
            kwargs["attn_mask"] = _up(mask)
        result = call(keys, *[_up(value) for value in args], **kwargs)
        return _round_results(result, low, name)

    return kernel


def _up(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in _LOW_DTYPES:
        return value.float()
    return value


def _round_results(result: Any, low: torch.dtype, name: str) -> Any:
    if isinstance(result, Tensor):
        return result.to(low)
    # The last result of these is not rounded natively: a log-sum-exp, a workspace.
    keep = len(result) - (name in (ATTENTION[0], RECURRENT[0]))
    return tuple(
        value.to(low)
        if index < keep and isinstance(value, Tensor) and value.dtype is torch.float32
        else value
        for index, value in enumerate(result)
    )


class _RoundOperand(torch.autograd.Function):
    """Rounds on the way forward; the gradient passes as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return round_mantissa(value, TF32.mantissa_bits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _RoundGradient(torch.autograd.Function):
    """Passes values on; rounds the gradient, which is an operand of the backward products."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        # A copy, not a view: autograd refuses in-place ops (ReLU(inplace=True)) on a view that a
        # custom function returned.
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        # Differentiable: rounding bits has no gradient, and gradient penalties need this one's.
        return _RoundOperand.apply(grads[0])  # type: ignore[no-any-return, no-untyped-call]


def tf32_overrides(
    active: Callable[[], bool],
    mark: Callable[[bool], None],
    *,
    used: set[str],
    excluded_ops: Iterable[str] = (),
    kept_ids: Collection[int] = frozenset(),
) -> list[Override]:
    """Return kernels that round the operands of products to TF32.

    Args:
        active: Says whether an op call is to be rounded now (inside a training step, and not in a
            module kept in FP32).
        mark: Called with True before and False after a rounded product runs, for the audit.
        used: Receives the name of every op that was emulated.
        excluded_ops: Products that the policy keeps in FP32.
        kept_ids: `id` of the weights whose products stay in FP32.
    """
    kernels: dict[str, Kernel] = {
        op: _tf32_kernel(op, active, mark, used, kept_ids) for op in TF32_PRODUCTS
    }
    kernels["scaled_dot_product_attention"] = _unfused_attention(active)
    kernels |= {op: _unrounded(op) for op in excluded_ops}
    products = frozenset(TF32_PRODUCTS).difference(excluded_ops)
    return [
        Override(op=op, kernel=kernel, key=TF32_KEY, with_keyset=op in products)
        for op, kernel in kernels.items()
        if exists(op)
    ]


def _unrounded(name: str) -> Kernel:
    """Make an op, and every product inside it, compute in FP32."""
    op = overload(name)
    guard = torch._C._ExcludeDispatchKeyGuard
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, TF32_KEY))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with guard(keys):
            return op(*args, **kwargs)

    return kernel


# Which positional arguments are not operands of the product: the addend of addmm and its kind,
# the bias of a convolution.
_ADDEND = {"addmm": 0, "baddbmm": 0, "addbmm": 0, "addmv": 0, "convolution": 2}


def _tf32_kernel(
    name: str,
    active: Callable[[], bool],
    mark: Callable[[bool], None],
    used: set[str],
    kept_ids: Collection[int],
) -> Kernel:
    op = overload(name)
    guard = torch._C._ExcludeDispatchKeyGuard
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, TF32_KEY))
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, TF32_KEY))
    in_transform = torch._C._are_functorch_transforms_active
    addend = _ADDEND.get(name)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if in_transform():
            # Every level of `torch.func` comes by; what it does to plain tensors is rounded.
            return op.redispatch(keyset & below, *args, **kwargs)
        with guard(keys):
            if not active() or (kept_ids and involves(args, kept_ids)):
                return op(*args, **kwargs)
            used.add(name)
            operands = [
                _RoundOperand.apply(value)  # type: ignore[no-untyped-call]
                if index != addend and isinstance(value, Tensor) and value.dtype is torch.float32
                else value
                for index, value in enumerate(args)
            ]
            mark(True)
            try:
                result = op(*operands, **kwargs)
            finally:
                mark(False)
            return _with_rounded_gradients(result)

    return kernel


def _with_rounded_gradients(result: Any) -> Any:
    if isinstance(result, Tensor):
        return (
            _RoundGradient.apply(result)  # type: ignore[no-untyped-call]
            if result.requires_grad and result.dtype is torch.float32
            else result
        )
    return tuple(_with_rounded_gradients(value) for value in result)


def _unfused_attention(active: Callable[[], bool]) -> Kernel:
    fused = overload("scaled_dot_product_attention")
    unfused = overload("_scaled_dot_product_attention_math")
    guard = torch._C._ExcludeDispatchKeyGuard
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, TF32_KEY))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not active():
            with guard(keys):
                return fused(*args, **kwargs)
        # The key stays in force: the products inside are rounded by their own kernels.
        return unfused(*args, **kwargs)[0]

    return kernel
