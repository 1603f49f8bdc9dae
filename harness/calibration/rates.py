"""Error rates over arms, with intervals that know how little 24 seeds and a few tasks are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.calibration.results import ArmResult, Group, Tally, TaskResult

Quantity = Literal["accept", "reject", "inconclusive"]
Half = Literal["A", "B"]

HALF_A = frozenset({"gpt_cool", "convnet", "finetune", "kernel"})
"""Tasks on which constants may be tuned; what is reported comes from the others."""

_RESAMPLES = 2000
# The two-sided 95 % point of the normal distribution.
_Z = 1.959964


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A mean over arms.

    Attributes:
        mean: Every arm counts once, whatever its task.
        low: Lower end of the 95 % interval.
        high: Upper end.
        worst: Of the worst arm, the largest.
        worst_arm: `<task>/<arm>` of it.
        num_arms: Arms in the mean.
    """

    mean: float
    low: float
    high: float
    worst: float
    worst_arm: str
    num_arms: int


def half_of(task: str) -> Half:
    """Return which half of the tasks a task belongs to."""
    return "A" if task in HALF_A else "B"


def arms_of(
    tasks: Sequence[TaskResult],
    group: Group | None = None,
    *,
    half: Half | None = None,
    least_size: float = -math.inf,
) -> list[ArmResult]:
    """Return the arms of a group, of half of the tasks, of at least a size in margins."""
    return [
        arm
        for task in tasks
        if half is None or half_of(task.task) == half
        for arm in task.arms
        if (group is None or arm.group == group) and not arm.truth.size < least_size
    ]


def rate(arms: Sequence[ArmResult], key: str, quantity: Quantity) -> Rate | None:
    """Return how often a rule said something, over arms; None where it was asked about none.

    The interval is the wider of two, at either end: a bootstrap that resamples tasks and then arms
    within them (arms of a task share their FP32 runs), and Wilson's interval for as many
    experiments as the seeds allow without using one twice. The first alone would be [0, 0] where
    nothing ever went wrong; the second alone would take the arms of a task for independent.

    Args:
        arms: The arms.
        key: `<rule>@<plan>`.
        quantity: What it said.
    """
    asked = [arm for arm in arms if key in arm.tallies]
    if not asked:
        return None
    values = [share_of(arm.tallies[key], quantity) for arm in asked]
    mean = math.fsum(values) / len(values)
    experiments = sum(max(1, arm.num_seeds // arm.tallies[key].pairs) for arm in asked)
    low, high = wilson(mean, experiments)
    resampled_low, resampled_high = clustered([arm.task for arm in asked], values)
    worst = max(range(len(values)), key=values.__getitem__)
    return Rate(
        mean=mean,
        low=max(0.0, min(low, resampled_low)),
        high=min(1.0, max(high, resampled_high)),
        worst=values[worst],
        worst_arm=f"{asked[worst].task}/{asked[worst].name}",
        num_arms=len(asked),
    )


def mean_of(arms: Sequence[ArmResult], key: str, value: Callable[[Tally], float]) -> float | None:
    """Return a mean over the arms that the rule was asked about; None without any."""
    values = [value(arm.tallies[key]) for arm in arms if key in arm.tallies]
    return math.fsum(values) / len(values) if values else None


def compute_share(arms: Sequence[ArmResult], key: str, full: str) -> float | None:
    """Return what a plan costs beside another: candidate runs and one FP32 run per pair.

    Args:
        arms: The arms; each counts by what it costs.
        key: `<rule>@<plan>`.
        full: The plan that it is compared with.
    """
    asked = [arm for arm in arms if key in arm.tallies and full in arm.tallies]
    spent = math.fsum(arm.tallies[key].seeds + arm.tallies[key].runs for arm in asked)
    whole = math.fsum(arm.tallies[full].seeds + arm.tallies[full].runs for arm in asked)
    return spent / whole if whole else None


def sweep_share(tasks: Sequence[TaskResult]) -> float | None:
    """Return what a sweep of the harmless arms costs that share FP32, beside the fixed plan."""
    costs = [task.sweep for task in tasks if task.sweep is not None]
    whole = math.fsum(cost.fixed for cost in costs)
    return math.fsum(cost.adaptive for cost in costs) / whole if whole else None


def share_of(tally: Tally, quantity: Quantity) -> float:
    """Return in which share of the draws a rule said something."""
    said = {"accept": tally.accept, "reject": tally.reject, "inconclusive": tally.inconclusive}
    return said[quantity]


def wilson(share: float, trials: int) -> tuple[float, float]:
    """Return Wilson's two-sided 95 % interval of a share.

    Source: Wilson, Probable inference, the law of succession, and statistical inference, Journal
    of the American Statistical Association 22 (1927), 209-212.

    Args:
        share: Observed share.
        trials: Independent experiments behind it; at least 1.
    """
    z = _Z**2 / trials
    middle = (share + z / 2) / (1 + z)
    half = math.sqrt(share * (1 - share) * z + z * z / 4) / (1 + z)
    # At the ends the formula is exact but for its rounding.
    return (0.0 if share == 0 else middle - half), (1.0 if share == 1 else middle + half)


def clustered(tasks: Sequence[str], values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean under two-stage resampling.

    Tasks are drawn with replacement, then arms within each; with one task only arms are. The
    generator is fixed: the same values give the same interval.

    Args:
        tasks: Task of each value.
        values: One per arm.
    """
    names = sorted(set(tasks))
    by_task = [np.asarray([v for t, v in zip(tasks, values, strict=True) if t == n]) for n in names]
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(names), size=(_RESAMPLES, len(names)))
    sums, sizes = np.zeros(_RESAMPLES), np.zeros(_RESAMPLES)
    for column in range(len(names)):
        for index, arms in enumerate(by_task):
            rows = np.flatnonzero(drawn[:, column] == index)
            picked = generator.integers(len(arms), size=(len(rows), len(arms)))
            sums[rows] += arms[picked].sum(axis=1)
            sizes[rows] += len(arms)
    means = sums / sizes
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))
