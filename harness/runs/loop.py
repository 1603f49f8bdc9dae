"""The run itself: model, held-out set, policy, optimizer, then step after step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from harness.precision.audit import audited_step
from harness.precision.audit_result import StepAudit
from harness.precision.execution import Execution, applied
from harness.precision.policy import PrecisionPolicy
from harness.probes.step_probes import StepProbes
from harness.runs.crash import Position
from harness.runs.determinism import (
    Checksum,
    SeparateStream,
    seed_everything,
    stream_seed,
    weights_sha256,
)
from harness.runs.dropout import MaskRecorder, paired_dropout
from harness.runs.held_out import HeldOutEvaluator, evaluation_steps
from harness.runs.phases import Phases
from harness.runs.series import SeriesBuffer
from harness.runs.settings import Progress, RunSettings
from harness.runs.step import TrainingStep
from harness.runs.weights import cpu_copies, final_state, perturb_
from harness.workloads.base import Workload
from harness.workloads.batches import iter_tensors, leading_size, to_device

FLUSH_EVERY = 25
# Given the series so far, returns why the run need not go on, or None.
EndedBy = Callable[[Mapping[str, Sequence[float]]], str | None]
_PROGRESS_EVERY_S = 0.25


class TrainingRun:
    """The state of one run while it goes on."""

    def __init__(
        self,
        workload: Workload,
        policy: PrecisionPolicy,
        settings: RunSettings,
        on_progress: Callable[[Progress], None] | None,
        *,
        on_step: Callable[[int], bool] | None = None,
        ended_by: EndedBy | None = None,
    ) -> None:
        # Called with the number of completed steps, between two of them; true ends the run.
        self.on_step = on_step
        # Called after a fetch of the series, which costs no wait of its own.
        self.ended_by = ended_by
        self.ended_early: str | None = None
        self.workload, self.policy, self.settings = workload, policy, settings
        self.position = Position()
        self.notes: set[str] = set()
        self.model: nn.Module | None = None
        self._on_progress = on_progress
        self._reported = 0.0
        self.init_sha256 = ""
        self.series = SeriesBuffer()
        chosen = settings.probes.chosen(settings.steps)
        self.probes = StepProbes(chosen, num_steps=settings.steps)
        self.evaluator: HeldOutEvaluator | None = None
        self.execution: Execution | None = None
        self.audit = StepAudit()
        self.audit_result: dict[str, Any] | None = None
        self.final: dict[str, float] = {}
        self.training_step: TrainingStep | None = None
        self.samples: float | None = None
        self.tokens: float | None = None
        self.stopped_early = False

    def train(self, device: torch.device) -> None:
        """Run from the first weights to the last evaluation."""
        workload, seed = self.workload, self.settings.seed
        self.position.doing = "while building the model"
        seed_everything(stream_seed(seed, stream="model"), device)
        model = self.model = workload.build_model(seed)
        if not model.training:
            model.train()
        self.init_sha256 = weights_sha256(model)
        perturb_(model, self.policy.perturbation, seed=stream_seed(seed, stream="perturbation"))
        model.to(device)
        self.position.doing = "while reading the held-out set"
        self.evaluator = HeldOutEvaluator(workload, seed=seed, device=device, built=model)
        with ExitStack() as stack:
            masks = stack.enter_context(paired_dropout(device))
            batches = self._batches(device)
            self.position.doing = "while reading the first batch"
            first = next(batches)
            self.samples, tokens = leading_size(first), workload.num_tokens(first)
            self.tokens = None if tokens is None else float(tokens)
            self.position.doing = "while applying the policy"
            self.execution = stack.enter_context(
                applied(
                    self.policy,
                    model,
                    device=device,
                    backend=self.settings.backend,
                    trace_forward=lambda: workload.loss_fn(model, to_device(first, device)),
                    paused=masks.paused,
                )
            )
            start = cpu_copies(model)
            self._loop(model, first, batches, masks, device)
            for name, value in self.execution.changed_switches().items():
                self.notes.add(f"code of the workload set the backend switch {name} to {value}")
            self.final = final_state(model, start)

    def _batches(self, device: torch.device) -> Iterator[Any]:
        """Yield batches on the device, drawn with a random stream of their own."""
        settings = self.settings
        stream = SeparateStream(seed=stream_seed(settings.seed, stream="data"), device=device)
        with stream:
            iterator = iter(self.workload.batches(settings.seed, settings.steps))
        for step in range(settings.steps):
            with stream:
                try:
                    batch = next(iterator)
                except StopIteration:
                    raise ValueError(
                        f"the batch iterator ended after {step} of {settings.steps} batches"
                    ) from None
            yield to_device(batch, device)

    def _loop(
        self,
        model: nn.Module,
        first: Any,
        batches: Iterator[Any],
        masks: MaskRecorder,
        device: torch.device,
    ) -> None:
        settings, workload = self.settings, self.workload
        assert self.execution is not None
        self.position.doing = "while making the optimizer"
        seed_everything(stream_seed(settings.seed, stream="optimizer"), device)
        optimizer = workload.make_optimizer(model)
        scheduler = workload.make_scheduler(optimizer, settings.steps)
        self.training_step = TrainingStep(
            workload,
            model,
            optimizer=optimizer,
            scheduler=scheduler,
            policy=self.policy,
            execution=self.execution,
            masks=masks,
            seed=settings.seed,
            position=self.position,
        )
        self.training_step.phases = Phases(device, enabled=settings.mark_phases)
        self.probes.attach(model, optimizer, self.training_step.parameters)
        points = evaluation_steps(settings.steps, settings.tail_evaluations)
        self._evaluate(model, points, done=0)
        for step in range(settings.steps):
            started = time.perf_counter()
            self.position.step, self.position.doing = step, "while reading the batch"
            batch = first if step == 0 else next(batches)
            self._one_step(batch, step, masks)
            first = batch = None
            self.series.add_time(time.perf_counter() - started)
            self._report_progress(step + 1)
            if self._decided(step + 1):
                return
            if self.series.nonfinite_streak >= settings.max_nonfinite_streak:
                self.stopped_early = True
                return
            self._evaluate(model, points, done=step + 1)
            if self.on_step is not None and self.on_step(step + 1):
                return

    def _one_step(self, batch: Any, step: int, masks: MaskRecorder) -> None:
        assert self.training_step is not None
        assert self.execution is not None
        last = step + 1 == self.settings.steps
        checksum = Checksum(masks.weights)
        for tensor in iter_tensors(batch):
            checksum.add(tensor)
        batch_sum = checksum.value()  # before the step, which may write into its batch
        observer = self.probes if self.probes.due(step) else None
        if step == 0:
            assert self.model is not None
            with audited_step(self.execution, self.model) as self.audit:
                outcome = self.training_step.run(batch, step=step, observer=observer)
            self.audit_result = self.audit.result()
        else:
            outcome = self.training_step.run(batch, step=step, observer=observer)
        self.series.add(outcome, batch=batch_sum)
        if last or (step + 1) % FLUSH_EVERY == 0:
            self.series.flush()
            self.probes.flush()

    def _decided(self, done: int) -> bool:
        """Return whether the run ends here because nothing can change what is concluded of it."""
        fetched = done % FLUSH_EVERY == 0 and done < self.settings.steps
        if self.ended_by is not None and fetched:
            self.ended_early = self.ended_by(self.series.fetched())
        return self.ended_early is not None

    def _evaluate(self, model: nn.Module, points: tuple[int, ...], *, done: int) -> None:
        if done in points and self.evaluator is not None:
            doing = self.position.doing
            self.position.doing = "while evaluating on held-out data"
            self.evaluator.evaluate(model, step=done)
            self.position.doing = doing

    def _report_progress(self, done: int) -> None:
        now = time.perf_counter()
        if self._on_progress is None:
            return
        if now - self._reported < _PROGRESS_EVERY_S and done != self.settings.steps:
            return
        self._reported = now
        loss = self.series.last_loss
        self._on_progress(Progress(step=done, steps=self.settings.steps, loss=loss))

    def flush_quietly(self) -> None:
        """Fetch what a crash left on the device, if the device still answers."""
        try:
            self.series.flush()
            self.probes.flush()
        except RuntimeError as error:
            self.notes.add(f"the last steps' series are lost: {str(error).splitlines()[0]}")

    @property
    def loss_dtype(self) -> str:
        """Name of the dtype in which the workload returned its loss."""
        return self.training_step.loss_dtype if self.training_step is not None else "float32"
