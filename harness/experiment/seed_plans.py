"""The plan of a sweep's seeds: as its manifest keeps it, and made again under another rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan
from harness.config import ConfigError
from harness.experiment.manifest import Manifest


def make_plan_of_seeds(rule: DecisionRule, *, seeds_given: int | None) -> SeedPlan:
    """Return the plan for so many seeds, or that of the rule.

    Raises:
        ConfigError: The levels of the looks add up to more than alpha.
    """
    try:
        return SeedPlan.of(rule, seeds_given=seeds_given)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def plan_mapping(plan: SeedPlan, *, seeds_given: int | None) -> dict[str, Any]:
    """Return `Manifest.plan`."""
    return {**plan.as_mapping(), "seeds_given": seeds_given}


def plan_of(manifest: Manifest, rule: DecisionRule) -> SeedPlan:
    """Return the plan of a sweep under a rule, which may be another than that of its command.

    A manifest without a plan is of an earlier version: all its seeds are judged at once.

    Raises:
        ConfigError: The levels of the looks add up to more than alpha.
    """
    given = manifest.plan.get("seeds_given", len({run.seed for run in manifest.runs}))
    return make_plan_of_seeds(rule, seeds_given=given)


def seeds_of_look(plan: SeedPlan, seeds: Sequence[int], index: int) -> list[int]:
    """Return the seeds that look `index` (from 0) adds to those before it."""
    before = plan.looks[index - 1] if index else 0
    return list(seeds[before : plan.looks[index]])


def seeds_up_to(plan: SeedPlan, seeds: Sequence[int], seed: int) -> list[int]:
    """Return all seeds up to the end of the look that `seed` belongs to."""
    place = seeds.index(seed)
    end = next((pairs for pairs in plan.looks if pairs > place), len(seeds))
    return list(seeds[:end])
