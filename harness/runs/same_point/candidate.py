"""One candidate at one point: its gradients and updates beside FP32's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.precision.execution import Execution
from harness.precision.policy import PrecisionPolicy
from harness.precision.undisturbed import undisturbed
from harness.probes.gradient_error import GradientSums, gradient_sums
from harness.runs.crash import Position
from harness.runs.same_point.bench import Bench
from harness.runs.same_point.fp64_gradients import NotInFP64Error, fp64_gradient
from harness.runs.same_point.local_errors import LocalError, LocalErrors
from harness.runs.same_point.module_errors import TruthSums, truth_sums
from harness.runs.same_point.record import Point
from harness.runs.same_point.state_now import StateNow
from harness.runs.same_point.steps_aside import StepsAside
from harness.workloads.base import Workload

# FP32's error relative to FP64 from which its gradient is nothing but rounding noise.
_NOISE_ONLY = 0.5


@dataclass(frozen=True, kw_only=True)
class ReferencePoint:
    """FP32 at one point.

    Attributes:
        step: Completed steps.
        state: Where the run is.
        rate_factor: Final learning rate over the rate here, if updates at it are asked for.
        gradients: Per parameter a (K, n) matrix.
        updates: Likewise.
        updates_at_rate: Likewise, at the final rate.
        local: The recorded forward pass.
        truth: FP64 gradients of the first batch, per parameter.
        no_truth: Why there are none, if that is so although they were asked for.
    """

    step: int
    state: StateNow
    rate_factor: float | None
    gradients: list[Tensor]
    updates: list[Tensor]
    updates_at_rate: list[Tensor] | None
    local: LocalErrors
    truth: list[Tensor] | None = None
    no_truth: str | None = None


def reference_point(
    bench: Bench,
    state: StateNow,
    *,
    step: int,
    rate_factor: float | None,
    policy: PrecisionPolicy,
    execution: Execution,
    wants_truth: bool,
) -> ReferencePoint:
    """Make FP32's steps, record its forward pass, and compute FP64's gradient if it is wanted."""
    steps = bench.steps(state, policy, execution, position=Position(step=step))
    gradients, updates, at_rate = (_Matrices(len(bench.batches)) for _ in range(3))
    for index, made in enumerate(steps.run(bench.batches, rate_factor=rate_factor)):
        gradients.put(index, made.gradients)
        updates.put(index, made.updates)
        at_rate.put(index, made.updates_at_rate or [])
    truth, no_truth = None, None
    if wants_truth:
        try:
            truth = fp64_gradient(
                bench.workload, state, bench.batches[0], seed=bench.seed, device=bench.device
            )
        except NotInFP64Error as error:
            no_truth = str(error)
    return ReferencePoint(
        step=step,
        state=state,
        rate_factor=rate_factor,
        gradients=gradients.of_parameters,
        updates=updates.of_parameters,
        updates_at_rate=None if rate_factor is None else at_rate.of_parameters,
        local=LocalErrors.record(
            state.model, lambda: bench.forward(state, execution), device=bench.device
        ),
        truth=truth,
        no_truth=no_truth,
    )


class _Matrices:
    """Per parameter the matrix of its flat rows, one per batch; filled as they come.

    Stacked at the end, rows and matrices would be held at once: twice the memory.
    """

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self.of_parameters: list[Tensor] = []

    def put(self, index: int, rows: Sequence[Tensor]) -> None:
        if not self.of_parameters:
            self.of_parameters = [row.new_empty(self._num_batches, row.numel()) for row in rows]
        for matrix, row in zip(self.of_parameters, rows, strict=True):
            matrix[index] = row


@dataclass(frozen=True, kw_only=True)
class CandidatePoint:
    """A candidate at one point.

    Attributes:
        points: The sums over the whole model; a second one at the final rate, if asked for.
        gradients: The sums per parameter.
        truth: Distances from FP64 per parameter, where it is known.
        local: Errors by module.
    """

    points: tuple[Point, ...]
    gradients: list[GradientSums]
    truth: list[TruthSums] | None
    local: dict[str, LocalError]


def candidate_point(
    bench: Bench,
    reference: ReferencePoint,
    policy: PrecisionPolicy,
    *,
    position: Position,
    first_scale: float | None,
    workload: Workload | None = None,
) -> CandidatePoint:
    """Make a candidate's steps from the state of the reference and compare.

    Args:
        bench: The reference's.
        reference: FP32 here.
        policy: The candidate's.
        position: Told what is going on.
        first_scale: Loss scale to begin with, if the policy scales.
        workload: Whose loss and optimizer the candidate uses, on the reference's model; None for
            the reference's own.

    Raises:
        Exception: Whatever the model raises under the policy.
    """
    state = reference.state
    if workload is not None:
        bench = dataclasses.replace(bench, workload=workload, is_candidates=True)
    with undisturbed(state.model):
        with bench.in_force(state, policy) as execution:
            steps = bench.steps(
                state, policy, execution, position=position, first_scale=first_scale
            )
            gradients, retained = _compare_steps(steps, bench, reference)
        truth = None
        if reference.truth is not None:
            truth = [
                truth_sums(c[0], f[0], d)
                for c, f, d in zip(gradients, reference.gradients, reference.truth, strict=True)
            ]
        sums = [gradient_sums(c, f) for c, f in zip(gradients, reference.gradients, strict=True)]
        del gradients
        position.doing = "while calling modules one by one"
        local = _local(bench, reference, policy)
    return CandidatePoint(
        points=_points(reference, GradientSums.total(sums), retained),
        gradients=sums,
        truth=truth,
        local=local,
    )


def _points(
    reference: ReferencePoint, total: GradientSums, retained: Sequence[tuple[float, float]]
) -> tuple[Point, ...]:
    """Return the point, and the one at the final rate: the same gradients, other updates."""
    rate = reference.state.learning_rate
    point = Point(
        step=reference.step,
        kind="trajectory",
        learning_rate=rate,
        noise=total.noise,
        mean_gradient_sq=total.mean_gradient_sq,
        error_sq=total.error_sq,
        mean_error_sq=total.mean_error_sq,
        error_noise=total.error_noise,
        cross=total.cross,
        self_cross=total.self_cross,
        retained=retained[0][0],
        updated=retained[0][1],
    )
    if reference.rate_factor is None:
        return (point,)
    at_final = dataclasses.replace(
        point,
        kind="final_rate",
        learning_rate=rate * reference.rate_factor,
        retained=retained[1][0],
        updated=retained[1][1],
    )
    return point, at_final


def _compare_steps(
    steps: StepsAside, bench: Bench, reference: ReferencePoint
) -> tuple[list[Tensor], list[tuple[float, float]]]:
    """Return the candidate's gradients, and by rate the sums of <dw_c, dw_f> and |dw_f|^2."""
    gradients = _Matrices(len(bench.batches))
    resolved = resolved_parameters(reference)
    here, at_final = _Retention(resolved), _Retention(resolved)
    for index, made in enumerate(steps.run(bench.batches, rate_factor=reference.rate_factor)):
        gradients.put(index, made.gradients)
        here.add(made.updates, [whole[index] for whole in reference.updates])
        if made.updates_at_rate is not None and reference.updates_at_rate is not None:
            at_final.add(
                made.updates_at_rate, [whole[index] for whole in reference.updates_at_rate]
            )
    return gradients.of_parameters, [here.sums(), at_final.sums()]


