"""What ended a run in trouble: recognised in its series, told from what a replay of it saw.

Two pure steps around a replay that is made elsewhere: `find_trouble` names the trigger and the step
to look at, `diagnose` turns the evidence from that step into a cause and sentences, asking in a
practitioner's order: the data, the learning rate, the loss scale, one layer; then silent deaths.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.numerics.formats import get_format

Trigger = Literal[
    "nonfinite_loss",
    "nonfinite_gradient",
    "loss_scale_collapse",
    "nonfinite_buffers",
    "nonfinite_weights",
    "diverged",
    "zero_gradients",
    "unmoved_weights",
]
Cause = Literal["data", "learning_rate", "loss_scale", "layer", "silent", "unknown"]

OVERFLOWED, FLUSHED = "overflowed", "flushed"
# What stands for an op where an operand is rounded to a format that no tensor has.
ROUNDING = "rounding"
# Skips in a row that no calibration of a scale needs: 2^16 falls below 1 within 17.
MAX_SKIPS = 20
# A loss has diverged when it rises above its minimum by this many times what it had gained.
_DIVERGED_RISE = 3.0
_MOSTLY_ZERO = 0.5
_MOSTLY_MOVED = 0.9
# Steps within which a part that moves at all under FP32 is expected to have moved.
UNMOVED_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Why a run is looked at again.

    Attributes:
        trigger: What was wrong.
        step: Batch index at which it shows; None where only a replay can tell.
        suspects: Steps before which a replay keeps a copy of the model's state.
    """

    trigger: Trigger
    step: int | None
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OpEvent:
    """One op whose result left the range of its format.

    Attributes:
        module: Whose call ran it (or recorded its node); None outside of all modules.
        direction: `forward` or `backward`.
        op: Its name below autograd.
        format: Of the result.
        kind: `overflowed` (a non-finite result) or `flushed` (mostly zero, and not so in FP32).
        value: Largest magnitude of the same result in a wider format; None where that is unknown.
        finite_inputs: Whether all its inputs were finite.
        fp32_max: Largest magnitude at the same place of an FP32 pass over the same weights and
            batch; None where it has no such place.
        is_layer: Whether the op is the product of a module without children, so that its result
            can be called the module's output.
        zeros_from: Op that made the exact zeros which this one divides by or takes the logarithm
            of; None where it does not.
    """

    module: str | None
    direction: str
    op: str
    format: str
    kind: str
    value: float | None
    finite_inputs: bool
    fp32_max: float | None = None
    is_layer: bool = False
    zeros_from: OpEvent | None = None

    def reaching(self, value: float | None) -> OpEvent:
        """Return the event with another `value`."""
        return dataclasses.replace(self, value=value)

    @property
    def limit(self) -> float | None:
        """Largest finite value of the format; None for a format that is no real one."""
        try:
            return get_format(self.format).max_finite
        except ValueError:
            return None


@dataclass(frozen=True, kw_only=True)
class OutputSeen:
    """What a module's first call returned.

    Attributes:
        largest: Largest magnitude over all its floating tensors; NaN or infinite where one is.
        zero_share: Share of exact zeros in the first of them.
    """

    largest: float
    zero_share: float


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one forward and backward pass at given weights and batch gave.

    Attributes:
        loss: The loss, unscaled.
        gradient_finite: Whether every weight gradient is finite.
        zero_shares: Module that owns parameters -> share of exact zeros in their gradients.
        outputs: Module -> what it returned, in order of the calls' ends.
        events: Ops that left their format's range, in order.
        passed_on: The first op with a non-finite result, whatever it was given.
        first_nan: The first op with NaN in its result and none in its inputs.
    """

    loss: float
    gradient_finite: bool
    zero_shares: Mapping[str, float]
    outputs: Mapping[str, OutputSeen]
    events: tuple[OpEvent, ...] = ()
    passed_on: OpEvent | None = None
    first_nan: OpEvent | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a replay saw at the step in question, before its update.

    Attributes:
        step: Batch index.
        reproduced: Whether the replay gave the run's own losses.
        scale: Loss scale of the step.
        has_scaler: Whether the policy scales its loss.
        learning_rate: Of the step; NaN if unknown.
        batch_max: Largest magnitude in the batch's floating tensors; NaN or infinite if one is;
            None without floating tensors.
        earlier_batch_max: The same over all batches before; None without any.
        weights_max: Largest magnitude among the weights before the step.
        first_weights_max: The same at the start of the run.
        bad_weights: Modules whose weights are non-finite before the step.
        first_loss: Loss of the first step; None at it.
        low: The pass under the run's policy, with its loss scale.
        fp32: The same weights, batch and scale in FP32; None where the policy is FP32.
        unscaled_finite: Whether the policy's gradient without loss scale is finite; None if there
            is no scale to leave out.
        bad_buffers: Buffers that the step's forward pass left non-finite.
    """

    step: int
    reproduced: bool
    scale: float
    has_scaler: bool
    learning_rate: float
    batch_max: float | None
    earlier_batch_max: float | None
    weights_max: float
    first_weights_max: float
    bad_weights: tuple[str, ...]
    first_loss: float | None
    low: Pass
    fp32: Pass | None
    unscaled_finite: bool | None
    bad_buffers: tuple[str, ...]


