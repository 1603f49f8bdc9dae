"""Exponent counts on their way from the device, one sample per step, to sums by module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.numerics.exponent_counts import NONFINITE_BIN, NUM_BINS
from harness.numerics.exponents import exponent_histograms
from harness.probes.base import NamedTensor
from harness.probes.named_tensors import columns_of

Counts = NDArray[np.int64]
KINDS = ("weights", "inputs", "output_gradients", "weight_gradients", "updates")
_FORMAT_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


def format_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, or torch's own where there is none."""
    return _FORMAT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, kw_only=True)
class Block:
    """Counts of one kind of tensor for some modules, on the device still.

    Attributes:
        kind: One of `KINDS`.
        modules: Module of each row; a module may have several.
        elements: Of each row.
        formats: Storage dtype of each row's tensor.
        histograms: int64 of shape (rows, 256).
        zeros: Exact zeros, int64 of shape (rows,).
    """

    kind: str
    modules: tuple[str, ...]
    elements: list[int]
    formats: list[torch.dtype]
    histograms: Tensor
    zeros: Tensor


@dataclass(kw_only=True)
class Sample:
    """What one step showed.

    Attributes:
        step: Batch index.
        loss_scale: That gradients of module outputs are multiplied by.
        all_kinds: Whether all kinds of tensors are looked at.
        blocks: What was counted so far.
    """

    step: int
    loss_scale: float
    all_kinds: bool
    blocks: list[Block] = field(default_factory=list)

    @property
    def scale_is_power_of_two(self) -> bool:
        """Whether unscaling only shifts exponents."""
        return math.frexp(self.loss_scale)[0] == 0.5

    def add(self, kind: str, tensors: Sequence[NamedTensor]) -> None:
        """Count tensors of any modules in one go."""
        modules, values = columns_of(tensors)
        self._add(kind, modules, values)

    def add_call(self, kind: str, module: str, tensors: Sequence[Tensor]) -> None:
        """Count the tensors of one of perhaps several calls of a module."""
        self._add(kind, (module,) * len(tensors), tensors)

    def _add(self, kind: str, modules: tuple[str, ...], values: Sequence[Tensor]) -> None:
        if values:
            histograms, zeros = exponent_histograms(values)
            self.blocks.append(
                Block(
                    kind=kind,
                    modules=modules,
                    elements=[t.numel() for t in values],
                    formats=[t.dtype for t in values],
                    histograms=histograms,
                    zeros=zeros,
                )
            )


@dataclass
class _Total:
    histogram: Counts
    zeros: int = 0
    elements: int = 0
    formats: set[str] = field(default_factory=set)


@dataclass
class Collected:
    """Sums over steps, on the host.

    Attributes:
        steps: Batch indices of the steps added.
        all_kinds_steps: Those at which all kinds were looked at.
        weight_gradient_rows: Per step: the whole model's histogram of weight gradients.
        weight_gradient_zeros: Per step: how many of them are exactly zero.
        weight_gradient_elements: Per step: how many there are.
        gradient_rows: Per step: histogram of weight gradients and, where they were looked at, of
            the gradients of module outputs.
    """

    steps: list[int] = field(default_factory=list)
    all_kinds_steps: list[int] = field(default_factory=list)
    weight_gradient_rows: list[list[int]] = field(default_factory=list)
    weight_gradient_zeros: list[int] = field(default_factory=list)
    weight_gradient_elements: list[int] = field(default_factory=list)
    gradient_rows: list[list[int]] = field(default_factory=list)
    _totals: dict[tuple[str, str], _Total] = field(default_factory=dict)

    def fetch(self, samples: Sequence[Sample]) -> None:
        """Add samples; two transfers for all of them."""
        blocks = [block for sample in samples for block in sample.blocks]
        if blocks:
            # A parameter-less step may have left its zeros on another device.
            device = blocks[0].zeros.device
            histograms = torch.cat([b.histograms.to(device) for b in blocks]).cpu().numpy()
            zeros = torch.cat([b.zeros.to(device) for b in blocks]).tolist()
        start = 0
        for sample in samples:
            weight_gradients = np.zeros(NUM_BINS, np.int64)
            output_gradients = np.zeros(NUM_BINS, np.int64)
            elements = exact_zeros = 0
            for block in sample.blocks:
                stop = start + len(block.modules)
                rows = histograms[start:stop]
                if block.kind == "output_gradients" and sample.scale_is_power_of_two:
                    by = -int(math.log2(sample.loss_scale))
                    rows = np.stack([shifted(row, by) for row in rows])
                if block.kind == "output_gradients":
                    output_gradients += rows.sum(0)
                if block.kind == "weight_gradients":
                    weight_gradients += rows.sum(0)
                    elements += sum(block.elements)
                    exact_zeros += sum(zeros[start:stop])
                self._add(block, rows, zeros[start:stop])
                start = stop
            self.steps.append(sample.step)
            if sample.all_kinds:
                self.all_kinds_steps.append(sample.step)
            self.weight_gradient_rows.append(weight_gradients.tolist())
            self.weight_gradient_zeros.append(exact_zeros)
            self.weight_gradient_elements.append(elements)
            self.gradient_rows.append((weight_gradients + output_gradients).tolist())

    def _add(self, block: Block, rows: Counts, zeros: Sequence[int]) -> None:
        for place, module in enumerate(block.modules):
            key = (module, block.kind)
            total = self._totals.setdefault(key, _Total(np.zeros(NUM_BINS, np.int64)))
            total.histogram += rows[place]
            total.zeros += zeros[place]
            total.elements += block.elements[place]
            total.formats.add(format_name(block.formats[place]))

    @property
    def view(self) -> str:
        """`observed` if any tensor was stored in 16 bits or fewer, else `what_if`."""
        formats = {name for total in self._totals.values() for name in total.formats}
        return "what_if" if formats <= {"fp32", "fp64"} else "observed"

    def modules(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return module -> kind -> counts, as the probe's result has them."""
        result: dict[str, dict[str, dict[str, Any]]] = {}
        for (module, kind), total in self._totals.items():
            bins = {str(b): int(total.histogram[b]) for b in np.flatnonzero(total.histogram)}
            result.setdefault(module, {})[kind] = {
                "bins": bins,
                "elements": total.elements,
                "zeros": total.zeros,
                "nonfinite": int(total.histogram[NONFINITE_BIN]),
                "format": "+".join(sorted(total.formats)),
            }
        return result


def shifted(histogram: Counts, by: int) -> Counts:
    """Return the histogram of values multiplied by 2^by.

    What leaves the range of normal FP32 values stays in the first or last bin of finite ones: bin 0
    takes it below, bin 254 above; zeros (bin 0) and non-finite values (bin 255) stay.
    """
    result = np.zeros_like(histogram)
    finite = np.arange(1, NONFINITE_BIN)
    np.add.at(result, np.clip(finite + by, 0, NONFINITE_BIN - 1), histogram[1:NONFINITE_BIN])
    result[0] += histogram[0]
    result[NONFINITE_BIN] += histogram[NONFINITE_BIN]
    return result
