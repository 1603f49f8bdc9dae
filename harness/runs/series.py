"""The series of a run: kept on the device and fetched some steps at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from harness.runs.step import StepOutcome

_FLOATS = ("loss", "grad_norm")
_INTS = ("nonfinite_grad", "batches", "dropout")


@dataclass
class SeriesBuffer:
    """Collects what steps leave behind; two transfers per flush, whatever the number of steps."""

    _values: dict[str, list[float]] = field(default_factory=dict)
    _checksums: dict[str, list[int]] = field(default_factory=dict)
    _floats: list[Tensor] = field(default_factory=list)
    _ints: list[Tensor] = field(default_factory=list)
    nonfinite_streak: int = 0

    def add(self, outcome: StepOutcome, *, batch: Tensor) -> None:
        """Add one step; `batch` is the checksum of its batch."""
        self._floats += [outcome.loss, outcome.grad_norm]
        self._ints += [outcome.nonfinite_grad, batch, outcome.masks]
        for name, value in (
            ("learning_rate", outcome.learning_rate),
            ("loss_scale", outcome.loss_scale),
            ("skipped", float(outcome.skipped)),
        ):
            self._values.setdefault(name, []).append(value)

    def add_time(self, seconds: float) -> None:
        """Add the wall time of the step added last."""
        self._values.setdefault("step_time_s", []).append(seconds)

    def flush(self) -> None:
        """Fetch what has been added since the last flush; waits for the device."""
        if self._floats:
            floats = torch.stack(self._floats).tolist()
            ints = torch.stack(self._ints).tolist()
            for i, name in enumerate(_FLOATS):
                self._values.setdefault(name, []).extend(floats[i :: len(_FLOATS)])
            for i, name in enumerate(_INTS):
                self._checksums.setdefault(name, []).extend(ints[i :: len(_INTS)])
            self._count_streak(floats[0 :: len(_FLOATS)])
        self._floats, self._ints = [], []

    def _count_streak(self, losses: list[float]) -> None:
        for loss in losses:
            self.nonfinite_streak = 0 if math.isfinite(loss) else self.nonfinite_streak + 1

    @property
    def last_loss(self) -> float | None:
        """The newest fetched loss."""
        losses = self._values.get("loss")
        return losses[-1] if losses else None

    def series(self) -> dict[str, tuple[float, ...]]:
        """Return the fetched series; a step that ended in an exception has no place in them."""
        counts = self._checksums.get("nonfinite_grad", [])
        values = {**self._values, "nonfinite_grad": [float(n) for n in counts]}
        length = len(self._values.get("loss", ()))
        return {name: tuple(column[:length]) for name, column in values.items()}

    def fetched(self) -> Mapping[str, Sequence[float]]:
        """Return the series as fetched so far, not copied: to be read between two steps."""
        return {**self._values, "nonfinite_grad": self._checksums.get("nonfinite_grad", [])}

    def checksums(self, name: str) -> tuple[int, ...]:
        """Return the fetched checksums `batches` or `dropout`."""
        return tuple(self._checksums.get(name, ()))


def grid_of(losses: tuple[float, ...]) -> str | None:
    """Return `bf16` or `fp16` when every finite loss is exactly a value of that format, else None.

    That many FP32 numbers do not end in zero bits by chance: the loss was computed or rounded in 16
    bits. Fewer than 10 finite values, or one value throughout, say nothing.
    """
    finite = np.array([x for x in losses if math.isfinite(x)], dtype=np.float32)
    if finite.size < 10 or np.unique(finite).size < 2:
        return None
    if not np.any(finite.view(np.uint32) & 0xFFFF):
        return "bf16"
    with np.errstate(over="ignore"):
        rounded = finite.astype(np.float16).astype(np.float32)
    return "fp16" if np.array_equal(rounded, finite) else None
