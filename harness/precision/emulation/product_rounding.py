"""How an operand of a product is rounded, and what autograd sees of it.

Rounding has the gradient of the identity (straight through). Which products are rounded, and when,
is `emulated_products`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.numerics.formats import FP32, Format, Rounding
from harness.numerics.rounding import round_to_format
from harness.precision.rounding_noise import RoundingNoise

# From the gradient of a sum and the shape of an addend, the addend's gradient.
AddendGradient = Callable[[Tensor, torch.Size], Tensor]

RoundingObserver = Callable[[Tensor, Tensor, Format], None]


@dataclass(frozen=True, kw_only=True)
class ProductRounding:
    """How the operands of products are rounded.

    Attributes:
        forward: Format of operands; the backward products read the same rounded operands.
        backward: Format of the gradients that backward products read.
        rounding: How.
        per_tensor: Whether an operand is multiplied before rounding so that its largest magnitude
            becomes the format's largest finite value, and divided afterwards. An operand whose
            largest magnitude is 0 or not finite is rounded as it is.
        results: Whether what products return is rounded too, the same way.
    """

    forward: Format
    backward: Format
    rounding: Rounding = "nearest"
    per_tensor: bool = False
    results: bool = False

    def __call__(self, values: Tensor, fmt: Format, noise: RoundingNoise) -> Tensor:
        """Return FP32 `values` rounded to `fmt`, in FP32, without a wait for the device.

        Args:
            values: FP32, any shape.
            fmt: `forward` or `backward`.
            noise: For stochastic rounding.

        Source: per-tensor current scaling as in NVIDIA's Transformer Engine, `compute_scale`: the
        scale is max_finite / amax, at most FP32's largest value, and not a power of two.
        """
        generator = noise.generator(values.device) if self.rounding == "stochastic" else None
        if not self.per_tensor or values.numel() == 0:
            return round_to_format(values, fmt, rounding=self.rounding, generator=generator)
        magnitude = values.abs()
        amax = magnitude.amax()
        # A number divided by a tensor would be its product with a rounded reciprocal.
        scale = torch.full_like(amax, fmt.max_finite) / amax
        scale = scale.clamp(max=FP32.max_finite)
        scale = torch.where(amax.isfinite() & (amax > 0), scale, 1.0)
        scaled = values * scale
        if self.rounding == "toward_zero":
            # The quotient may be rounded down; the largest value would then lose a whole spacing.
            limit = torch.full_like(values, fmt.max_finite).copysign_(values)
            scaled = torch.where((magnitude == amax) & (scale != 1.0), limit, scaled)
        return round_to_format(scaled, fmt, rounding=self.rounding, generator=generator) / scale


class OperandRounder:
    """Rounds tensors in the graph of autograd, and knows which product is running.

    Attributes:
        rounding: How.
        running: Name of the format that the product running now reads, None outside of one; during
            backward products the gradients' format.
        is_rounding: Whether ops that run now are the rounding's own, none of the model's.
        observer: Called with values before and after rounding and the format, if set.
    """

    def __init__(self, rounding: ProductRounding, noise: RoundingNoise) -> None:
        self.rounding = rounding
        self.running: str | None = None
        self.is_rounding = False
        self.observer: RoundingObserver | None = None
        self._noise = noise

    def operand(self, value: Tensor) -> Tensor:
        """Return an FP32 operand of a product, rounded to the forward format."""
        return _RoundOperand.apply(value, self)  # type: ignore[no-any-return, no-untyped-call]

    def result(
        self, value: Tensor, addend: Tensor | None, addend_gradient: AddendGradient
    ) -> Tensor:
        """Return an FP32 result of a product, through which a rounded gradient comes back.

        Args:
            value: The result.
            addend: What was added to the product, outside of the graph so far; it gets a gradient
                that was not rounded.
            addend_gradient: Makes it from the gradient of `value`.
        """
        if self.rounding.results:
            value = _Round.apply(value, self, self.rounding.forward)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() and (
            value.requires_grad or (addend is not None and addend.requires_grad)
        ):
            return _RoundGradient.apply(value, addend, addend_gradient, self)  # type: ignore[no-any-return, no-untyped-call]
        return value

    def rounded(self, value: Tensor, fmt: Format) -> Tensor:
        """Return `value` rounded to `fmt`, outside of autograd."""
        self.is_rounding = True
        try:
            result = self.rounding(value, fmt, self._noise)
            if self.observer is not None:
                self.observer(value, result, fmt)
        finally:
            self.is_rounding = False
        return result


class _Round(torch.autograd.Function):
    """Rounds values; their gradient passes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, rounder: OperandRounder, fmt: Format) -> Tensor:
        return rounder.rounded(value, fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _RoundOperand(torch.autograd.Function):
    """Rounds an operand; its gradient is what a backward product returned."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, rounder: OperandRounder) -> Tensor:
        ctx.rounder = rounder
        return rounder.rounded(value, rounder.rounding.forward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rounder: OperandRounder = ctx.rounder
        rounder.running = None
        if rounder.rounding.results:
            return _Round.apply(grads[0], rounder, rounder.rounding.backward), None  # type: ignore[no-untyped-call]
        return grads[0], None


class _RoundGradient(torch.autograd.Function):
    """Passes values on; rounds the gradient, an operand of the backward products.

    The gradient of an addend is made here, from the gradient that was not rounded.
    """

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        addend: Tensor | None,
        addend_gradient: AddendGradient,
        rounder: OperandRounder,
    ) -> Tensor:
        ctx.rounder, ctx.addend_gradient = rounder, addend_gradient
        ctx.addend_shape = None if addend is None else addend.shape
        # A copy, not a view: autograd refuses in-place ops (ReLU(inplace=True)) on a view that a
        # custom function returned.
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rounder: OperandRounder = ctx.rounder
        needs_product, needs_addend = ctx.needs_input_grad[:2]
        rounded = addend = None
        if needs_addend:
            addend = ctx.addend_gradient(grads[0], ctx.addend_shape)
        if needs_product:
            # Differentiable: rounding bits has no gradient, and gradient penalties need this one's.
            rounded = _Round.apply(grads[0], rounder, rounder.rounding.backward)  # type: ignore[no-untyped-call]
            rounder.running = rounder.rounding.backward.name
        return rounded, addend, None, None
