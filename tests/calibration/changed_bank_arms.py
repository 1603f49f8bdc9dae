"""`bank_arms` after work on it: one arm computes something else, one kills its worker."""

from __future__ import annotations

import dataclasses

from bank_arms import ARMS, TASKS, Arm, fatal, workload_of
from tiny_workloads import cross_entropy

__all__ = ["TASKS", "arms_of", "workload_of"]


def shrunk(model, batch):
    return 0.25 * cross_entropy(model, batch)


def arms_of(task: str, *, quick: bool = False) -> tuple[Arm, ...]:
    reference, noise, fault = ARMS
    changed = dataclasses.replace(fault, loss=shrunk)
    if task == "apples":
        return reference, noise, changed
    return reference, noise, dataclasses.replace(fault, loss=fatal)
