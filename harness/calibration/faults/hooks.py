"""What faults do around the optimizer's step: round weights, gradients, moments, constants.

Each is a value with `install`; none draws random numbers or changes a parameter's name or shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.calibration.faults.rounded import nearest


@dataclass(frozen=True, kw_only=True)
class RoundedState:
    """Keeps tensors of the optimizer's state in a lower format.

    Attributes:
        entries: Names in the state (`exp_avg_sq`, `momentum_buffer`, `step`); one that an
            optimizer does not have is passed over.
        name: The format.
    """

    entries: tuple[str, ...]
    name: str

    def install(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Register the rounding after each step."""
        rounding = functools.partial(nearest, name=self.name)
        optimizer.register_step_post_hook(
            functools.partial(_change_state, entries=self.entries, change=rounding)
        )


@dataclass(frozen=True, kw_only=True)
class EvenlyQuantizedState:
    """Keeps Adam's second moment in whole multiples of its tensor's maximum over `levels`.

    What is below half a level becomes zero, and the update of such a weight explodes.
    """

    levels: int

    def install(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Register the quantization after each step."""
        change = functools.partial(_evenly, levels=self.levels)
        optimizer.register_step_post_hook(
            functools.partial(_change_state, entries=("exp_avg_sq",), change=change)
        )


@dataclass(frozen=True, kw_only=True)
class RoundedWeights:
    """Rounds the weights to a lower format after each step: there is no FP32 copy of them.

    Attributes:
        name: The format.
        below: Only while the learning rate is below this share of the highest so far.
    """

    name: str
    below: float = float("inf")

    def install(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Register the rounding after each step."""
        peak = [0.0]
        optimizer.register_step_post_hook(
            functools.partial(_round_weights, name=self.name, below=self.below, peak=peak)
        )


@dataclass(frozen=True, kw_only=True)
class RoundedGradients:
    """Stores the gradients in a lower format before each step.

    Attributes:
        name: The format.
        gain: They are divided by this before and multiplied by it after: gradients that are that
            much smaller.
    """

    name: str
    gain: float = 1.0

    def install(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Register the rounding before each step."""
        optimizer.register_step_pre_hook(
            functools.partial(_round_gradients, name=self.name, gain=self.gain)
        )


@dataclass(frozen=True, kw_only=True)
class AdamEps:
    """Gives Adam another `eps`."""

    eps: float

    def install(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Set it in every group that has one."""
        for group in optimizer.param_groups:
            if "eps" in group:
                group["eps"] = self.eps


@dataclass(frozen=True, kw_only=True)
class RoundedDecay:
    """Rounds the factor `1 - lr * weight_decay` of decoupled weight decay to a lower format."""

    name: str

    def install(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Register the change of the decay before each step."""
        given = [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]
        optimizer.register_step_pre_hook(
            functools.partial(_round_decay, name=self.name, given=given)
        )


def _change_state(
    optimizer: Optimizer,
    args: Any,
    kwargs: Any,
    *,
    entries: tuple[str, ...],
    change: Callable[[Tensor], Tensor],
) -> None:
    with torch.no_grad():
        for state in optimizer.state.values():
            for entry in entries:
                value = state.get(entry)
                if isinstance(value, Tensor):
                    value.copy_(change(value))


def _evenly(values: Tensor, *, levels: int) -> Tensor:
    step = values.max() / levels
    return torch.where(step > 0, (values / step).round() * step, values)


def _round_weights(
    optimizer: Optimizer, args: Any, kwargs: Any, *, name: str, below: float, peak: list[float]
) -> None:
    rate = float(optimizer.param_groups[0]["lr"])
    peak[0] = max(peak[0], rate)
    if rate > below * peak[0]:
        return
    with torch.no_grad():
        for parameter in _parameters(optimizer):
            parameter.copy_(nearest(parameter.detach(), name))


def _round_gradients(
    optimizer: Optimizer, args: Any, kwargs: Any, *, name: str, gain: float
) -> None:
    with torch.no_grad():
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                parameter.grad.copy_(nearest(parameter.grad / gain, name) * gain)


def _round_decay(
    optimizer: Optimizer, args: Any, kwargs: Any, *, name: str, given: list[float]
) -> None:
    for group, decay in zip(optimizer.param_groups, given, strict=True):
        rate = float(group["lr"])
        if rate > 0 and decay > 0:
            factor = float(nearest(torch.tensor(1 - rate * decay), name))
            group["weight_decay"] = (1 - factor) / rate


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
