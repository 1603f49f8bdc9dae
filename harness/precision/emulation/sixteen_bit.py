"""How products of 16-bit tensors compute on a CPU that is slow in their format.

Tensors really are FP16 or BF16; below autograd, so in forward and backward alike, a matmul,
convolution or attention that gets them computes in FP32 and rounds its results once. That is what
tensor cores do up to the order of accumulation. Formats that no tensor has (TF32, FP8) are
`emulated_products`.

Not modelled: accumulation order and width inside a product, and what a fused attention or recurrent
kernel rounds between its own products.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from harness.precision.kernels.registry import Kernel, Override, exists

CONVOLUTIONS = ("convolution", "convolution_backward")
ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
RECURRENT = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")

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
