"""Loss scaling as a value: what the scale is, and what it becomes after a step.

Applying it to a loss and to gradients is the trainer's; the rules here are those of
`torch.amp.GradScaler` and of DeepSpeed's `DynamicLossScaler`, so that the scale's whole history can
be tested without either.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass

from harness.precision.policy import LossScaleSettings


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The state of a loss scaler between two steps.

    Attributes:
        settings: The rule; `settings.kind` is `static`, `dynamic` or `deepspeed`.
        scale: What the next loss is multiplied by.
        clean_steps: Steps without overflow since the scale last changed its course.
        overflows_left: DeepSpeed's hysteresis: overflows that are still only skipped, plus one.
    """

    settings: LossScaleSettings
    scale: float
    clean_steps: int = 0
    overflows_left: int = 1

    def next(self, grads_finite: bool) -> LossScale:
        """Return the state after one step.

        Args:
            grads_finite: Whether every gradient of the step was finite. A step with a non-finite
                gradient is skipped by the caller, whatever the kind.

        Source: `torch.amp.GradScaler.update` (aten `_amp_update_scale_`); DeepSpeed,
        `runtime/fp16/loss_scaler.py`, `DynamicLossScaler.update_scale` with
        `raise_error_at_min_scale` off.
        """
        if self.settings.kind == "dynamic":
            return self._next_torch(grads_finite)
        if self.settings.kind == "deepspeed":
            return self._next_deepspeed(grads_finite)
        return self

    def _next_torch(self, grads_finite: bool) -> LossScale:
        rule = self.settings
        if not grads_finite:
            return dataclasses.replace(
                self, scale=_fp32(self.scale * rule.backoff_factor), clean_steps=0
            )
        clean = self.clean_steps + 1
        if clean < rule.growth_interval:
            return dataclasses.replace(self, clean_steps=clean)
        grown = _fp32(self.scale * rule.growth_factor)
        # aten keeps the old scale where growing it would leave FP32's range.
        scale = grown if grown <= _FP32_MAX else self.scale
        return dataclasses.replace(self, scale=scale, clean_steps=0)

    def _next_deepspeed(self, grads_finite: bool) -> LossScale:
        rule = self.settings
        if not grads_finite:
            if self.overflows_left > 1:
                left = self.overflows_left - 1
                return dataclasses.replace(self, clean_steps=0, overflows_left=left)
            scale = max(self.scale * rule.backoff_factor, rule.min_scale)
            return dataclasses.replace(self, scale=scale, clean_steps=0)
        clean = self.clean_steps + 1
        if clean < rule.growth_interval:
            # Growth refills the hysteresis; a clean step alone only if overflows must be
            # consecutive to count.
            left = rule.hysteresis if rule.consecutive_hysteresis else self.overflows_left
            return dataclasses.replace(self, clean_steps=clean, overflows_left=left)
        return LossScale(
            settings=rule,
            scale=self.scale * rule.growth_factor,
            clean_steps=0,
            overflows_left=rule.hysteresis,
        )


_FP32_MAX = (2.0 - 2.0**-23) * 2.0**127


def _fp32(value: float) -> float:
    """Round to FP32, in which aten keeps the scale; infinity beyond its range."""
    if abs(value) > _FP32_MAX:
        return float("inf")
    return struct.unpack("<f", struct.pack("<f", value))[0]  # type: ignore[no-any-return]


def make_loss_scale(settings: LossScaleSettings) -> LossScale | None:
    """Return the state before the first step, or None when the loss is not scaled."""
    if settings.kind == "none":
        return None
    scale = _fp32(settings.init_scale) if settings.kind == "dynamic" else settings.init_scale
    return LossScale(settings=settings, scale=scale, overflows_left=settings.hysteresis)