def resolved_parameters(reference: ReferencePoint) -> list[bool]:
    """Return per parameter whether FP32 knows its gradient; all are taken to be without FP64's.

    A bias before a normalization, or of attention's keys, has none: what FP32 computes is its own
    rounding noise. An optimizer that divides by the gradient's size makes whole steps of it, and
    no format repeats them.
    """
    if reference.truth is None:
        return [True] * len(reference.gradients)
    pairs = zip(reference.gradients, reference.truth, strict=True)
    found = []
    for gradients, exact in pairs:
        truth = exact.double().reshape(-1)
        error = gradients[0].double().reshape(-1) - truth
        # NaN is no noise: it has to be seen.
        found.append(not bool(error.norm() > _NOISE_ONLY * truth.norm()))
    return found


class _Retention:
    """Adds up <dw_c, dw_f> and |dw_f|^2 over parameters with a gradient, and over batches."""

    def __init__(self, resolved: Sequence[bool]) -> None:
        self._resolved = resolved
        self._terms: list[Tensor] = []

    def add(self, candidate: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
        for own, whole, counts in zip(candidate, reference, self._resolved, strict=True):
            if not counts:
                continue
            dw_f = whole.double()
            self._terms += [torch.dot(own.double(), dw_f), torch.dot(dw_f, dw_f)]

    def sums(self) -> tuple[float, float]:
        if not self._terms:
            return 0.0, 0.0
        retained, updated = torch.stack(self._terms).reshape(-1, 2).sum(0).tolist()
        return retained, updated


def _local(
    bench: Bench, reference: ReferencePoint, policy: PrecisionPolicy
) -> dict[str, LocalError]:
    """Return the errors by module: handed over, FP32 on the same inputs, the candidate on them."""
    local, state = reference.local, reference.state
    with bench.in_force(state, policy) as execution:
        dtypes = local.handed_over(lambda: bench.forward(state, execution))
    local.prepare(dtypes)
    with bench.in_force(state, policy) as execution:
        if bench.is_candidates:
            # Its loss may leave in the modules (a function that they call) what makes them its own.
            bench.forward(state, execution)
        return local.compare(execution, dtypes)
