"""What 16-bit formats would lose of a run's gradients: exponent histograms on sampled steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.numerics.exponents import NUM_BINS, counts, exponent_histogram
from harness.numerics.formats import get_format
from harness.probes.flat import flat_chunks

_FORMATS = ("fp16", "bf16")
_COUNTS = ("flushed", "subnormal", "near_max", "overflow")


@dataclass
class GradientProbe:
    """Collects one exponent histogram of all gradients per observed step, on the device.

    Attributes:
        tail_start: First batch index of the run's tail, for the `grad/tail` histogram.
    """

    tail_start: int
    _steps: list[int] = field(default_factory=list)
    _histograms: list[Tensor] = field(default_factory=list)
    _zeros: list[Tensor] = field(default_factory=list)
    _totals: list[int] = field(default_factory=list)

    def observe(self, gradients: Sequence[Tensor], *, step: int) -> None:
        """Add the unscaled, unclipped gradients of one step; nothing waits for the device.

        Args:
            gradients: Real strided tensors on one device; with none, the step counts as empty.
            step: Batch index.
        """
        histogram = zeros = None
        for flat in flat_chunks(gradients):
            part, exact = exponent_histogram(flat), flat.numel() - torch.count_nonzero(flat)
            histogram = part if histogram is None else histogram + part
            zeros = exact if zeros is None else zeros + exact
        if histogram is None or zeros is None:
            histogram, zeros = torch.zeros(NUM_BINS, dtype=torch.int64), torch.zeros(())
        self._steps.append(step)
        self._histograms.append(histogram)
        self._zeros.append(zeros)
        self._totals.append(sum(g.numel() for g in gradients))

    def sampled(self) -> dict[str, tuple[float, ...]]:
        """Return `grad_nonzero`, `grad_total` and `grad_<count>_<format>`, one per observed step.

        `grad_nonzero` counts finite elements that are not zero, as told by their exponent: FP32
        subnormals (below 2^-126) count as zeros.
        """
        rows = self._rows()
        result: dict[str, tuple[float, ...]] = {"grad_total": tuple(map(float, self._totals))}
        for name in _FORMATS:
            lost = [counts(row, get_format(name)) for row in rows]
            for count in _COUNTS:
                result[f"grad_{count}_{name}"] = tuple(float(c[count]) for c in lost)
            result["grad_nonzero"] = tuple(float(c["nonzero"]) for c in lost)
        return result

    def histograms(self) -> dict[str, tuple[int, ...]]:
        """Return the sums over observed steps: `grad/all`, and `grad/tail` from `tail_start` on."""
        rows = self._rows()
        tail = [row for row, step in zip(rows, self._steps, strict=True) if step >= self.tail_start]
        return {"grad/all": _summed(rows), "grad/tail": _summed(tail)}

    def zero_share(self) -> float | None:
        """Return the share of elements that are exactly zero, mean over observed steps.

        None when no step had a gradient element.
        """
        zeros = torch.stack([z.cpu().to(torch.float64) for z in self._zeros]) if self._zeros else ()
        shares = [float(z) / n for z, n in zip(zeros, self._totals, strict=True) if n > 0]
        return sum(shares) / len(shares) if shares else None

    def _rows(self) -> list[list[int]]:
        if not self._histograms:
            return []
        rows: list[list[int]] = torch.stack([h.cpu() for h in self._histograms]).tolist()
        return rows


def _summed(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True)) if rows else (0,) * NUM_BINS
