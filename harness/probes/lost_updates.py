"""Lost updates: the optimizer wants to change a weight and its format cannot hold the change.

Result layout::

    {"steps": [...], "view": "what_if" | "observed",
     "modules": {module: {"updates": [...], "lost_bf16": [...], "lost_fp16": [...],
                          "retained_nearest_bf16": [...], "retained_stochastic_bf16": [...]}}}

with one value per step. *What-if* looks at FP32 weights: `dw` is the update that the run made, `w`
the weight before it rounded to the format, and the update is lost if `w + dw` rounds back to `w`.
*Observed* looks at 16-bit weights: the gradient is not zero and the weight is what it was; the
update that was wanted is not known, so nothing is said about retention. Values are None where there
is nothing to say; a step that a loss scaler skipped has zero updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.probes.base import Metric, NamedTensor, StepProbe
from harness.probes.named_tensors import columns_of
from harness.probes.update_rows import COLUMNS, Piece, observed_rows, pieces, what_if_rows

_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Seen:
    """Weights before the update: their indices among the parameters, and flat copies."""

    piece: Piece
    indices: list[int]
    old: Tensor
    gradient: Tensor | None


class LostUpdatesProbe(StepProbe):
    """Counts, by module, weight updates that 16-bit storage loses."""

    name = "lost_updates"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "updates": Metric(
            unit="count", description="Updates that are not zero; observed: non-zero gradients."
        ),
        "lost_bf16": Metric(
            unit="count", description="Of these, updates that leave a BF16 weight as it is."
        ),
        "lost_fp16": Metric(
            unit="count", description="Of these, updates that leave an FP16 weight as it is."
        ),
        "retained_nearest_bf16": Metric(
            unit="share",
            description="Change of BF16 weights rounded to nearest, in the direction of the "
            "updates: sum(sign(dw) * change) / sum(|dw|).",
        ),
        "retained_stochastic_bf16": Metric(
            unit="share",
            description="The same, expected under stochastic rounding: 1, since BF16 has the "
            "range of FP32.",
            source="Gupta et al. 2015, section 3: stochastic rounding has no bias",
        ),
    }

    def __init__(self, *, every: int, num_steps: int) -> None:
        super().__init__(every=every, num_steps=num_steps)
        self._step = 0
        self._seen: list[_Seen] = []
        # Per step: the module and the row of each piece.
        self._waiting: list[tuple[int, list[str], list[Tensor]]] = []
        self._steps: list[int] = []
        self._columns: dict[str, dict[str, list[float | None]]] = {}
        self._totals: list[tuple[float, float]] = []
        self._formats: set[torch.dtype] = set()

    def start(self, step: int, *, loss_scale: float) -> None:
        """Begin a step."""
        del loss_scale
        self._step = step

    def before_update(self, parameters: Sequence[NamedTensor]) -> None:
        """Keep the weights just before the update, and what their gradients are."""
        modules, values = columns_of(parameters)
        self._formats |= {value.dtype for value in values}
        self._seen = []
        if not self._observed:
            self._keep([k for k, v in enumerate(values) if v.dtype in _WIDE], modules, values)
            return
        # Now: an optimizer may write into a gradient.
        gradients = [_gradient(named.source) for named in parameters]
        for dtype in _NARROW:
            chosen = [
                index
                for index, (value, gradient) in enumerate(zip(values, gradients, strict=True))
                if value.dtype is dtype and gradient is not None
            ]
            self._keep(
                chosen, modules, values, [g for k in chosen if (g := gradients[k]) is not None]
            )

    def _keep(
        self,
        chosen: list[int],
        modules: Sequence[str],
        values: Sequence[Tensor],
        gradients: Sequence[Tensor] | None = None,
    ) -> None:
        owners = tuple(modules[k] for k in chosen)
        sizes = tuple(values[k].numel() for k in chosen)
        weights = [values[k] for k in chosen]
        for piece in pieces(owners, sizes):
            gradient = None if gradients is None else piece.joined(gradients)
            self._seen.append(_Seen(piece, chosen, piece.joined(weights), gradient))

    def after_update(self, parameters: Sequence[NamedTensor], *, skipped: bool) -> None:
        """Count what became of the updates."""
        names = [name for seen in self._seen for name in seen.piece.modules]
        _, values = columns_of(parameters)
        rows = []
        for seen in [] if skipped else self._seen:
            new = seen.piece.joined([values[index] for index in seen.indices])
            sizes = seen.piece.sizes
            if seen.gradient is None:
                rows.append(what_if_rows(seen.old, new, sizes=sizes))
            else:
                rows.append(observed_rows(seen.old, new, seen.gradient, sizes=sizes))
        if skipped:
            rows = [torch.zeros(len(names), len(COLUMNS))]
        self._seen = []
        self._waiting.append((self._step, names, rows))

    def flush(self) -> None:
        """Fetch the counts of all steps that ended."""
        parts = [row for _, _, rows in self._waiting for row in rows]
        fetched = torch.cat([p.to(parts[0].device) for p in parts]).cpu() if parts else None
        start = 0
        for step, names, _ in self._waiting:
            sums: dict[str, NDArray[np.float64]] = {}
            if fetched is not None:
                rows = fetched[start : start + len(names)].double().numpy()
                for name, row in zip(names, rows, strict=True):
                    sums[name] = sums[name] + row if name in sums else row
            start += len(names)
            self._add_step(step, sums)
        self._waiting = []

    def result(self) -> dict[str, Any]:
        """Return the counts by module, one per step."""
        view = "observed" if self._observed else "what_if"
        return {"steps": list(self._steps), "view": view, "modules": dict(self._columns)}

    def sampled(self) -> tuple[tuple[int, ...], dict[str, tuple[float, ...]]]:
        """Return the steps, and `lost_update_bf16` with its denominator `update_total`.

        Without columns where weights are FP16: nothing of them would be kept in BF16.
        """
        if torch.float16 in self._formats:
            return tuple(self._steps), {}
        return tuple(self._steps), {
            "lost_update_bf16": tuple(lost for lost, _ in self._totals),
            "update_total": tuple(total for _, total in self._totals),
        }

    @property
    def _observed(self) -> bool:
        return any(dtype in _NARROW for dtype in self._formats)

    def _add_step(self, step: int, sums: Mapping[str, NDArray[np.float64]]) -> None:
        self._steps.append(step)
        total = sum(sums.values(), start=np.zeros(len(COLUMNS)))
        self._totals.append((float(total[0] - total[1]), float(total[0])))
        for module, row in sums.items():
            columns = self._columns.setdefault(module, {name: [] for name in self.metrics})
            for name, value in self._values(row).items():
                columns[name] += [None] * (len(self._steps) - 1 - len(columns[name]))
                columns[name].append(value)
        for columns in self._columns.values():
            for column in columns.values():
                column += [None] * (len(self._steps) - len(column))

    def _values(self, row: NDArray[np.float64]) -> dict[str, float | None]:
        """Return a module's metrics of one step; None for what the view does not tell."""
        updates, kept_bf16, kept_fp16, size, along = row.tolist()
        knows_bf16 = not self._observed or torch.bfloat16 in self._formats
        knows_fp16 = not self._observed or torch.float16 in self._formats
        retained = not self._observed and 0 < size < math.inf
        return {
            "updates": _whole(updates),
            "lost_bf16": _whole(updates - kept_bf16) if knows_bf16 else None,
            "lost_fp16": _whole(updates - kept_fp16) if knows_fp16 else None,
            "retained_nearest_bf16": _rounded(along / size) if retained else None,
            "retained_stochastic_bf16": 1.0 if retained else None,
        }


def _whole(count: float) -> int | None:
    return int(count) if math.isfinite(count) else None


def _rounded(share: float) -> float:
    return round(share, 6)


def _gradient(parameter: Tensor | None) -> Tensor | None:
    gradient = None if parameter is None else parameter.grad
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
