"""Runs the beginning of a finished run once more and looks closely at the step where it went wrong.

On a CPU the replay is bitwise the run; whether it gave the same losses is part of what it returns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.precision.execution import Execution, applied, fp32_weights
from harness.precision.magnitude import floating_tensors, magnitude
from harness.precision.module_calls import ModuleCalls
from harness.precision.module_names import ROOT, owner
from harness.precision.policy import PrecisionPolicy
from harness.precision.undisturbed import undisturbed
from harness.probes.triage import Evidence, OpEvent, Pass, Trouble
from harness.probes.triage_places import is_layer_output
from harness.runs.determinism import (
    deterministic,
    preserved_random_state,
    seed_torch,
    stream_seed,
)
from harness.runs.dropout import MaskRecorder
from harness.runs.loop import TrainingRun
from harness.runs.record import RunRecord
from harness.runs.settings import ProbeSettings, Progress, RunSettings
from harness.runs.triage.op_trace import OpKey, OpTrace
from harness.workloads.base import Workload
from harness.workloads.batches import iter_tensors, to_device


class _ReachedError(Exception):
    """The step in question has been looked at; the rest of the run is of no interest."""


class ReplayedRun(TrainingRun):
    """A run that stops at the step where the trouble of its first time began.

    Attributes:
        evidence: What was seen at that step; None if the replay ended before.
        bad_at: Step after which weights or buffers were first non-finite, and which; None where
            that was not looked for or did not happen.
        moved: Parameter or buffer -> share of its elements that differ from their start, in the
            model's order, where that is the question.
    """

    def __init__(
        self,
        workload: Workload,
        policy: PrecisionPolicy,
        settings: RunSettings,
        *,
        record: RunRecord,
        trouble: Trouble,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        quiet = dataclasses.replace(
            settings, probes=ProbeSettings.off(), tail_evaluations=1, max_nonfinite_streak=10**9
        )
        super().__init__(workload, policy, quiet, on_progress)
        self._record, self._trouble = record, trouble
        self._earlier_batch_max: float | None = None
        self._start: dict[str, Tensor] = {}
        self._first_weights_max = 0.0
        self.evidence: Evidence | None = None
        self.bad_at: tuple[int, tuple[str, ...]] | None = None
        self.moved: dict[str, float] = {}

    def _evaluate(self, model: nn.Module, points: tuple[int, ...], *, done: int) -> None:
        """Evaluations change nothing in training; a replay leaves them out."""

    def _one_step(self, batch: Any, step: int, masks: MaskRecorder) -> None:
        assert self.model is not None
        trigger = self._trouble.trigger
        if step == 0:
            self._start = {name: t.detach().clone() for name, t in _state(self.model)}
            self._first_weights_max = _largest(self.model.parameters())
        if trigger in ("nonfinite_buffers", "nonfinite_weights"):
            self._until_non_finite(batch, step, masks)
            return
        if trigger != "unmoved_weights" and step == self._trouble.step:
            self._look(batch, step)
            raise _ReachedError
        super()._one_step(batch, step, masks)
        self._remember(batch)
        if trigger == "unmoved_weights" and step == self._trouble.step:
            start = self._start
            self.moved = {
                name: _changed_share(t.detach(), start[name])
                for name, t in _state(self.model)
                if t.numel() and name in start
            }
            raise _ReachedError

    def _until_non_finite(self, batch: Any, step: int, masks: MaskRecorder) -> None:
        """Make a step; if it spoils weights or buffers, look at it from the state before it."""
        assert self.model is not None
        suspect = step in self._trouble.suspects
        before = [(t, t.detach().clone()) for _, t in _state(self.model)] if suspect else []
        own = to_device(batch, torch.device(self.settings.device)) if suspect else None
        super()._one_step(batch, step, masks)
        bad = _non_finite_names(self.model)
        if bad:
            self.bad_at = (step, bad)
            if suspect:
                with torch.no_grad():
                    for tensor, value in before:
                        tensor.copy_(value)
                self._look(own, step)
            raise _ReachedError
        self._remember(batch)

    def _remember(self, batch: Any) -> None:
        size = _largest(iter_tensors(batch))
        if math.isfinite(size):
            self._earlier_batch_max = max(size, self._earlier_batch_max or 0.0)

    def _look(self, batch: Any, step: int) -> None:
        """Trace the step's forward and backward pass, under the policy and in FP32."""
        assert self.model is not None
        assert self.execution is not None
        model, record = self.model, self._record
        scales = record.series.get("loss_scale", ())
        scale = scales[step] if step < len(scales) else 1.0
        self.series.flush()
        losses = self.series.series().get("loss", ())
        here = StepAgain(self.workload, model, batch, step=step, settings=self.settings)
        with undisturbed(model):
            low, magnitudes = here.traced(self.execution, scale=scale)
            bad_buffers = tuple(n for n, b in model.named_buffers() if not _finite(b))
        fp32, wide = None, magnitudes
        if not self.policy.computes_in_fp32 or self.policy.param_format != "fp32":
            fp32, wide = here.in_fp32(scale=scale)
        unscaled = None
        if scale != 1.0 and any(e.direction == "backward" for e in low.events):
            with undisturbed(model):
                unscaled = here.traced(self.execution, scale=1.0)[0].gradient_finite
        batch_tensors = [t for t in iter_tensors(batch) if t.is_floating_point() or t.is_complex()]
        rates = record.series.get("learning_rate", ())
        self.evidence = Evidence(
            step=step,
            reproduced=_same(losses[:step], record.series["loss"][:step])
            and _same((low.loss,), record.series["loss"][step : step + 1]),
            scale=scale,
            has_scaler=self.policy.loss_scale.kind != "none",
            learning_rate=rates[step] if step < len(rates) else math.nan,
            batch_max=_largest(batch_tensors) if batch_tensors else None,
            earlier_batch_max=self._earlier_batch_max,
            weights_max=_largest(model.parameters()),
            first_weights_max=self._first_weights_max,
            bad_weights=_owners_of_non_finite(model),
            first_loss=losses[0] if losses else None,
            low=_with_fp32(low, magnitudes, wide, model),
            fp32=fp32,
            unscaled_finite=unscaled,
            bad_buffers=bad_buffers,
        )


