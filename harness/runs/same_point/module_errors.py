"""One candidate's errors by module, pooled over the points of the same-point probe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from harness.precision.module_names import ROOT
from harness.probes.gradient_error import GradientSums, measures, own_parameters
from harness.runs.same_point.local_errors import LocalError
from harness.runs.same_point.record import ModuleError


@dataclass(frozen=True, kw_only=True)
class TruthSums:
    """Squared distances of one parameter's gradients from FP64's, in FP64; `+` is over points.

    Attributes:
        candidate: sum |c - d|^2.
        reference: sum |f - d|^2.
        truth: sum |d|^2.
    """

    candidate: float = 0.0
    reference: float = 0.0
    truth: float = 0.0

    def __add__(self, other: TruthSums) -> TruthSums:
        return TruthSums(
            candidate=self.candidate + other.candidate,
            reference=self.reference + other.reference,
            truth=self.truth + other.truth,
        )


def truth_sums(candidate: Tensor, reference: Tensor, truth: Tensor) -> TruthSums:
    """Return the distances of one gradient, flat tensors of one length."""
    return TruthSums(
        candidate=_squares(candidate.double() - truth),
        reference=_squares(reference.double() - truth),
        truth=_squares(truth),
    )


def _squares(x: Tensor) -> float:
    return float(torch.dot(x, x))


class ModuleErrors:
    """Adds up what points find and says it by module.

    Args:
        model: The model.
        parameters: What is measured, in the order of all sums.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        self._kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        owned = own_parameters([names.get(id(p), "") for p in parameters], self._kinds)
        self._owned = {**owned, "": list(range(len(parameters)))}
        self._gradients = [GradientSums() for _ in parameters]
        self._truth: list[TruthSums] | None = None
        self._local: dict[str, LocalError] = {}

    def add_gradients(self, sums: Sequence[GradientSums]) -> None:
        """Add one point's sums, one per parameter."""
        self._gradients = [a + b for a, b in zip(self._gradients, sums, strict=True)]

    def add_truth(self, sums: Sequence[TruthSums]) -> None:
        """Add one point's distances from FP64, one per parameter."""
        known = self._truth or [TruthSums() for _ in sums]
        self._truth = [a + b for a, b in zip(known, sums, strict=True)]

    def add_local(self, found: Mapping[str, LocalError]) -> None:
        """Keep the larger of what is known and what one point found."""
        for name, new in found.items():
            old = self._local.get(name)
            self._local[name] = new if old is None else _larger(old, new)

    def rows(self, *, num_batches: int) -> tuple[ModuleError, ...]:
        """Return the whole model first, then modules in the model's order."""
        return tuple(
            self._row(name, kind, num_batches=num_batches) for name, kind in self._kinds.items()
        )

    def _row(self, name: str, kind: str, *, num_batches: int) -> ModuleError:
        label = name or ROOT
        own = self._owned[name]
        local = self._local.get(label)
        found = measures(
            GradientSums.total(self._gradients[i] for i in own), num_batches=num_batches
        )
        truth = TruthSums()
        for index in own if self._truth is not None else []:
            assert self._truth is not None
            truth += self._truth[index]
        return ModuleError(
            module=label,
            kind=kind,
            local_forward_error=None if local is None else local.error,
            local_output_max=None if local is None else local.output_max,
            integer_input_max=None if local is None else local.integer_input_max,
            fp64_error=_ratio(truth.candidate, truth.truth),
            fp32_fp64_error=_ratio(truth.reference, truth.truth),
            **asdict(found),
        )


def _ratio(error_sq: float, truth_sq: float) -> float | None:
    if not truth_sq > 0:
        return None
    return math.sqrt(error_sq / truth_sq) if error_sq >= 0 else math.nan


def _larger(a: LocalError, b: LocalError) -> LocalError:
    return LocalError(
        error=_max(a.error, b.error),
        output_max=_max(a.output_max, b.output_max),
        integer_input_max=_max(a.integer_input_max, b.integer_input_max),
    )


def _max(a: float | None, b: float | None) -> float | None:
    known = [x for x in (a, b) if x is not None]
    # A NaN stays: `max` would drop or keep it by its place.
    return next((x for x in known if math.isnan(x)), max(known, default=None))
