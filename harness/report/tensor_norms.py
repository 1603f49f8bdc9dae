"""How large each module's tensors are in one policy's runs: what a format has to hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.numerics.formats import FP16
from harness.report.stored_probes import (
    mapping,
    mean,
    module_label,
    numbers,
    probe_results,
)
from harness.runs.record import RunRecord

# Metric of the probe -> whether the largest value of the run is told, or the mean over the samples.
METRICS = {
    "weight_rms": False,
    "grad_rms": False,
    "update_to_weight": False,
    "input_max": True,
    "output_max": True,
    "attention_logit_max": True,
}


@dataclass(frozen=True, kw_only=True)
class ModuleNorms:
    """One module's norms over all runs and sampled steps; None where a metric does not apply.

    Attributes:
        values: One for each of `METRICS`.
        beyond_fp16: Whether an input or output is larger than FP16's largest number.
    """

    module: str
    values: dict[str, float | None]
    beyond_fp16: bool

    @property
    def largest(self) -> float:
        """The largest magnitude that goes in or out; 0 when it was not measured."""
        found = (self.values["input_max"], self.values["output_max"])
        return max((v for v in found if v is not None), default=0.0)


def module_norms(runs: Sequence[RunRecord]) -> tuple[ModuleNorms, ...]:
    """Return the norms by module, largest inputs and outputs first; empty without the probe."""
    tables = [mapping(found.get("modules")) for found in probe_results(runs, "norms")]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [_row(name, [mapping(table.get(name)) for table in tables]) for name in names]
    return tuple(sorted(rows, key=lambda row: (-row.largest, row.module)))


def _row(name: str, tables: Sequence[Mapping[str, Any]]) -> ModuleNorms:
    values = {
        metric: (_largest if is_max else mean)([v for t in tables for v in numbers(t.get(metric))])
        for metric, is_max in METRICS.items()
    }
    ends = (values["input_max"], values["output_max"])
    return ModuleNorms(
        module=module_label(name),
        values=values,
        beyond_fp16=any(v is not None and v >= FP16.overflow_threshold for v in ends),
    )


def _largest(values: Sequence[float | None]) -> float | None:
    """Return the largest value, infinity included; None when nothing is a number."""
    return max((v for v in values if v is not None and not math.isnan(v)), default=None)