class StepAgain:
    """One step's forward and backward pass, repeated at its weights, batch and random state."""

    def __init__(
        self, workload: Workload, model: nn.Module, batch: Any, *, step: int, settings: RunSettings
    ) -> None:
        self._workload, self._model, self._batch = workload, model, batch
        self._device = torch.device(settings.device)
        self._seed = stream_seed(settings.seed, stream="step", index=step)

    def traced(
        self, execution: Execution, *, scale: float
    ) -> tuple[Pass, list[tuple[OpKey, OpEvent | float]]]:
        """Return what one pass gave, and the magnitude of every op's result.

        Gradients left on the parameters are gone on return.
        """
        trace = OpTrace(ModuleCalls(), execution)
        batch = to_device(self._batch, self._device)  # a loss may change its batch
        seed_torch(self._seed, self._device)
        try:
            with trace.watching(self._model):
                with execution.forward():
                    loss = self._workload.loss_fn(self._model, batch)
                scaled = loss * scale if scale != 1.0 else loss
                scaled.backward()  # type: ignore[no-untyped-call]
            result = self._pass(trace, float(loss.detach().float()))
        finally:
            for parameter in self._model.parameters():
                parameter.grad = None
        keyed: list[tuple[OpKey, OpEvent | float]] = [*trace.events]
        keyed += trace.magnitudes.items()
        return result, keyed

    def in_fp32(self, *, scale: float) -> tuple[Pass, list[tuple[OpKey, OpEvent | float]]]:
        """Return the same for FP32, from the values that the weights have now."""
        policy = PrecisionPolicy(name="fp32")
        with (
            fp32_weights(self._model),
            undisturbed(self._model),
            applied(policy, self._model, device=self._device) as execution,
        ):
            return self.traced(execution, scale=scale)

    def _pass(self, trace: OpTrace, loss: float) -> Pass:
        zeros, finite = {}, True
        for name, module in self._model.named_modules():
            gradients = [
                t
                for p in module.parameters(recurse=False)
                if p.grad is not None
                for t in floating_tensors((p.grad,))
                if t.numel()
            ]
            if gradients:
                dense = [g.to_dense() if g.layout is not torch.strided else g for g in gradients]
                nonzero = sum(int(torch.count_nonzero(g)) for g in dense)
                zeros[name or ROOT] = 1.0 - nonzero / sum(g.numel() for g in dense)
                finite = finite and all(map(_finite, dense))
        return Pass(
            loss=loss,
            gradient_finite=finite,
            zero_shares=zeros,
            outputs=trace.outputs,
            events=tuple(event for _, event in trace.events),
            passed_on=trace.passed_on,
            first_nan=trace.first_nan,
        )


