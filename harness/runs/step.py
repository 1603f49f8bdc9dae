"""One training step under a policy: forward, scale, backward, unscale, clip, update."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from harness.precision.execution import Execution
from harness.precision.loss_scale import make_loss_scale
from harness.precision.module_calls import autograd_position
from harness.precision.policy import PrecisionPolicy
from harness.precision.stochastic_weights import StochasticWeights
from harness.runs.crash import NotExpressibleError, Position, module_of_failed_backward
from harness.runs.determinism import seed_torch, stream_seed
from harness.runs.dropout import MaskRecorder
from harness.runs.failed_op import find_failed_op
from harness.runs.gradients import (
    clip_,
    count_nonfinite,
    global_norm,
    gradient_views,
    optimized_parameters,
)
from harness.runs.phases import Phases
from harness.workloads.base import Workload


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one step did; tensors are 0-dim, on the device, not yet waited for.

    Attributes:
        loss: As the workload returned it, detached, in FP32.
        grad_norm: Global L2 norm after unscaling and before clipping, FP32.
        nonfinite_grad: Elements of the unscaled gradients that are not finite, int64.
        masks: Checksum over the step's dropout masks, int64.
        learning_rate: Of the first parameter group, during the step; NaN where it has none.
        loss_scale: The scale the loss was multiplied by; 1 without a scaler.
        skipped: Whether the optimizer was not run because of an overflow.
    """

    loss: Tensor
    grad_norm: Tensor
    nonfinite_grad: Tensor
    masks: Tensor
    learning_rate: float
    loss_scale: float
    skipped: bool


class StepObserver(Protocol):
    """What watches a sampled step; it reads and never writes."""

    def watching(self, step: int, *, loss_scale: float) -> AbstractContextManager[None]:
        """See the step begin, and end with the context, by an exception too."""

    def around_forward(self) -> AbstractContextManager[None]:
        """Return what the step's first forward pass runs inside."""

    def gradients(self, gradients: Sequence[Tensor]) -> None:
        """See the unscaled, unclipped gradients, in the order of the parameters that have one."""

    def before_update(self, parameters: Sequence[Tensor]) -> None:
        """See the weights before the optimizer's step."""

    def after_update(self, parameters: Sequence[Tensor], *, skipped: bool) -> None:
        """See the weights after it."""


