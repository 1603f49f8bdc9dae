"""A small training with seams, as a workload of the harness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from harness.calibration.tasks.hooks import OptimizerHook
from harness.calibration.tasks.problem import Batch, Problem
from harness.calibration.tasks.seams import DEFAULTS, Seam, bind
from harness.calibration.tasks.shards import ShardRule, sharded_loss
from harness.workloads.optimization import seeded


class Task:
    """A problem, computed through these seams, as a `Workload`.

    Faults act in training alone: an evaluation takes the default seams, as the harness evaluates
    every candidate's weights in FP32 arithmetic. So the held-out loss tells what a fault did to
    the weights, the training loss also what it does to the forward pass.

    Args:
        problem: Data, model, optimizer.
        name: Of the task.
        description: One line.
        seams: By name, what replaces the problem's own.
        hooks: Installed on the optimizer, after the task's own.
        shards: How a batch is divided and its gradients added; None: not at all.

    Attributes:
        seams: All seams that are in force in training.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        name: str,
        description: str,
        seams: Mapping[str, Seam],
        hooks: Sequence[OptimizerHook],
        shards: ShardRule | None,
    ) -> None:
        self._problem, self._hooks, self._shards = problem, tuple(hooks), shards
        self.seams: Mapping[str, Seam] = MappingProxyType({**DEFAULTS, **seams})
        self.name = name
        self.description = description
        self.clip = problem.clip
        self.default_steps = problem.steps
        self.data_sha256 = problem.data_sha256
        self.loss_unit = problem.loss_unit
        self.settings: dict[str, Any] = {
            "name": name,
            "kind": "calibration_task",
            "loss_unit": problem.loss_unit,
            "clip": problem.clip,
            "steps": problem.steps,
            "warmup": problem.warmup,
            **problem.settings,
        }

    def build_model(self, seed: int) -> nn.Module:
        """Return the model; the global generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self._problem.build()
        bind(model, self.seams)
        return model

    def batches(self, seed: int, steps: int) -> Iterator[Batch]:
        """Yield training batches."""
        generator = seeded(seed)
        for _ in range(steps):
            yield self._problem.draw(generator)

    def loss_fn(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the scalar loss, FP32; an evaluation takes the weights that the task evaluates.

        The seams are bound at each call, so a model of this task's reference serves as well.
        """
        if not model.training:
            bind(model, DEFAULTS)
            weights = self._problem.evaluated_weights(model)
            if weights:
                return torch.func.functional_call(model, weights, batch)  # type: ignore[no-any-return]
            return model(*batch)  # type: ignore[no-any-return]
        bind(model, self.seams)
        if self._shards is None:
            return model(*batch)  # type: ignore[no-any-return]
        return sharded_loss(model, self._problem.parts(batch, self._shards.shards), self._shards)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer with the task's and the faults' hooks."""
        optimizer = self._problem.optimizer(model)
        self._problem.prepare(optimizer, model, self.seams)
        for hook in self._hooks:
            hook.install(optimizer, model)
        return optimizer

    def make_scheduler(self, optimizer: Optimizer, steps: int) -> LambdaLR:
        """Return the schedule, which ends near zero."""
        return LambdaLR(optimizer, lambda step: self._problem.rate(step, steps))

    def held_out(self, seed: int) -> list[Batch]:
        """Return the held-out batches, the same for every seed."""
        del seed
        return self._problem.held_out()

    def eval_fn(self, model: nn.Module) -> None:
        """Return None: the held-out loss is the figure."""

    def num_items(self, batch: Batch) -> int:
        """Return the items that a batch predicts."""
        return self._problem.num_items(batch)

    def num_tokens(self, batch: Batch) -> None:
        """Return None: throughput is of no interest here."""
