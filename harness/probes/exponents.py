"""Exponent histograms by module and kind of tensor: what each format would lose at each loss scale.

Result layout::

    {"steps": [...],                  # all kinds of tensors were looked at
     "view": "what_if" | "observed",  # observed: some tensors really were in a 16-bit format
     "modules": {module: {kind: {"bins": {"<biased FP32 exponent>": count}, "elements": n,
                                 "zeros": n, "nonfinite": n, "format": "fp32"}}},
     "weight_gradient_steps": [...],
     "windows": {format: {"low": [...], "high": [...]}}}  # one per weight gradient step

Counts are summed over the steps looked at. Kinds are `weights` (before the update), `inputs`,
`output_gradients`, `weight_gradients` and `updates` (what a step added to the weights); gradients
are unscaled and unclipped. `format` is what the tensors were stored in; several are joined by `+`.
Windows are those of `exponent_counts.scale_window`, over all weight gradients of the step and, on
steps of all kinds, over the gradients of module outputs too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.numerics.exponent_counts import NUM_BINS, counts, scale_window
from harness.numerics.formats import get_format
from harness.probes.base import Metric, NamedTensor, StepProbe
from harness.probes.exponent_samples import Collected, Sample
from harness.probes.flat import CHUNK_ELEMENTS

FORMATS = ("fp16", "bf16")
WINDOW_FORMATS = ("fp16", "bf16", "fp8_e5m2", "fp8_e4m3")
_COUNTS = ("flushed", "subnormal", "near_max", "overflow")


class ExponentsProbe(StepProbe):
    """Counts exponents: of weight gradients often, of all kinds of tensors seldom.

    Args:
        every: Steps between two looks at all kinds; None: never.
        weight_gradients_every: Steps between two looks at the weight gradients alone; None: only
            with all kinds.
        num_steps: Planned steps; the last one is always looked at.
    """

    name = "exponents"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "bins": Metric(
            unit="count",
            description="Biased FP32 exponent b -> elements with 2^(b-127) <= |x| < 2^(b-126); "
            "0: zeros and FP32 subnormals, 255: NaN and infinities.",
            source="IEEE 754-2019, 3.4",
        ),
        "elements": Metric(unit="count", description="All elements looked at."),
        "zeros": Metric(unit="count", description="Elements that are exactly zero."),
        "nonfinite": Metric(unit="count", description="Elements that are NaN or infinite."),
        "format": Metric(unit="1", description="Storage format of the tensors looked at."),
        "low": Metric(
            unit="log2",
            description="Smallest power of two as loss scale at which at most 0.1 % of the "
            "non-zero elements are flushed to zero.",
            source="Micikevicius et al. 2018, section 3.2",
        ),
        "high": Metric(
            unit="log2",
            description="Largest power of two as loss scale at which no element overflows.",
            source="Micikevicius et al. 2018, section 3.2",
        ),
    }

    def __init__(
        self, *, every: int | None, weight_gradients_every: int | None, num_steps: int
    ) -> None:
        super().__init__(every=every or num_steps, num_steps=num_steps)
        self._all_kinds_every = every
        self._weight_gradients_every = weight_gradients_every
        self._sample: Sample | None = None
        self._before: list[Tensor] = []
        self._waiting: list[Sample] = []
        self._collected = Collected()

    def due(self, step: int) -> bool:
        """Return whether the weight gradients of a step are looked at."""
        every = self._weight_gradients_every
        return self._all_kinds_due(step) or (every is not None and self._falls_on(step, every))

    def _all_kinds_due(self, step: int) -> bool:
        every = self._all_kinds_every
        return every is not None and self._falls_on(step, every)

    def _falls_on(self, step: int, every: int) -> bool:
        return step % every == 0 or step + 1 == self.num_steps

    def start(self, step: int, *, loss_scale: float) -> None:
        """Begin a step."""
        self.wants_activations = self.wants_weights = self._all_kinds_due(step)
        self._sample = Sample(step=step, loss_scale=loss_scale, all_kinds=self.wants_activations)

    def forward(self, module: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Count the inputs of a call."""
        del outputs
        if self._sample is not None and self._sample.all_kinds:
            self._sample.add_call("inputs", module, inputs)

    def output_gradient(self, module: str, gradient: Tensor) -> None:
        """Count the gradient of an output."""
        sample = self._sample
        if sample is not None and sample.all_kinds:
            if not sample.scale_is_power_of_two:
                gradient = gradient.float() / sample.loss_scale
            sample.add_call("output_gradients", module, [gradient])

    def gradients(self, gradients: Sequence[NamedTensor]) -> None:
        """Count the weight gradients."""
        if self._sample is not None:
            self._sample.add("weight_gradients", gradients)

    def before_update(self, parameters: Sequence[NamedTensor]) -> None:
        """Count the weights, and keep a copy, on steps of all kinds."""
        if self._sample is not None and self._sample.all_kinds:
            self._sample.add("weights", parameters)
            self._before = [p.value.clone() for p in parameters]

    def after_update(self, parameters: Sequence[NamedTensor], *, skipped: bool) -> None:
        """Count what the step added to the weights; a skipped one has no updates."""
        sample, self._sample = self._sample, None
        if sample is None:
            return
        if sample.all_kinds and not skipped:
            for updates in _differences(self._before, parameters):
                sample.add("updates", updates)
        self._before = []
        self._waiting.append(sample)

    def flush(self) -> None:
        """Fetch the counts of all steps that ended."""
        self._collected.fetch(self._waiting)
        self._waiting = []

    def result(self) -> dict[str, Any]:
        """Return histograms by module and kind, and the windows of loss scales."""
        got = self._collected
        windows: dict[str, dict[str, list[int | None]]] = {}
        for name in WINDOW_FORMATS:
            found = [scale_window(row, get_format(name)) for row in got.gradient_rows]
            windows[name] = {
                "low": [None if window is None else window[0] for window in found],
                "high": [None if window is None else window[1] for window in found],
            }
        return {
            "steps": list(got.all_kinds_steps),
            "view": got.view,
            "modules": got.modules(),
            "weight_gradient_steps": list(got.steps),
            "windows": windows,
        }

    def sampled(self) -> tuple[tuple[int, ...], dict[str, tuple[float, ...]]]:
        """Return the steps looked at, and whole-model counts of each.

        `grad_nonzero` counts finite elements that are not zero, as told by their exponent: FP32
        subnormals (below 2^-126) count as zeros. `grad_total` counts all, `grad_<count>_<format>`
        those of `exponent_counts.counts`.
        """
        got = self._collected
        columns = {"grad_total": tuple(float(n) for n in got.weight_gradient_elements)}
        for name in FORMATS:
            lost = [counts(row, get_format(name)) for row in got.weight_gradient_rows]
            for count in _COUNTS:
                columns[f"grad_{count}_{name}"] = tuple(float(c[count]) for c in lost)
            columns["grad_nonzero"] = tuple(float(c["nonzero"]) for c in lost)
        return tuple(got.steps), columns

    def histograms(self) -> dict[str, tuple[int, ...]]:
        """Return the weight gradients' histogram: `grad/all`, and `grad/tail` of the last third."""
        got = self._collected
        tail_start = self.num_steps - -(-self.num_steps // 3)
        rows = list(zip(got.steps, got.weight_gradient_rows, strict=True))
        return {
            "grad/all": _summed([row for _, row in rows]),
            "grad/tail": _summed([row for step, row in rows if step >= tail_start]),
        }

    def zero_share(self) -> float | None:
        """Return the share of gradient elements that are exactly zero, mean over steps looked at.

        None when no step had a gradient element.
        """
        got = self._collected
        pairs = zip(got.weight_gradient_zeros, got.weight_gradient_elements, strict=True)
        shares = [zeros / elements for zeros, elements in pairs if elements > 0]
        return math.fsum(shares) / len(shares) if shares else None


def _summed(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True)) if rows else (0,) * NUM_BINS


def _differences(
    before: Sequence[Tensor], after: Sequence[NamedTensor]
) -> Iterator[list[NamedTensor]]:
    """Yield the updates, as many at a time as `CHUNK_ELEMENTS` hold: not a second large model."""
    group: list[NamedTensor] = []
    size = 0
    for old, new in zip(before, after, strict=True):
        if group and size + old.numel() > CHUNK_ELEMENTS:
            yield group
            group, size = [], 0
        # In FP32 the difference of two 16-bit weights is exact but for far apart ones.
        value = _wide(new.value) - _wide(old)
        group.append(NamedTensor(module=new.module, name=new.name, value=value))
        size += old.numel()
    if group:
        yield group


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()