class TrainingStep:
    """Runs steps of one model; holds the loss scale between them."""

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        *,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        policy: PrecisionPolicy,
        execution: Execution,
        masks: MaskRecorder,
        seed: int,
        position: Position,
    ) -> None:
        self._workload, self._model = workload, model
        self._optimizer, self._scheduler = optimizer, scheduler
        self._policy, self._execution, self._masks = policy, execution, masks
        self._seed, self._position = seed, position
        self._device = masks.device
        self.phases = Phases(self._device, enabled=False)
        self.parameters = optimized_parameters(optimizer)
        self.loss_dtype = "float32"
        self._zero = torch.zeros((), dtype=torch.int64, device=self._device)
        self._scale = make_loss_scale(policy.loss_scale)
        self._scaler = None
        if self._scale is not None:
            self._scaler = torch.amp.GradScaler(self._device.type, init_scale=self._scale.scale)
        self._stochastic = None
        if policy.weight_rounding == "stochastic":
            self._stochastic = StochasticWeights(optimizer, execution.noise)
        self._needs_closure = needs_closure(optimizer)
        if self._needs_closure and self._scaler is not None:
            raise NotExpressibleError(
                f"{type(optimizer).__name__} evaluates the loss several times per step through a "
                "closure, which torch's loss scaler does not support"
            )

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose step this is."""
        return self._optimizer

    @property
    def masks(self) -> MaskRecorder:
        """The recorder of the random masks that steps draw."""
        return self._masks

    def run(self, batch: Any, *, step: int, observer: StepObserver | None) -> StepOutcome:
        """Do one step on a batch that is on the device already."""
        rate = _learning_rate(self._optimizer)
        scale = 1.0 if self._scale is None else self._scale.scale
        how = self._with_closure if self._needs_closure else self._plain
        watching = None if observer is None else observer.watching(step, loss_scale=scale)
        with self.phases(f"step {step}"), watching or nullcontext():
            loss, norm, nonfinite, skipped = how(batch, step, observer)
        if self._scheduler is not None:
            self._position.doing = "while stepping the schedule"
            # Once per batch, also after a skipped step: a pair keeps one schedule.
            self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepOutcome(
            loss=loss.reshape(()),
            grad_norm=norm,
            nonfinite_grad=nonfinite,
            masks=self._masks.value(),
            learning_rate=rate,
            loss_scale=scale,
            skipped=skipped,
        )

    def _first_forward(self, batch: Any, step: int, observer: StepObserver | None) -> Tensor:
        around = nullcontext() if observer is None else observer.around_forward()
        with self.phases("forward"), self._masks.recording(), around:
            try:
                return self._forward(batch, step)
            except RuntimeError as error:
                self._locate(error, lambda: self._forward(batch, step))
                raise

    def _locate(self, error: Exception, again: Callable[[], object]) -> None:
        """Note the op that raised, for the report of the crash."""
        doing = self._position.doing
        failed = find_failed_op(error, model=self._model, again=again)
        self._position.doing = doing
        if failed is not None:
            self._position.op = str(failed)
            self._position.module = self._position.module or failed.module

    def _forward(self, batch: Any, step: int) -> Tensor:
        self._position.doing = "in the forward pass"
        seed_torch(stream_seed(self._seed, stream="step", index=step), self._device)
        self._execution.noise.start(stream_seed(self._seed, stream="rounding", index=step))
        with self._execution.forward():
            loss = self._workload.loss_fn(self._model, batch)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_fn returned {type(loss).__name__}, not a scalar tensor")
        self.loss_dtype = str(loss.dtype).removeprefix("torch.")
        return loss

    def _plain(
        self, batch: Any, step: int, observer: StepObserver | None
    ) -> tuple[Tensor, Tensor, Tensor, bool]:
        recorded_from = autograd_position()
        loss = self._first_forward(batch, step, observer)
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        self._backward(scaled, batch, step, recorded_from)
        overflow = False
        if self._scaler is not None:
            if self._policy.clip_before_unscale:
                self._clip_scaled()
            overflow = self._unscale()
        self._position.doing = "in the optimizer step"
        gradients, norm, nonfinite = self._gradients(observer)
        clip = self._workload.clip
        if clip is not None and not overflow and not self._clips_scaled:
            clip_(gradients, norm, max_norm=clip)
        if observer is not None:
            observer.before_update(self.parameters)
        if not overflow:
            with self.phases("optimizer"), self._updating():
                self._optimizer.step()
        if observer is not None:
            observer.after_update(self.parameters, skipped=overflow)
        if self._scaler is not None and self._scale is not None:
            self._scale = self._scale.next(not overflow)
            self._scaler.update(self._scale.scale)
        return loss.detach().float(), norm, nonfinite, overflow

    def _backward(self, loss: Tensor, batch: Any, step: int, recorded_from: int) -> None:
        self._position.doing = "in the backward pass"
        try:
            with self.phases("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            self._position.module = module_of_failed_backward(
                error,
                model=self._model,
                recorded_from=recorded_from,
                forward_again=lambda: self._forward(batch, step),
            )
            self._position.doing = "in the backward pass"
            self._locate(error, lambda: self._forward(batch, step).backward())  # type: ignore[no-untyped-call]
            raise

    @property
    def _clips_scaled(self) -> bool:
        return self._policy.clip_before_unscale and self._scaler is not None

    def _clip_scaled(self) -> None:
        """Plant the fault of clipping gradients that are still multiplied by the scale."""
        if self._workload.clip is not None:
            gradients = gradient_views(self.parameters)
            norm = global_norm(gradients, self._device)
            clip_(gradients, norm, max_norm=self._workload.clip)

    def _gradients(self, observer: StepObserver | None) -> tuple[list[Tensor], Tensor, Tensor]:
        gradients = gradient_views(self.parameters)
        norm = global_norm(gradients, self._device)
        nonfinite = count_nonfinite(gradients, norm, zero=self._zero)
        if observer is not None:
            observer.gradients(gradients)
        return gradients, norm, nonfinite

    def _unscale(self) -> bool:
        """Unscale all gradients; return whether one overflowed. The one wait inside a step."""
        assert self._scaler is not None
        self._position.doing = "while unscaling the gradients"
        try:
            with self.phases("unscale"):
                self._scaler.unscale_(self._optimizer)
        except (RuntimeError, ValueError) as error:
            reason = self._why_not_unscaled()
            if reason is None:
                raise
            raise NotExpressibleError(reason) from error
        found = self._scaler._found_inf_per_device(self._optimizer)
        return any(float(value) != 0.0 for value in found.values())

    def _why_not_unscaled(self) -> str | None:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                continue
            if parameter.grad.is_complex():
                return f"torch's loss scaler cannot unscale the complex gradient of `{name}`"
            if parameter.grad.dtype is torch.float16:
                return f"torch's loss scaler does not unscale the FP16 gradient of `{name}`"
        return None

    def _updating(self) -> AbstractContextManager[None]:
        return nullcontext() if self._stochastic is None else self._stochastic.stepping()

    def _with_closure(
        self, batch: Any, step: int, observer: StepObserver | None
    ) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Let the optimizer call the loss; what is recorded is the first evaluation of the step."""
        first: list[tuple[Tensor, Tensor, Tensor]] = []

        def evaluate() -> Tensor:
            if first:
                # The masks of the first evaluation again, so that the step sees one function.
                loss = self._forward(batch, step)
            else:
                loss = self._first_forward(batch, step, observer)
            self._position.doing = "in the backward pass"
            loss.backward()  # type: ignore[no-untyped-call]
            gradients, norm, nonfinite = self._gradients(None if first else observer)
            if self._workload.clip is not None:
                clip_(gradients, norm, max_norm=self._workload.clip)
            if not first:
                first.append((loss.detach().float(), norm, nonfinite))
                if observer is not None:
                    observer.before_update(self.parameters)
            self._position.doing = "in the optimizer step"
            return loss.detach()

        def closure() -> Tensor:
            self._optimizer.zero_grad(set_to_none=True)
            with nullcontext() if self._stochastic is None else self._stochastic.evaluating():
                return evaluate()

        step_with: Callable[[Callable[[], Tensor]], Any] = self._optimizer.step  # type: ignore[assignment]
        with self._updating():
            step_with(closure)
        if not first:
            raise RuntimeError(f"{type(self._optimizer).__name__} never evaluated its closure")
        if observer is not None:
            observer.after_update(self.parameters, skipped=False)
        return (*first[0], False)


def _learning_rate(optimizer: Optimizer) -> float:
    """Return the first group's rate, NaN for an optimizer that finds its own."""
    rate = optimizer.param_groups[0].get("lr")
    return math.nan if rate is None else float(rate)


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step must be given a closure, as L-BFGS' must."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty
