"""Faults of loss scaling: none where it is needed, in the wrong place, or falling apart."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from harness.calibration.faults.fault import Fault, Plant
from harness.precision.policy import LossScaleSettings

_DYNAMIC_START = 2.0**16


def _underflow(dose: str) -> Plant:
    return _fp16(LossScaleSettings(kind="static", init_scale=2.0 ** -int(dose)))


def _clip_before_unscale(dose: str) -> Plant:
    scale = LossScaleSettings(kind="static", init_scale=2.0 ** int(dose))
    return _fp16(scale, clip_before_unscale=True)


def _thrashing(dose: str) -> Plant:
    # Grows past what FP16 holds again and again: every overflow costs a step.
    scale = LossScaleSettings(
        kind="dynamic", init_scale=2.0**20, growth_factor=2.0**8, growth_interval=int(dose)
    )
    return _fp16(scale)


def _late_start(dose: str) -> Plant:
    return _fp16(LossScaleSettings(kind="dynamic", init_scale=2.0 ** int(dose)))


def _fp16(scale: LossScaleSettings, **fields: Any) -> Plant:
    return Plant(policy={"compute_format": "fp16", "loss_scale": scale, **fields})


@dataclass(frozen=True, kw_only=True)
class ScaledGroups:
    """Multiplies the gradients of all parameter groups but the first before each step.

    Attributes:
        factor: The loss scale that nobody divided out.
    """

    factor: float

    def install(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Register the multiplication on the optimizer."""
        optimizer.register_step_pre_hook(functools.partial(_scale_groups, factor=self.factor))


def _scale_groups(optimizer: Optimizer, args: Any, kwargs: Any, *, factor: float) -> None:
    for group in optimizer.param_groups[1:]:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


FAULTS = (
    Fault(
        name="fp16_underflow",
        sentence="FP16 without loss scaling in a model whose gradients are small: parts of them "
        "become zero. Met where the scaler was forgotten or the loss is divided by a large number.",
        dose="k: gradients in FP16 are 2^k smaller than here",
        plant=_underflow,
    ),
    Fault(
        name="clip_before_unscale",
        sentence="Gradients are clipped while they still carry the loss scale, so that nearly "
        "every step is clipped to almost nothing.",
        source="Lightning-AI/pytorch-lightning#9330",
        dose="k: the scale is 2^k",
        plant=_clip_before_unscale,
    ),
    Fault(
        name="scaler_thrashing",
        sentence="A loss scaler that grows too eagerly: the scale overflows, the step is skipped, "
        "and a few steps later again.",
        dose="clean steps after which the scale grows 256-fold",
        plant=_thrashing,
    ),
    Fault(
        name="scaler_late_start",
        sentence="A loss scale that starts far too high: every step is skipped until it has been "
        "halved often enough.",
        dose="k: the scale starts at 2^k",
        plant=_late_start,
    ),
    Fault(
        name="scaler_one_of_two",
        sentence="Gradients are unscaled for one of two optimizers only: half of the parameters "
        "step with gradients that still carry the scale.",
        source="ShiqiYu/OpenGait#147",
        dose="the scale that is left in the second half's gradients",
        plant=lambda dose: Plant(hooks=(ScaledGroups(factor=float(dose)),)),
    ),
)
