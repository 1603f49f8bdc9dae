"""Changes the format that weights and buffers are stored in, keeping every tensor's identity.

The optimizer, tied weights and flattened recurrent weights refer to the same objects before and
after: only the data behind them is exchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_REAL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def stored_in(
    model: nn.Module, dtype: torch.dtype, *, except_modules: Collection[str] = ()
) -> Iterator[None]:
    """Hold FP32 parameters and floating buffers in `dtype` until the context ends.

    Complex, FP64, integer, sparse and nested tensors are left alone. On exit the current values go
    back to FP32 (exact from a 16-bit format).

    Args:
        model: Changed in place; its gradients must not exist yet.
        dtype: The storage format; FP32 changes nothing.
        except_modules: Names of modules whose tensors, and those of their children, stay in FP32,
            also where they are tied to others.
    """
    kept = {id(tensor) for name in except_modules for tensor in _tensors(model.get_submodule(name))}
    cast = [
        tensor
        for tensor in _tensors(model)
        if tensor.dtype is torch.float32 and dtype is not torch.float32 and id(tensor) not in kept
    ]
    for tensor in cast:
        tensor.data = tensor.data.to(dtype)
    try:
        yield
    finally:
        for tensor in cast:
            tensor.grad = None  # a gradient in the low format has no place beside FP32 weights
            tensor.data = tensor.data.to(torch.float32)


def sixteen_bit_tensors(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers that are stored in FP16 or BF16, each once."""
    return [t for t in _tensors(model) if t.dtype in _REAL_DTYPES and t.dtype is not torch.float32]


@contextmanager
def fp32_weights(model: nn.Module, *, but: Collection[Tensor] = ()) -> Iterator[None]:
    """Hold 16-bit weights and floating buffers in FP32 until the context ends, then as before.

    For evaluating a model with 16-bit weights in FP32 arithmetic. What happens to the tensors
    inside (a buffer that is updated) is undone. Gradients are untouched.

    Args:
        model: Changed in place and restored.
        but: Tensors to leave alone: those that the user's model keeps in 16 bits by itself, and
            whose inputs it casts.
    """
    left = {id(tensor) for tensor in but}
    low = [tensor for tensor in sixteen_bit_tensors(model) if id(tensor) not in left]
    saved = [tensor.data for tensor in low]
    try:
        for tensor in low:
            tensor.data = tensor.data.to(torch.float32)
        yield
    finally:
        for tensor, data in zip(low, saved, strict=True):
            tensor.data = data


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield every parameter and buffer once whose data can be exchanged for another format's."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.layout is torch.strided and not tensor.is_nested:
            yield tensor