def find_trouble(
    *,
    status: str,
    series: Mapping[str, Sequence[float]],
    final: Mapping[str, float],
    sampled_steps: Sequence[int],
    sampled: Mapping[str, Sequence[float]],
    computes_in_fp32: bool,
    stores_fp32: bool = True,
) -> Trouble | None:
    """Return what went wrong in a run, the earliest cause that its numbers show; None if nothing.

    Args:
        status: `RunRecord.status`; a crashed run is none of this module's business.
        series: `RunRecord.series`.
        final: `RunRecord.final`.
        sampled_steps: `RunRecord.sampled_steps`.
        sampled: `RunRecord.sampled`, for the share of exactly zero gradients.
        computes_in_fp32: Whether the policy is FP32: zero gradients are then the model's own.
        stores_fp32: Whether weights and buffers are FP32: averages kept in them then move.
    """
    losses = series.get("loss", ())
    if status == "crashed" or not losses:
        return None
    suspects = _suspects(series)
    if final.get("nonfinite_buffers", 0.0) > 0 and math.isfinite(losses[-1]):
        return Trouble(trigger="nonfinite_buffers", step=None, suspects=suspects)
    found = [trouble for trouble in _nonfinite(series) if trouble is not None]
    if found:
        return min(found, key=lambda trouble: trouble.step or 0)
    if final.get("nonfinite_weights", 0.0) > 0:
        return Trouble(trigger="nonfinite_weights", step=None, suspects=suspects)
    rise = _diverged_at(losses)
    if rise is not None:
        return Trouble(trigger="diverged", step=rise)
    if computes_in_fp32:
        return None
    return _silent(series, final, sampled_steps, sampled, stores_fp32=stores_fp32)


def _suspects(series: Mapping[str, Sequence[float]]) -> tuple[int, ...]:
    losses, bad = series.get("loss", ()), series.get("nonfinite_grad", ())
    return tuple(
        step
        for step, loss in enumerate(losses)
        if not math.isfinite(loss) or (step < len(bad) and bad[step] > 0)
    )


def _nonfinite(series: Mapping[str, Sequence[float]]) -> list[Trouble | None]:
    losses, bad = series.get("loss", ()), series.get("nonfinite_grad", ())
    scales, skipped = series.get("loss_scale", ()), series.get("skipped", ())
    scaled = any(skipped) or len(set(scales)) > 1 or any(s != 1 for s in scales)
    loss_at = next((k for k, loss in enumerate(losses) if not math.isfinite(loss)), None)
    gradient_at = next((k for k, count in enumerate(bad) if count > 0), None)
    return [
        None if loss_at is None else Trouble(trigger="nonfinite_loss", step=loss_at),
        None
        if gradient_at is None or scaled
        else Trouble(trigger="nonfinite_gradient", step=gradient_at),
        _collapse(scales, skipped),
    ]


def _collapse(scales: Sequence[float], skipped: Sequence[float]) -> Trouble | None:
    streak = 0
    for step, (scale, skip) in enumerate(zip(scales, skipped, strict=False)):
        streak = streak + 1 if skip else 0
        # The last skip of the streak tells most: the scale is smallest there.
        if streak >= MAX_SKIPS or (skip and scale < min(1.0, scales[0])):
            return Trouble(trigger="loss_scale_collapse", step=step)
    return None


def _diverged_at(losses: Sequence[float]) -> int | None:
    """Return where a finite loss left for good: the last step below twice its way back up."""
    window = max(1, len(losses) // 20)
    end = sum(losses[-window:]) / window
    lowest = min(losses)
    gained = losses[0] - lowest
    bound = lowest + max(_DIVERGED_RISE * gained, abs(lowest))
    if not end > bound:
        return None
    # The end is above the bound on average: a last loss below it ends nothing.
    low = (step for step, loss in enumerate(losses[:-window]) if loss <= bound)
    return 1 + max(low, default=-1)


def _silent(
    series: Mapping[str, Sequence[float]],
    final: Mapping[str, float],
    sampled_steps: Sequence[int],
    sampled: Mapping[str, Sequence[float]],
    *,
    stores_fp32: bool,
) -> Trouble | None:
    shares = [
        1.0 - nonzero / total if total else 0.0
        for nonzero, total in zip(
            sampled.get("grad_nonzero", ()), sampled.get("grad_total", ()), strict=False
        )
    ]
    dead = [share > _MOSTLY_ZERO for share in shares]
    if dead and dead[-1]:
        start = len(dead) - next((k for k, d in enumerate(reversed(dead)) if not d), len(dead))
        bad = series.get("nonfinite_grad", ())
        candidates = [step for step in sampled_steps[start : len(dead)] if not bad or not bad[step]]
        if candidates:
            return Trouble(trigger="zero_gradients", step=candidates[0])
    moved = final.get("moved_weight_share", 0.0)
    # A target that averages slowly moves in the few elements that are near zero.
    still = final.get("unmoved_tensors", 0.0) > 0 or moved < _MOSTLY_MOVED
    if moved > 0 and (still or (not stores_fp32 and final.get("unmoved_buffers", 0.0) > 0)):
        steps = min(UNMOVED_STEPS, len(series["loss"]) // 2)  # replayed twice
        return Trouble(trigger="unmoved_weights", step=steps - 1) if steps else None
    return None
