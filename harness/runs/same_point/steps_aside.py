"""Single training steps beside a run: what a policy would do next, the training untouched.

From the weights, buffers, optimizer state and rate that the run has now, one step is made on each
of a few batches and undone again; gradients and the weight changes that were really stored remain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harness.precision.execution import Execution
from harness.precision.loss_scale import make_loss_scale
from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.precision.stochastic_weights import StochasticWeights
from harness.precision.undisturbed import undisturbed
from harness.runs.crash import Position
from harness.runs.dropout import MaskRecorder
from harness.runs.same_point.state_now import (
    OptimizerState,
    StateNow,
    clear_gradients,
    flat,
    flat_gradient,
    load_copies,
    own_settings,
    run_post_step_hooks,
    scale_rates,
)
from harness.runs.step import StepOutcome, TrainingStep
from harness.workloads.base import Workload
from harness.workloads.batches import to_device

# From 2^16 down to 2^-24: below, every gradient of FP16's range is gone.
MAX_BACKOFFS = 40


@dataclass(frozen=True, kw_only=True)
class AsideStep:
    """One step that was made and undone.

    Attributes:
        gradients: Unscaled and unclipped, one flat FP32 (FP64 for FP64 weights) tensor per
            parameter; zeros where there is none; complex as pairs of reals.
        updates: Weight changes as stored, likewise; zeros when the step was skipped; where weights
            are rounded stochastically, what is stored on average: the changes before rounding.
        updates_at_rate: Likewise at the other learning rate, if one was asked for.
    """

    gradients: list[Tensor]
    updates: list[Tensor]
    updates_at_rate: list[Tensor] | None = None


class StepsAside:
    """Makes such steps under one policy, which must be in force on the model.

    Args:
        workload: The run's.
        state: Where the run is.
        policy: What is in force.
        execution: As `applied` yields it.
        masks: Recorder of `paired_dropout`.
        seed: Of the random draws in the steps; the index of a batch makes the rest of it.
        position: Told what is going on.
        first_scale: Loss scale to begin with, if the policy scales.
        own_optimizer: Whether the workload's optimizer is not that of the run: its settings but the
            learning rate count, and what its hooks do after every step has been done to the state.

    Attributes:
        optimizer: The one that makes them; not the run's.
    """

    def __init__(
        self,
        workload: Workload,
        state: StateNow,
        *,
        policy: PrecisionPolicy,
        execution: Execution,
        masks: MaskRecorder,
        seed: int,
        position: Position,
        first_scale: float | None = None,
        own_optimizer: bool = False,
    ) -> None:
        self._workload, self._state, self._policy = workload, state, policy
        self._execution, self._masks, self._seed = execution, masks, seed
        self._position = position
        inside = {id(parameter) for parameter in state.model.parameters()}
        self._outside = [p for p in state.parameters if id(p) not in inside]
        start = make_loss_scale(policy.loss_scale)
        self._scale = None if start is None else max(start.scale, first_scale or 0.0)
        self._backoffs = 0
        position.doing = "while making the optimizer"
        self.optimizer = workload.make_optimizer(state.model)
        own = own_settings(self.optimizer) if own_optimizer else None
        load_copies(
            self.optimizer,
            state.optimizer_states,
            cast_to_weights=policy.weight_rounding != "stochastic",
        )
        if own is not None:
            # Loading has made the groups anew.
            for group, settings in zip(self.optimizer.param_groups, own, strict=True):
                group.update(settings)
            run_post_step_hooks(self.optimizer)
        self._optimizer_state = OptimizerState(self.optimizer)

    def run(
        self, batches: Sequence[Any], *, rate_factor: float | None = None
    ) -> Iterator[AsideStep]:
        """Yield one step per batch, each from the same state.

        Args:
            batches: On the device.
            rate_factor: Of every group's learning rate in a second update by the same gradients.
        """
        for index, batch in enumerate(batches):
            yield self._one(batch, index, rate_factor)

    def _one(self, batch: Any, index: int, rate_factor: float | None) -> AsideStep:
        while True:
            seen = _Gradients(
                self._state.parameters,
                keep_clipped=self._rounds_at_random or rate_factor is not None,
            )
            with self._changes() as updates:
                outcome = self._step(batch, index, seen)
            if not self._backs_off(outcome):
                break
        if self._rounds_at_random and not outcome.skipped:
            updates = self._updates_of(seen, 1.0)
        at_rate = None
        if rate_factor is not None and outcome.skipped:
            at_rate = updates  # zeros
        elif rate_factor is not None:
            at_rate = self._updates_of(seen, rate_factor)
        return AsideStep(gradients=seen.seen, updates=updates, updates_at_rate=at_rate)

    @property
    def _rounds_at_random(self) -> bool:
        return self._policy.weight_rounding == "stochastic"

    def _updates_of(self, seen: _Gradients, rate_factor: float) -> list[Tensor]:
        """Return what the optimizer's part of the step stores at another rate, on average."""
        with self._undone() as before:
            return _changed(before, self._update(seen.clipped, rate_factor))

    @contextmanager
    def _changes(self) -> Iterator[list[Tensor]]:
        """Yield a list that holds the weights' changes once the block is done; they are undone."""
        changes: list[Tensor] = []
        with self._undone() as before:
            yield changes
            changes += _changed(before, [flat(p) for p in self._state.parameters])

    @contextmanager
    def _undone(self) -> Iterator[list[Tensor]]:
        """Yield the weights; what the block does to the model is undone."""
        with undisturbed(self._state.model, also=self._outside):
            before = [flat(p) for p in self._state.parameters]
            try:
                yield before
            finally:
                # A step that raised leaves gradients to which the next one would add.
                clear_gradients(self._state)

    def _update(self, gradients: Sequence[Tensor | None], rate_factor: float) -> list[Tensor]:
        """Do the optimizer's part of a step once more; return the new weights.

        Those that are to be rounded at random are returned as they are before. That is what
        rounding without bias stores on average, and one draw tells nothing of it: a weight that
        changes by a thousandth of its spacing moves by a whole one, once in a thousand draws.
        """
        self._optimizer_state.put_back()
        scale_rates(self.optimizer, rate_factor)
        for parameter, gradient in zip(self._state.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        stepping: AbstractContextManager[None] = nullcontext()
        if self._rounds_at_random:
            stepping = StochasticWeights(self.optimizer, self._execution.noise).stepping()
        with stepping:
            self.optimizer.step()
            return [flat(p) for p in self._state.parameters]

    def _step(self, batch: Any, index: int, gradients: _Gradients) -> StepOutcome:
        self._optimizer_state.put_back()
        step = TrainingStep(
            self._workload,
            self._state.model,
            optimizer=self.optimizer,
            scheduler=None,
            policy=self._at_scale(),
            execution=self._execution,
            masks=self._masks,
            seed=self._seed,
            position=self._position,
        )
        device_batch = to_device(batch, self._masks.device)
        return step.run(device_batch, step=index, observer=gradients)

    def _at_scale(self) -> PrecisionPolicy:
        if self._scale is None:
            return self._policy
        fixed = LossScaleSettings(kind="static", init_scale=self._scale)
        return dataclasses.replace(self._policy, loss_scale=fixed)

    def _backs_off(self, outcome: StepOutcome) -> bool:
        """Lower the scale as the policy's scaler would after an overflow; return whether it did."""
        rule = self._policy.loss_scale
        if self._scale is None or not outcome.skipped or rule.kind not in ("dynamic", "deepspeed"):
            return False
        lower = max(self._scale * rule.backoff_factor, rule.min_scale)
        if self._backoffs >= MAX_BACKOFFS or lower == self._scale:
            return False
        if not math.isfinite(float(outcome.loss)):
            return False  # the forward pass itself overflowed: no scale helps
        self._scale = lower
        self._backoffs += 1
        return True


class _Gradients:
    """Keeps the gradients of one step: flat before they are clipped, as they are afterwards."""

    def __init__(self, parameters: Sequence[Tensor], *, keep_clipped: bool) -> None:
        self._parameters, self._keep_clipped = parameters, keep_clipped
        self.seen: list[Tensor] = []
        self.clipped: list[Tensor | None] = []

    def watching(self, step: int, *, loss_scale: float) -> AbstractContextManager[None]:
        del step, loss_scale
        return nullcontext()

    def around_forward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gradients(self, gradients: Sequence[Tensor]) -> None:
        del gradients  # the parameters also tell whose gradient is missing
        self.seen = [flat_gradient(p) for p in self._parameters]

    def before_update(self, parameters: Sequence[Tensor]) -> None:
        del parameters
        if self._keep_clipped:
            self.clipped = [
                None if p.grad is None else p.grad.detach().clone() for p in self._parameters
            ]

    def after_update(self, parameters: Sequence[Tensor], *, skipped: bool) -> None:
        """Nothing."""


def _changed(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
    return [new.sub_(old) for old, new in zip(before, after, strict=True)]