def replay(
    workload: Workload,
    policy: PrecisionPolicy,
    settings: RunSettings,
    *,
    record: RunRecord,
    trouble: Trouble,
    on_progress: Callable[[Progress], None] | None = None,
) -> ReplayedRun:
    """Run again up to the trouble, with the same seed, probes off, and return what was seen.

    Global state of the process is as before on return. What the workload's own code raises passes
    through.
    """
    run = ReplayedRun(
        workload, policy, settings, record=record, trouble=trouble, on_progress=on_progress
    )
    device = torch.device(settings.device)
    with preserved_random_state(device), deterministic(settings.num_threads, run.notes):
        with _until_reached():
            run.train(device)
    return run


@contextmanager
def _until_reached() -> Iterator[None]:
    try:
        yield
    except _ReachedError:
        pass


def _with_fp32(
    low: Pass,
    ours: Sequence[tuple[OpKey, OpEvent | float]],
    theirs: Sequence[tuple[OpKey, OpEvent | float]],
    model: nn.Module,
) -> Pass:
    """Add to each event what FP32 has at the same place, and whether it is a layer's product."""
    events = [(key, event) for key, event in ours if isinstance(event, OpEvent)]
    wide = {key: size for key, size in theirs if isinstance(size, float)}
    leaves = {name for name, module in model.named_modules() if not any(module.children())}

    def told(event: OpEvent, key: OpKey | None = None) -> OpEvent:
        return dataclasses.replace(
            event,
            fp32_max=None if ours is theirs or key is None else wide.get(key),
            is_layer=event.module in leaves and is_layer_output(event.op),
        )

    return dataclasses.replace(
        low,
        events=tuple(told(event, key) for key, event in events),
        passed_on=None if low.passed_on is None else told(low.passed_on),
        first_nan=None if low.first_nan is None else told(low.first_nan),
    )


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _changed_share(tensor: Tensor, start: Tensor) -> float:
    same = tensor.shape == start.shape
    return int(torch.count_nonzero(tensor != start)) / tensor.numel() if same else 1.0


def _largest(tensors: Any) -> float:
    sizes = [float(magnitude(t)) for t in tensors if t.is_floating_point() or t.is_complex()]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)


def _finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return math.isfinite(float(magnitude(tensor)))


def _non_finite_names(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, tensor in _state(model) if not _finite(tensor))


def _owners_of_non_finite(model: nn.Module) -> tuple[str, ...]:
    names = (n for n, p in model.named_parameters() if not _finite(p))
    return tuple(dict.fromkeys(owner(name) for name in names))


def _same(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    return len(ours) == len(theirs) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(ours, theirs, strict=True)
    )
