"""All faults of the zoo, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from harness.calibration.faults import (
    distributed,
    formats,
    overflow,
    positions,
    reductions,
    scaling,
    statistics,
    weights,
)
from harness.calibration.faults.fault import Fault

_THEMES = (scaling, formats, weights, overflow, statistics, reductions, positions, distributed)

FAULTS: Mapping[str, Fault] = MappingProxyType(
    {fault.name: fault for theme in _THEMES for fault in theme.FAULTS}
)
assert len(FAULTS) == sum(len(theme.FAULTS) for theme in _THEMES), "two faults share a name"
