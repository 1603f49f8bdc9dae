"""Whole numbers that a module itself turns into other ones, by making 16-bit values of them.

Positions and timesteps come as integers; where a module casts them to the format of its
activations, or multiplies them with such values, neighbours become one. Autocast never casts
integers, so what is seen here is the model's own doing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from harness.precision.audit import CASTS, op_name

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
# Whole numbers up to this are exact in every 16-bit format.
EXACT_INTEGERS = 256.0
# What converts an integer tensor to the other operand's dtype before it computes.
_PROMOTING = frozenset({"mul", "mul_", "add", "add_", "sub", "sub_", "div", "div_", "rsub"})


class IntegerCasts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches ops while it is the context; reads and changes nothing.

    Attributes:
        largest: Largest magnitude among integers that became other ones; None without any.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest: float | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the op and look at the integers that it rounds."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in SIXTEEN_BIT:
            with _disable_current_modes():
                self._look(func, args, result)
        return result

    def _look(self, func: Any, args: tuple[Any, ...], result: Tensor) -> None:
        name = op_name(func)
        if name == "arange":
            self._see(_counted(result), result.dtype)
        elif name in _PROMOTING or func._schema.name in CASTS:
            for value in args:
                # A number (0-dim) takes part in promotion by its kind alone.
                if isinstance(value, Tensor) and not value.is_floating_point() and value.ndim:
                    self._see(value, result.dtype)

    def _see(self, whole: Tensor, dtype: torch.dtype) -> None:
        if not whole.numel() or whole.is_complex() or whole.dtype is torch.bool:
            return
        values = whole.detach().double()
        top = float(values.abs().max())
        if top > EXACT_INTEGERS and bool((values.to(dtype).double() != values).any()):
            self.largest = max(top, self.largest or 0.0)


def _counted(result: Tensor) -> Tensor:
    """Return what `arange` was to count: whole numbers, of which neighbours may have become one."""
    steps = result.double()
    if result.numel() < 2 or bool((steps != steps.round()).any()):
        return result[:0]
    return torch.arange(float(steps[0]), float(steps[0]) + result.numel(), dtype=torch.float64)
