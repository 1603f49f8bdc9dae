"""Reads what probes stored in run records: defensively, since any part may be absent or not finite.

A record may come from an older release, from a run without probes or from one that crashed, and a
value may be NaN or infinite. Whatever cannot be read is None; the page then says so in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from harness.runs.record import RunRecord
from harness.runs.record_files import stored_number


def as_count(value: object) -> float:
    """Return a stored number of things; 0 for what is missing or not finite."""
    number = stored_number(value)
    return number if number is not None and math.isfinite(number) else 0.0


def numbers(values: object) -> list[float | None]:
    """Return a stored list of numbers; empty for anything that is not a list."""
    if not isinstance(values, (list, tuple)):
        return []
    return [stored_number(value) for value in values]


def mapping(value: object) -> Mapping[str, Any]:
    """Return a stored table; empty for anything else."""
    return value if isinstance(value, Mapping) else {}


def table_rows(value: object) -> tuple[Mapping[str, Any], ...]:
    """Return a stored list of tables; what is not a table is left out."""
    if not isinstance(value, (list, tuple)):
        return ()
    return tuple(row for row in value if isinstance(row, Mapping))


def probe_results(runs: Sequence[RunRecord], name: str) -> Iterator[Mapping[str, Any]]:
    """Yield what the probe found in each run that has it, in the order of the runs."""
    for record in runs:
        if found := mapping(record.probes.get(name)):
            yield found


def first_result(runs: Sequence[RunRecord], name: str) -> Mapping[str, Any]:
    """Return the first run's finding: for what does not depend on the seed; empty without one."""
    return next(probe_results(runs, name), {})


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are there and finite; None without any."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    return math.fsum(known) / len(known) if known else None


def module_label(module: object) -> str:
    """Return a module's name as it is shown; what belongs to no module in words."""
    return str(module) if module not in (None, "") else "outside of modules"
