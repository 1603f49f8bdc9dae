"""From sizes measured on the device to columns by module and metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from harness.probes.tensor_sizes import Floats, Layout, Measured, ModuleSizes, by_module

# Of the numbers stored: more would be noise of the sums, and records of every step are long.
_SIGNIFICANT_DIGITS = 6


@dataclass(kw_only=True)
class SeenStep:
    """What one step showed.

    Attributes:
        step: Batch index.
        sizes: `weight`, `grad`, `update`, `input`, `output` -> what was measured of them; None or
            absent without any.
        logits: Module and largest attention logit, 0-dim on the device.
        skipped: Whether the optimizer did not run: the update is zero.
        complete: Whether the step came to its end.
    """

    step: int
    sizes: dict[str, Measured | None] = field(default_factory=dict)
    logits: list[tuple[str, Tensor]] = field(default_factory=list)
    skipped: bool = False
    complete: bool = False

    def on_cpu(self) -> SeenStep:
        """Return the same with its numbers off the device; waits for it."""
        return replace(
            self,
            sizes={kind: m if m is None else m.on_cpu() for kind, m in self.sizes.items()},
            logits=[(module, largest.cpu()) for module, largest in self.logits],
        )


class NormColumns:
    """Module -> metric -> one value per step.

    Attributes:
        steps: Batch indices of the steps added so far.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._values: dict[str, dict[str, list[float | None]]] = {}

    def add(self, seen: Sequence[SeenStep]) -> None:
        """Append steps."""
        first = len(self.steps)
        self.steps += [step.step for step in seen]
        alike: dict[tuple[str, Layout], tuple[list[int], list[Measured]]] = {}
        for row, step in enumerate(seen):
            for kind, measured in step.sizes.items():
                if measured is not None:
                    rows, members = alike.setdefault((kind, measured.layout), ([], []))
                    rows.append(row)
                    members.append(measured)
        weights: dict[int, tuple[ModuleSizes, int]] = {}
        for (kind, _), (rows, members) in alike.items():
            sizes = by_module(members)
            places = [first + row for row in rows]
            self._add_sizes(kind, sizes, places)
            if kind == "weight":
                weights |= {row: (sizes, k) for k, row in enumerate(rows)}
                self._add_skipped(sizes, [first + row for row in rows if seen[row].skipped])
            elif kind == "update":
                self._add_ratio(sizes, rows, weights, first)
        for place, step in enumerate(seen, start=first):
            self._add_logits(place, step.logits)

    def result(self) -> dict[str, dict[str, list[float | None]]]:
        """Return module -> metric -> column; a column is as long as there are steps."""
        return {
            module: {metric: list(self._column(module, metric)) for metric in columns}
            for module, columns in self._values.items()
        }

    def _add_sizes(self, kind: str, sizes: ModuleSizes, places: Sequence[int]) -> None:
        rms = sizes.l2 / np.sqrt(sizes.elements)
        self._fill(sizes.modules, f"{kind}_rms", places, rms, known=sizes.known)
        self._fill(sizes.modules, f"{kind}_max", places, sizes.largest)
        if sizes.zero_share is not None:
            self._fill(sizes.modules, f"{kind}_zero_share", places, sizes.zero_share)

    def _add_skipped(self, weights: ModuleSizes, places: Sequence[int]) -> None:
        none = np.zeros((len(places), len(weights.modules)))
        for metric in ("update_rms", "update_max", "update_to_weight"):
            self._fill(weights.modules, metric, places, none)

    def _add_ratio(
        self,
        updates: ModuleSizes,
        rows: Sequence[int],
        weights: Mapping[int, tuple[ModuleSizes, int]],
        first: int,
    ) -> None:
        """Add the ratio of norms; the updates of a step have the modules of its weights."""
        theirs = np.stack([weights[row][0].l2[weights[row][1]] for row in rows])
        known = updates.known & ~((theirs == 0) | np.isnan(theirs))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = updates.l2 / theirs
        places = [first + row for row in rows]
        self._fill(updates.modules, "update_to_weight", places, ratio, known=known)

    def _add_logits(self, place: int, logits: Sequence[tuple[str, Tensor]]) -> None:
        largest: dict[str, float] = {}
        for module, tensor in logits:
            # NaN, once in, stays.
            largest[module] = float(np.maximum(largest.get(module, -np.inf), float(tensor)))
        for module, value in largest.items():
            self._fill([module], "attention_logit_max", [place], np.array([[value]]))

    def _fill(
        self,
        modules: Sequence[str],
        metric: str,
        places: Sequence[int],
        values: Floats,
        *,
        known: NDArray[np.bool_] | None = None,
    ) -> None:
        """Set values of shape (places, modules); what is not known stays None, NaN is a value."""
        columns = _rounded(values).T.tolist()
        kept = np.ones(values.shape, dtype=bool) if known is None else known
        for module, column, known_column in zip(modules, columns, kept.T.tolist(), strict=True):
            own = self._column(module, metric)
            for place, value, is_known in zip(places, column, known_column, strict=True):
                if is_known:
                    own[place] = value

    def _column(self, module: str, metric: str) -> list[float | None]:
        own = self._values.setdefault(module, {}).setdefault(metric, [])
        own += [None] * (len(self.steps) - len(own))
        return own


def _rounded(values: Floats) -> Floats:
    """Return the values to six significant digits; zero, NaN and infinity as they are."""
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.floor(np.log10(np.abs(values)))
        ordinary = np.isfinite(exponents)
        # Beyond, the power of ten would leave FP64's range.
        digits = np.clip(_SIGNIFICANT_DIGITS - 1 - np.where(ordinary, exponents, 0), -300, 300)
        # Scaled by a whole power of ten: what is divided by one prints shortest.
        large = 10.0 ** np.maximum(-digits, 0)
        small = 10.0 ** np.maximum(digits, 0)
        rounded: Floats = np.round(values / large * small) / small * large
    return np.where(ordinary, rounded, values)
