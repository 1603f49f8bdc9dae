"""Reads numbers out of what the probes stored in run records; any of it may be absent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from harness.runs.record import RunRecord
from harness.runs.record_files import stored_number


def module_table(record: RunRecord, probe: str) -> Mapping[str, Mapping[str, Any]]:
    """Return `record.probes[probe]["modules"]`; empty if the probe was off."""
    modules = record.probes.get(probe, {}).get("modules", {})
    return modules if isinstance(modules, dict) else {}


def finite_numbers(values: Any) -> list[float]:
    """Return the finite numbers of a stored list, in order."""
    if not isinstance(values, (list, tuple)):
        return []
    found = (stored_number(value) for value in values)
    return [x for x in found if x is not None and math.isfinite(x)]


def typical(records: Iterable[RunRecord], module: str, metric: str) -> float | None:
    """Return a metric of the norms probe: median over the steps, mean over the records.

    The median, because a step that a loss scaler skipped has no update and gradients that are not
    finite, and the sampled steps are few.
    """
    found = [
        float(np.median(values))
        for record in records
        if (values := finite_numbers(module_table(record, "norms").get(module, {}).get(metric)))
    ]
    return float(np.mean(found)) if found else None


def largest(records: Iterable[RunRecord], module: str, metric: str) -> float | None:
    """Return the largest finite value of a metric of the norms probe over steps and records."""
    found = [
        max(values)
        for record in records
        if (values := finite_numbers(module_table(record, "norms").get(module, {}).get(metric)))
    ]
    return max(found) if found else None


def pooled_share(
    records: Iterable[RunRecord], probe: str, module: str, count: str, of: str
) -> float | None:
    """Return sum of counts over sum of `of`, over steps and records; None without any `of`."""
    part = total = 0.0
    for record in records:
        row = module_table(record, probe).get(module, {})
        part += sum(finite_numbers(row.get(count)))
        total += sum(finite_numbers(row.get(of)))
    return part / total if total > 0 else None


def module_names(records: Iterable[RunRecord], probes: Sequence[str]) -> list[str]:
    """Return the modules of these probes in the order in which they first appear."""
    names: dict[str, None] = {}
    for record in records:
        for probe in probes:
            names.update(dict.fromkeys(module_table(record, probe)))
    return list(names)


def entries(record: RunRecord, probe: str, key: str) -> list[dict[str, Any]]:
    """Return a stored list of objects, e.g. the `rows` of the audit; empty if there is none."""
    found = record.probes.get(probe, {}).get(key, [])
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
