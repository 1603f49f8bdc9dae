"""The same-point probe: candidates' gradients and updates along the FP32 run of one seed.

The run is trained once more up to each point. There every candidate makes the same steps beside it
from the same weights, and what differs from FP32's steps is rounding alone, not where training
went. The run itself goes on as if nobody had looked, which its losses prove.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from harness.precision.policy import PrecisionPolicy
from harness.probes.gradient_error import batches_that_fit
from harness.runs.crash import Position, describe_crash
from harness.runs.determinism import deterministic, preserved_random_state, stream_seed
from harness.runs.loop import TrainingRun
from harness.runs.same_point.batches import ProbeBatches, probe_batches
from harness.runs.same_point.bench import Bench
from harness.runs.same_point.candidate import (
    ReferencePoint,
    candidate_point,
    reference_point,
    resolved_parameters,
)
from harness.runs.same_point.module_errors import ModuleErrors
from harness.runs.same_point.record import Point, SamePointRecord
from harness.runs.same_point.settings import KnownRun, SamePointSettings
from harness.runs.same_point.state_now import StateNow, without_gradients
from harness.runs.settings import RunSettings
from harness.runs.step import needs_closure
from harness.workloads.base import Workload

MEMORY_LIMIT_BYTES = 2 << 30

# (done, total, what is being measured)
OnProgress = Callable[[int, int, str], None]

_NOT_REPEATED = "The FP32 run could not be repeated"


def measure_same_point(
    workload: Workload,
    candidates: Sequence[PrecisionPolicy],
    settings: RunSettings,
    *,
    reference: PrecisionPolicy,
    probe: SamePointSettings,
    known: KnownRun,
    loss_scales: Mapping[str, Sequence[float]] | None = None,
    workloads: Mapping[str, Workload] | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, SamePointRecord]:
    """Measure every candidate along the reference's run; return a record for each, by name.

    What goes wrong becomes a record's `failed`. Random state, threads, switches and kernels of the
    process are as before on return.

    Args:
        workload: The model.
        candidates: Policies to compare with the reference.
        settings: Of the reference's run: steps, seed, device, threads, backend.
        reference: Plain FP32.
        probe: Points and batches.
        known: What is stored of that run.
        loss_scales: Policy name -> its own run's loss scale per step, where its scaler starts from
            if it is larger than the policy's first scale.
        workloads: Policy name -> the workload whose loss and optimizer that candidate uses, on the
            model of `workload`, whose weights it must have; by default `workload` itself.
        on_progress: Told after every candidate and point.
    """
    device = torch.device(settings.device)
    visits = _Visits(
        workload, candidates, settings, probe=probe, known=known, loss_scales=loss_scales or {}
    )
    visits.workloads = workloads or {}
    visits.on_progress = on_progress
    run = visits.run = TrainingRun(workload, reference, settings, None, on_step=visits)
    failure = None
    try:
        with preserved_random_state(device), deterministic(settings.num_threads, run.notes):
            run.train(device)
            run.series.flush()
    except Exception as error:  # noqa: BLE001 - a model that raises has no measurement
        report = describe_crash(error, position=run.position, model=run.model)
        what = "FP32's steps beside the run raised" if visits.is_looking else _NOT_REPEATED
        failure = f"{what}: {report.sentence}"
    if failure is None and not visits.is_complete:
        failure = "The FP32 run ended before the last point."
    return visits.records(failure)


@dataclass
class _Found:
    """What has been measured of one candidate so far."""

    points: list[Point] = field(default_factory=list)
    modules: ModuleErrors | None = None
    failed: str | None = None
    seconds: float = 0.0


class _Visits:
    """Stops at the points of a run and measures there."""

    run: TrainingRun
    on_progress: OnProgress | None = None
    workloads: Mapping[str, Workload]

    def __init__(
        self,
        workload: Workload,
        candidates: Sequence[PrecisionPolicy],
        settings: RunSettings,
        *,
        probe: SamePointSettings,
        known: KnownRun,
        loss_scales: Mapping[str, Sequence[float]],
    ) -> None:
        self._workload, self._settings, self._probe = workload, settings, probe
        self._candidates, self._known, self._loss_scales = candidates, known, loss_scales
        self._stops = probe.steps(settings.steps)
        self._device = torch.device(settings.device)
        self._found = {policy.name: _Found() for policy in candidates}
        self._batches: ProbeBatches | None = None
        self._notes: list[str] = []
        self._done = 0
        self.is_complete = self.is_looking = False

    def __call__(self, done: int) -> bool:
        """Measure if `done` completed steps are a point; return whether it was the last."""
        if done not in self._stops:
            return False
        self.run.position.doing = "at a point of the same-point probe"
        self.is_looking = True
        with preserved_random_state(self._device):
            self._visit(done)
        self.is_looking = False
        self.is_complete = done == self._stops[-1]
        return self.is_complete

    def _visit(self, done: int) -> None:
        model, step = self.run.model, self.run.training_step
        assert model is not None
        assert step is not None
        if needs_closure(step.optimizer):
            for found in self._found.values():
                found.failed = (
                    f"Not applicable: {type(step.optimizer).__name__} evaluates several gradients "
                    "per step, so there is none to compare."
                )
            return
        state = StateNow.of(model, step.optimizer)
        if self._batches is None:
            self._batches = self._draw_batches(state)
        factor = self._final_factor(state) if done == self._stops[-1] else None
        with without_gradients(state):
            self._measure(self._reference_point(state, done, factor))

    def _final_factor(self, state: StateNow) -> float | None:
        """Return the final learning rate over the one now; None where there is none."""
        final, now = self._known.final_rate, state.learning_rate
        if final is None or not now > 0:
            self._note("the final learning rate was not tested: the run has no known rate")
            return None
        return final / now

    def _reference_point(self, state: StateNow, done: int, factor: float | None) -> ReferencePoint:
        assert self.run.execution is not None
        num_weights = sum(p.numel() for p in state.parameters)
        limit = self._probe.fp64_max_parameters
        if num_weights > limit:
            self._note(f"no comparison with FP64: {num_weights:,} weights, more than {limit:,}")
        point = reference_point(
            self._bench(),
            state,
            step=done,
            rate_factor=factor,
            policy=self.run.policy,
            execution=self.run.execution,
            wants_truth=num_weights <= limit,
        )
        if point.no_truth is not None:
            self._note(f"no comparison with FP64: {point.no_truth}")
        if not all(resolved_parameters(point)):
            self._note(
                "some parameters (biases that a normalization cancels, say) are left out of the "
                "retention: FP64 shows that their FP32 gradient is nothing but rounding noise"
            )
        if point.local.is_partial:
            self._note("some modules have no local error: their inputs take too much memory")
        return point

    def _measure(self, reference: ReferencePoint) -> None:
        for policy in self._candidates:
            found = self._found[policy.name]
            if found.failed is None:
                started = time.perf_counter()
                self._measure_one(policy, found, reference)
                found.seconds += time.perf_counter() - started
            self._report(policy.name)

    def _measure_one(
        self, policy: PrecisionPolicy, found: _Found, reference: ReferencePoint
    ) -> None:
        position = Position(step=reference.step)
        model = reference.state.model
        try:
            new = candidate_point(
                self._bench(),
                reference,
                policy,
                position=position,
                first_scale=self._scale_of(policy.name, reference.step),
                workload=self.workloads.get(policy.name),
            )
        except Exception as error:  # noqa: BLE001 - a candidate that raises has no measurement
            found.failed = describe_crash(error, position=position, model=model).sentence
            return
        found.points += new.points
        if found.modules is None:
            found.modules = ModuleErrors(model, reference.state.parameters)
        found.modules.add_gradients(new.gradients)
        found.modules.add_local(new.local)
        if new.truth is not None:
            found.modules.add_truth(new.truth)

    def _bench(self) -> Bench:
        assert self._batches is not None
        assert self.run.training_step is not None
        return Bench(
            workload=self._workload,
            batches=self._batches.batches,
            device=self._device,
            backend=self._settings.backend,
            masks=self.run.training_step.masks,
            seed=stream_seed(self._settings.seed, stream="same_point"),
        )

    def _scale_of(self, policy: str, done: int) -> float | None:
        series = self._loss_scales.get(policy, ())
        return series[min(done, len(series) - 1)] if series else None

    def _draw_batches(self, state: StateNow) -> ProbeBatches:
        num_weights = sum(p.numel() for p in state.parameters)
        wanted = self._probe.batches
        count = batches_that_fit(num_weights, wanted=wanted, limit_bytes=MEMORY_LIMIT_BYTES)
        if count < wanted:
            self._note(
                f"{count} batches instead of {wanted}: the gradients of more do not fit in "
                f"{MEMORY_LIMIT_BYTES >> 30} GiB"
            )
        drawn = probe_batches(
            self._workload,
            seed=self._settings.seed,
            steps=self._settings.steps,
            count=count,
            device=self._device,
            trained_on=self._known.batches,
        )
        self._notes += drawn.notes
        return drawn

    def _note(self, sentence: str) -> None:
        if sentence not in self._notes:
            self._notes.append(sentence)

    def _report(self, policy: str) -> None:
        self._done += 1
        if self.on_progress is not None:
            total = len(self._stops) * len(self._candidates)
            self.on_progress(self._done, total, policy)

    def records(self, failure: str | None) -> dict[str, SamePointRecord]:
        """Return what was measured; with `failure` no candidate counts as measured."""
        losses = self.run.series.series().get("loss", ())
        known = self._known.losses[: len(losses)]
        # Bits, not values: equal NaN are equal, and a different zero is not.
        same = _bits(losses) == _bits(known) if known else None
        return {
            policy.name: self._record(policy, failure=failure, same_trajectory=same)
            for policy in self._candidates
        }

    def _record(
        self, policy: PrecisionPolicy, *, failure: str | None, same_trajectory: bool | None
    ) -> SamePointRecord:
        found = self._found[policy.name]
        failed = failure or found.failed
        batches = self._batches
        num_batches = self._probe.batches if batches is None else len(batches.batches)
        modules = found.modules
        return SamePointRecord(
            workload=self._workload.name,
            policy=policy.name,
            policy_content=policy.content(),
            seed=self._settings.seed,
            num_batches=num_batches,
            points=() if failed else tuple(found.points),
            modules=() if failed or modules is None else modules.rows(num_batches=num_batches),
            unseen=True if batches is None else batches.unseen,
            same_trajectory=same_trajectory,
            failed=failed,
            notes=tuple(self._notes),
            seconds=found.seconds,
        )


def _bits(values: Sequence[float]) -> bytes:
    return torch.tensor(values, dtype=torch.float64).numpy().tobytes()
