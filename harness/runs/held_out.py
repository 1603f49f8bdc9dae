"""Held-out evaluation: a candidate's weights in FP32 arithmetic, the training untouched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.precision.execution import applied, fp32_weights, sixteen_bit_tensors
from harness.precision.policy import PrecisionPolicy
from harness.precision.undisturbed import undisturbed
from harness.runs.determinism import (
    preserved_random_state,
    seed_everything,
    stream_seed,
    tensors_sha256,
)
from harness.runs.record import HeldOut
from harness.workloads.base import Workload
from harness.workloads.batches import iter_tensors, leading_size, to_device

_FP32 = PrecisionPolicy(name="fp32")
OWN_UNIT = "own units"


def evaluation_steps(steps: int, tail_evaluations: int) -> tuple[int, ...]:
    """Return the numbers of completed steps at which to evaluate.

    0, then `tail_evaluations` evenly spaced points of the last third of the run, the last one at
    its end; fewer when the tail has fewer steps.
    """
    tail = -(-steps // 3)
    points = {steps - tail * i // tail_evaluations for i in range(tail_evaluations)}
    return (0, *sorted(points))


class HeldOutEvaluator:
    """Evaluates a model on its workload's held-out set and keeps the results.

    The workload's own `eval_fn` takes the place of the held-out loss where it has one. Random
    draws inside an evaluation are the same at every evaluation and under every policy.

    Args:
        workload: Where the held-out data or `eval_fn` come from.
        seed: Of the run.
        device: Of the run.
        built: The model before a policy is applied. What it stores in 16 bits by itself is
            evaluated so; what a policy stores in 16 bits is evaluated in FP32.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        seed: int,
        device: torch.device,
        built: nn.Module | None = None,
    ) -> None:
        self._workload = workload
        self._sixteen_bit_by_design = [] if built is None else sixteen_bit_tensors(built)
        self._seed = stream_seed(seed, stream="held_out")
        self._device = device
        with preserved_random_state(device):
            seed_everything(self._seed, device)
            batches = workload.held_out(seed)
        self._batches = list(batches) if batches is not None else []
        self._with_grad = False
        self._steps: list[int] = []
        self._values: list[float] = []
        self._unit = workload.loss_unit
        tensors = [t for batch in self._batches for t in iter_tensors(batch)]
        self.sha256 = tensors_sha256(tensors) if self._batches else None

    def evaluate(self, model: nn.Module, *, step: int) -> None:
        """Evaluate after `step` completed steps; nothing happens without held-out data.

        Weights, buffers, attributes (training flags among them), gradients and random state are
        as before on return.
        """
        with (
            preserved_random_state(self._device),
            undisturbed(model),
            fp32_weights(model, but=self._sixteen_bit_by_design),
            applied(_FP32, model, device=self._device),
            torch.autocast(self._device.type, enabled=False),
        ):
            model.eval()
            seed_everything(self._seed, self._device)
            value = self._own_value(model)
            if value is None:
                value = self._loss(model)
        if value is not None:
            self._steps.append(step)
            self._values.append(value)

    def result(self) -> HeldOut | None:
        """Return all evaluations so far, or None when the workload has nothing to evaluate."""
        if not self._steps:
            return None
        own = self._unit == OWN_UNIT
        items = [self._workload.num_items(batch) for batch in self._batches]
        known = [n for n in items if n is not None]
        complete = not own and len(known) == len(items)
        return HeldOut(
            steps=tuple(self._steps),
            loss=tuple(self._values),
            unit=self._unit,
            num_items=sum(known) if complete else None,
        )

    def _own_value(self, model: nn.Module) -> float | None:
        with torch.no_grad():
            value = self._workload.eval_fn(model)
        if value is None:
            return None
        self._unit = OWN_UNIT
        return float(value)

    def _loss(self, model: nn.Module) -> float | None:
        if not self._batches:
            return None
        total = weight = 0.0
        for batch in self._batches:
            moved = to_device(batch, self._device)
            items = self._workload.num_items(batch) or leading_size(batch) or 1
            total += float(self._batch_loss(model, moved)) * items
            weight += items
        return total / weight

    def _batch_loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not self._with_grad:
            try:
                with torch.no_grad():
                    return self._workload.loss_fn(model, batch)
            except RuntimeError as error:
                # A loss that contains derivatives of the model (a physics residual, a penalty).
                if "does not require grad" not in str(error):
                    raise
                self._with_grad = True
        return self._workload.loss_fn(model, batch).detach()
