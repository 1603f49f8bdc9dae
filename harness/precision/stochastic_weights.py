"""Keeps 16-bit weights but updates them in FP32, and rounds each new weight up or down at random.

An update smaller than half the spacing at a weight is lost when rounded to nearest, every time; at
random it is kept in expectation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.numerics.formats import BF16, FP16
from harness.numerics.rounding import round_to_format
from harness.precision.rounding_noise import RoundingNoise

_FORMATS = {torch.bfloat16: BF16, torch.float16: FP16}


class StochasticWeights:
    """The 16-bit parameters of an optimizer, which are FP32 while it steps.

    Parameters of another dtype (FP32, complex) are left alone.
    """

    def __init__(self, optimizer: Optimizer, noise: RoundingNoise) -> None:
        """Find the parameters.

        Args:
            optimizer: Any of torch's kind; parameters keep their identity.
            noise: Random bits, one sequence per step.
        """
        self._optimizer, self._noise = optimizer, noise
        parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self._weights: list[Tensor] = [p for p in parameters.values() if p.dtype in _FORMATS]
        self._stored: list[Tensor] = []
        self._state_is_fp32 = False

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Be the context around the optimizer's step.

        Inside, weights and gradients are FP32, both exact; so is the state that the optimizer
        makes. On exit, by an exception too, new weights are rounded into the memory they had, and
        the gradients are as before.
        """
        self._widen_state()
        gradients = [weight.grad for weight in self._weights]
        self._stored = [weight.data for weight in self._weights]
        for weight in self._weights:
            _exchange(weight, weight.data.float(), weight.grad)
        try:
            yield
        finally:
            for weight, stored, gradient in zip(
                self._weights, self._stored, gradients, strict=True
            ):
                rounded = round_to_format(
                    weight.data,
                    _FORMATS[stored.dtype],
                    rounding="stochastic",
                    generator=self._noise.generator(weight.device),
                )
                _exchange(weight, stored.copy_(rounded), gradient)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Be the context around a closure's evaluation, inside of `stepping`.

        The model sees 16-bit weights: the trial point rounded to nearest, so that a line search
        meets one function. On exit the trial point is back and the gradients are FP32.
        """
        trial = [weight.data for weight in self._weights]
        for weight, stored in zip(self._weights, self._stored, strict=True):
            _exchange(weight, stored.copy_(weight.data), None)
        try:
            yield
        finally:
            for weight, data in zip(self._weights, trial, strict=True):
                _exchange(weight, data, weight.grad)

    def _widen_state(self) -> None:
        """Make FP32 what an optimizer (Adagrad) has made in the weights' format beforehand."""
        if self._state_is_fp32:
            return
        self._state_is_fp32 = True
        for weight in self._weights:
            state: dict[str, Any] = self._optimizer.state.get(weight, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dtype in _FORMATS:
                    state[name] = value.float()


def _exchange(weight: Tensor, data: Tensor, gradient: Tensor | None) -> None:
    """Give a weight other data, and a gradient in their dtype."""
    weight.grad = None  # a gradient must have its weight's dtype when it is set
    weight.data = data
    weight.grad = None if gradient is None else gradient.to(data.dtype)
