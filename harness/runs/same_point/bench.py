"""What all measurements of a same-point probe share: workload, batches, device, random draws."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.precision.execution import Execution, applied
from harness.precision.policy import PrecisionPolicy
from harness.runs.crash import Position
from harness.runs.determinism import seed_torch, stream_seed
from harness.runs.dropout import MaskRecorder
from harness.runs.same_point.state_now import StateNow
from harness.runs.same_point.steps_aside import StepsAside
from harness.workloads.base import Workload
from harness.workloads.batches import to_device


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all measurements of one probe share.

    Attributes:
        workload: Whose loss and optimizer the steps use.
        batches: The K batches, on the device.
        device: Where the model is.
        backend: As for `applied`.
        masks: Recorder of the `paired_dropout` in force.
        seed: Of the random draws in the steps.
        is_candidates: Whether the workload is a candidate's own, beside the reference's.
    """

    workload: Workload
    batches: tuple[Any, ...]
    device: torch.device
    backend: str
    masks: MaskRecorder
    seed: int
    is_candidates: bool = False

    def steps(
        self,
        state: StateNow,
        policy: PrecisionPolicy,
        execution: Execution,
        *,
        position: Position,
        first_scale: float | None = None,
    ) -> StepsAside:
        """Return the steps of a policy that is in force."""
        return StepsAside(
            self.workload,
            state,
            policy=policy,
            execution=execution,
            masks=self.masks,
            seed=self.seed,
            position=position,
            first_scale=first_scale,
            own_optimizer=self.is_candidates,
        )

    def forward(self, state: StateNow, execution: Execution) -> Tensor:
        """Compute the loss of the first batch, with the random draws of its step."""
        seed_torch(stream_seed(self.seed, stream="step", index=0), self.device)
        with execution.forward():
            return self.workload.loss_fn(state.model, to_device(self.batches[0], self.device))

    def in_force(
        self, state: StateNow, policy: PrecisionPolicy
    ) -> AbstractContextManager[Execution]:
        """Put a policy in force on the run's model."""

        def trace() -> object:
            return self.workload.loss_fn(state.model, to_device(self.batches[0], self.device))

        return applied(
            policy, state.model, device=self.device, backend=self.backend, trace_forward=trace
        )
