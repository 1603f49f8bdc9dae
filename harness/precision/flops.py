"""Floating-point operations of products: torch's own formulas, and those that it lacks.

One multiplication and one addition count as two. Only products count: matrix products,
convolutions, attention, recurrent layers; everything else is bound by memory, not by arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import flop_counter

_Formula = Callable[..., int]


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the operations of one call below autograd; 0 for an op that is no product.

    Args:
        func: The `OpOverload`.
        args: Its positional arguments, tensors of any device.
        kwargs: Its keyword arguments.
        result: What it returned.

    Source: `torch.utils.flop_counter.flop_registry`; causal attention counts in full, as there.
    """
    formula: Any = flop_counter.flop_registry.get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    own = _OWN.get(func._schema.name.removeprefix("aten::"))
    return 0 if own is None else own(*args)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    count: Any = flop_counter.sdpa_flop_count
    return int(count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    shapes = (grad.shape, query.shape, key.shape, value.shape)
    count: Any = flop_counter.sdpa_backward_flop_count
    return int(count(*shapes))


def _matrix_vector(matrix: Tensor, *_: Any) -> int:
    return 2 * matrix.numel()


def _add_matrix_vector(_added: Tensor, matrix: Tensor, *_: Any) -> int:
    return 2 * matrix.numel()


def _add_batched(_added: Tensor, first: Tensor, second: Tensor, *_: Any) -> int:
    return 2 * first.numel() * second.shape[-1]


def _outer(_added: Tensor, first: Tensor, second: Tensor, *_: Any) -> int:
    return 2 * first.numel() * second.numel()


def _recurrent(x: Tensor, *rest: Any) -> int:
    """Every step multiplies the weights of every layer, gate and direction once."""
    weights = [w for v in rest for w in (v if isinstance(v, (list, tuple)) else (v,))]
    # The states that follow the weights have three dimensions, biases have one.
    elements = sum(w.numel() for w in weights if isinstance(w, Tensor) and w.ndim == 2)
    return 2 * math.prod(x.shape[:-1]) * elements


def _recurrent_backward(x: Tensor, *rest: Any) -> int:
    return 2 * _recurrent(x, *rest)


_OWN: Mapping[str, _Formula] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "mv": _matrix_vector,
    "dot": _matrix_vector,
    "vdot": _matrix_vector,
    "addmv": _add_matrix_vector,
    "addbmm": _add_batched,
    "addr": _outer,
    "mkldnn_rnn_layer": lambda *args: _recurrent(*args[:5]),
    "mkldnn_rnn_layer_backward": lambda *args: _recurrent_backward(*args[:5]),
    "_cudnn_rnn": lambda *args: _recurrent(*args[:2]),
    "_cudnn_rnn_backward": lambda *args: _recurrent_backward(*args[:2]),
}
