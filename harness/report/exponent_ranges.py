"""Where magnitudes lie by module and kind of tensor, and which loss scales would have been safe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.numerics.exponent_counts import EXPONENT_BIAS, NUM_BINS, counts
from harness.numerics.formats import get_format
from harness.report.evidence import Floats
from harness.report.stored_probes import (
    as_count,
    mapping,
    module_label,
    numbers,
    probe_results,
)
from harness.runs.record import RunRecord

KINDS = {
    "weights": "weights",
    "inputs": "inputs of modules",
    "output_gradients": "gradients of outputs",
    "weight_gradients": "gradients of weights",
    "updates": "weight updates",
}
# Formats drawn under the hills, and looked up for losses; BF16 has FP32's range.
RANGE_FORMATS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True, kw_only=True)
class RangeLoss:
    """What formats would lose of one module's tensors of one kind, without any scaling.

    Attributes:
        flushed: Format -> share of the non-zero elements that would become zero.
        overflow: Format -> share of the non-zero elements that would overflow.
        low: Power of two below which 1 % of the non-zero elements lie; `high` above which 1 % do.
        nonfinite: Elements that are not finite.
    """

    module: str
    kind: str
    flushed: dict[str, float]
    overflow: dict[str, float]
    low: int
    high: int
    nonfinite: int

    @property
    def worst(self) -> float:
        """The larger of the shares FP16 flushes and overflows: what the rows are sorted by."""
        lost = max(self.flushed["fp16"], self.overflow["fp16"])
        return lost + (1.0 if self.nonfinite else 0.0)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Safe loss scales of one format over the sampled steps, as powers of two.

    Attributes:
        steps: Batch indices, shape `(n,)`.
        low: Smallest power of two that keeps 99.9 % of the gradients from being flushed, largest
            over the seeds; NaN where there is none.
        high: Largest power of two without overflow, smallest over the seeds; NaN likewise.
        with_outputs: Whether the gradients of outputs were looked at too; else those of weights
            alone. Shape `(n,)`.
    """

    steps: Floats
    low: Floats
    high: Floats
    with_outputs: NDArray[np.bool_]


Histogram = Floats


def histograms(runs: Sequence[RunRecord]) -> dict[str, dict[str, Histogram]]:
    """Return kind -> module -> counts by biased exponent, summed over runs and samples.

    Returns:
        Shape `(256,)` each; kinds in the order of `KINDS`; kinds and modules without elements are
        left out.
    """
    tables: dict[str, dict[str, Histogram]] = {kind: {} for kind in KINDS}
    for found in probe_results(runs, "exponents"):
        for module, kinds in mapping(found.get("modules")).items():
            for kind, stored in mapping(kinds).items():
                if kind in tables:
                    added = _histogram(mapping(stored))
                    name = module_label(module)
                    tables[kind][name] = tables[kind].get(name, np.zeros(NUM_BINS)) + added
    used = {
        kind: {module: table for module, table in modules.items() if table.sum() > 0}
        for kind, modules in tables.items()
    }
    return {kind: modules for kind, modules in used.items() if modules}


def _histogram(stored: Mapping[str, object]) -> Histogram:
    table = np.zeros(NUM_BINS)
    for index, count in mapping(stored.get("bins")).items():
        if str(index).isdigit() and int(index) < NUM_BINS:
            table[int(index)] += as_count(count)
    # Zeros and non-finite elements are stored beside the bins; those bins may be left out of them.
    table[0] = max(table[0], as_count(stored.get("zeros")))
    table[-1] = max(table[-1], as_count(stored.get("nonfinite")))
    return table


def shares(tables: Iterable[Histogram]) -> Floats | None:
    """Return the share of the non-zero finite elements per binary exponent, all tables together.

    Returns:
        Shape `(254,)`, entry k for magnitudes in `[2**(k-126), 2**(k-125))`; None without any.
    """
    counted = np.sum(list(tables), axis=0)[1 : NUM_BINS - 1]
    total = counted.sum()
    return counted / total if total > 0 else None


def range_losses(tables: Mapping[str, Mapping[str, Histogram]]) -> tuple[RangeLoss, ...]:
    """Return what each module's tensors would lose, worst for FP16 first."""
    rows = []
    for kind, modules in tables.items():
        for module, table in modules.items():
            if (row := _range_loss(module, kind, table)) is not None:
                rows.append(row)
    return tuple(sorted(rows, key=lambda row: (-row.worst, row.module, row.kind)))


def _range_loss(module: str, kind: str, table: Histogram) -> RangeLoss | None:
    histogram = [int(n) for n in table]
    by_format = {name: counts(histogram, get_format(name)) for name in RANGE_FORMATS}
    nonzero = by_format["fp16"]["nonzero"]
    if not nonzero and not histogram[-1]:
        return None
    spread = np.cumsum(table[1:-1]) / max(nonzero, 1)
    return RangeLoss(
        module=module,
        kind=kind,
        flushed={n: c["flushed"] / max(nonzero, 1) for n, c in by_format.items()},
        overflow={n: c["overflow"] / max(nonzero, 1) for n, c in by_format.items()},
        low=int(np.searchsorted(spread, 0.01)) + 1 - EXPONENT_BIAS,
        high=min(int(np.searchsorted(spread, 0.99)) + 2 - EXPONENT_BIAS, EXPONENT_BIAS + 1),
        nonfinite=histogram[-1],
    )


def window(runs: Sequence[RunRecord], format_name: str) -> Window | None:
    """Return the loss scales that every seed would have survived; None without samples.

    Seeds that ended early count as long as they ran.
    """
    low: dict[int, list[float]] = {}
    high: dict[int, list[float]] = {}
    all_kinds: set[float] = set()
    for found in probe_results(runs, "exponents"):
        ends = mapping(mapping(found.get("windows")).get(format_name))
        steps = numbers(found.get("weight_gradient_steps"))
        all_kinds.update(step for step in numbers(found.get("steps")) if step is not None)
        for side, name in ((low, "low"), (high, "high")):
            for step, value in zip(steps, numbers(ends.get(name)), strict=False):
                if step is not None and value is not None and np.isfinite(value):
                    side.setdefault(int(step), []).append(value)
    grid = sorted(set(low) | set(high))
    if not grid:
        return None
    return Window(
        steps=np.asarray(grid, float),
        low=np.array([max(low.get(step, [np.nan])) for step in grid]),
        high=np.array([min(high.get(step, [np.nan])) for step in grid]),
        with_outputs=np.array([step in all_kinds for step in grid]),
    )


def always_safe(found: Window) -> tuple[int, int] | None:
    """Return the powers of two that were safe at every step; None when there is no such scale."""
    low, high = found.low[np.isfinite(found.low)], found.high[np.isfinite(found.high)]
    if not len(low) or not len(high) or low.max() > high.min():
        return None
    return int(low.max()), int(high.min())
