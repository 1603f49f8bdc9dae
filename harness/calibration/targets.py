"""What the rule is to reach, and whether it does: computed from the rates, not written by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.calibration.contenders import OURS
from harness.calibration.plans import FIXED, LOOKS
from harness.calibration.rates import (
    Half,
    Quantity,
    Rate,
    arms_of,
    compute_share,
    half_of,
    mean_of,
    rate,
    share_of,
    sweep_share,
)
from harness.calibration.results import ArmResult, Group, TaskResult

LARGE = 2.0
"""Margins from which on a harm is to be rejected."""
FULL = f"{OURS}@{FIXED[-1]}"


@dataclass(frozen=True, kw_only=True)
class Aim:
    """One measured value beside its target.

    Attributes:
        value: Measured; None where there was nothing to measure.
        limit: The target; None where the value is only reported.
        at_least: Whether the target is a lower bound.
        rate: The rate that it is of, for its interval and its worst arm.
        culprits: Of a missed target, the arms on its wrong side, the worst first.
    """

    value: float | None
    limit: float | None
    at_least: bool = False
    rate: Rate | None = None
    culprits: tuple[ArmResult, ...] = ()

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one or without a value."""
        if self.value is None or self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True, kw_only=True)
class Target:
    """One row of the table: the same quantity for two plans.

    Attributes:
        title: In words.
        quantity: What of an arm's tally it is, for the list of culprits; None for compute.
        aims: Plan -> value and target.
    """

    title: str
    quantity: Quantity | None
    aims: dict[str, Aim]


@dataclass(frozen=True, kw_only=True)
class _Row:
    title: str
    group: Group
    quantity: Quantity
    limits: tuple[float | None, float | None]
    worst: bool = False
    at_least: bool = False
    least_size: float = -math.inf


PLANS = ("3", LOOKS)
_ROWS = (
    _Row(
        title="null pairs rejected",
        group="null",
        quantity="reject",
        limits=(0.005, 0.005),
    ),
    _Row(
        title="harmless low-precision arms rejected, mean",
        group="harmless",
        quantity="reject",
        limits=(0.005, 0.005),
    ),
    _Row(
        title="harmless low-precision arms rejected, worst arm",
        group="harmless",
        quantity="reject",
        limits=(0.03, 0.03),
        worst=True,
    ),
    _Row(
        title="harmful arms accepted, mean",
        group="harm",
        quantity="accept",
        limits=(0.005, 0.005),
    ),
    _Row(
        title="harmful arms accepted, worst arm",
        group="harm",
        quantity="accept",
        limits=(0.03, 0.03),
        worst=True,
    ),
    _Row(
        title="harmful arms of 2 margins or more rejected",
        group="harm",
        quantity="reject",
        limits=(None, 0.95),
        at_least=True,
        least_size=LARGE,
    ),
    _Row(
        title="harmless arms accepted",
        group="harmless",
        quantity="accept",
        limits=(None, 0.95),
        at_least=True,
    ),
)
COMPUTE_LIMIT = 0.60


def targets(tasks: Sequence[TaskResult], half: Half | None) -> tuple[Target, ...]:
    """Return the table of targets over half of the tasks, or over all of them."""
    found = [_target(row, tasks, half) for row in _ROWS]
    candidates = _candidates(tasks, half)
    share = compute_share(candidates, f"{OURS}@{LOOKS}", FULL)
    found.append(
        Target(
            title=f"compute against a fixed n = {FIXED[-1]} plan",
            quantity=None,
            aims={
                "3": Aim(value=compute_share(candidates, f"{OURS}@3", FULL), limit=None),
                LOOKS: Aim(value=share, limit=COMPUTE_LIMIT),
            },
        )
    )
    return tuple(found)


def reported_half(tasks: Sequence[TaskResult]) -> Half | None:
    """Return half B, which nothing was tuned on; None (all tasks) for a bank without it."""
    return "B" if any(half_of(task.task) == "B" for task in tasks) else None


def mean_seeds(tasks: Sequence[TaskResult], half: Half | None) -> float | None:
    """Return the pairs that the looks take, mean over candidate arms."""
    return mean_of(_candidates(tasks, half), f"{OURS}@{LOOKS}", lambda tally: tally.seeds)


def shared_sweep(tasks: Sequence[TaskResult], half: Half | None) -> float | None:
    """Return the compute of a sweep whose harmless candidates share FP32."""
    chosen = {arm.task for arm in arms_of(tasks, half=half)}
    return sweep_share([task for task in tasks if task.task in chosen])


def _target(row: _Row, tasks: Sequence[TaskResult], half: Half | None) -> Target:
    arms = arms_of(tasks, row.group, half=half, least_size=row.least_size)
    aims = {}
    for plan, limit in zip(PLANS, row.limits, strict=True):
        key = f"{OURS}@{plan}"
        found = rate(arms, key, row.quantity)
        value = None if found is None else found.worst if row.worst else found.mean
        aim = Aim(value=value, limit=limit, at_least=row.at_least, rate=found)
        if aim.met is False:
            aim = replace(aim, culprits=_culprits(arms, key, row, limit))
        aims[plan] = aim
    return Target(title=row.title, quantity=row.quantity, aims=aims)


def _culprits(
    arms: Sequence[ArmResult], key: str, row: _Row, limit: float | None
) -> tuple[ArmResult, ...]:
    """Return the arms that make a target be missed, the worst first."""
    asked = [arm for arm in arms if key in arm.tallies]
    shares = {id(arm): share_of(arm.tallies[key], row.quantity) for arm in asked}
    wrong = [
        arm
        for arm in asked
        if limit is not None
        and (shares[id(arm)] < limit if row.at_least else shares[id(arm)] > limit)
    ]
    return tuple(sorted(wrong, key=lambda arm: shares[id(arm)], reverse=not row.at_least))


def _candidates(tasks: Sequence[TaskResult], half: Half | None) -> list[ArmResult]:
    """Return what a user would try: everything but the null arms and what cannot be judged."""
    return [arm for arm in arms_of(tasks, half=half) if arm.group not in ("null", "void")]
