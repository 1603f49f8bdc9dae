"""Which tasks, arms and seeds a bank is to hold."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from harness.calibration.bank import Bank

# The module with `arms_of` and `workload_of`.
CATALOGUE = "harness.calibration.arms"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a bank is to hold.

    Attributes:
        tasks: In order.
        num_seeds: Seeds 0 to `num_seeds` - 1 of every arm.
        quick: Whether only the arms of the quick study count.
        catalogue: Dotted name of the module with `arms_of` and `workload_of`.
    """

    tasks: tuple[str, ...]
    num_seeds: int
    quick: bool = False
    catalogue: str = CATALOGUE


def known_tasks(catalogue: str = CATALOGUE) -> tuple[str, ...]:
    """Return the names of all tasks of a catalogue."""
    module = importlib.import_module(catalogue)
    if hasattr(module, "TASKS"):
        return tuple(module.TASKS)
    from harness.calibration.tasks import TASKS

    return tuple(TASKS)


def selection_of(wanted: Wanted) -> dict[str, tuple[str, ...]]:
    """Return task -> names of the arms that are wanted, the reference first."""
    module = importlib.import_module(wanted.catalogue)
    return {
        task: tuple(arm.name for arm in module.arms_of(task, quick=wanted.quick))
        for task in wanted.tasks
    }


def wanted_bank(folder: Path, wanted: Wanted) -> Bank:
    """Return a bank of what is wanted and stored, whatever else lies there."""
    return Bank(folder, selection=selection_of(wanted), num_seeds=wanted.num_seeds)
