"""How many pairs a simulated user runs: a fixed number, or in looks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan

LOOKS = "looks"
ALWAYS_VALID = "always_valid"
FIXED = (1, 3, 5, 8)
"""Pairs of the fixed plans."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at the pairs there are.

    Attributes:
        pairs: How many.
        rule: Constants, with the level and the kind of interval of this look.
    """

    pairs: int
    rule: DecisionRule


@dataclass(frozen=True, kw_only=True)
class Plan:
    """When a simulated user looks.

    Attributes:
        name: `3` for three pairs at once; `looks`; `always_valid`.
        looks: In ascending order of pairs; a fixed plan has one.
    """

    name: str
    looks: tuple[Look, ...]

    @property
    def pairs(self) -> int:
        """Pairs of the last look."""
        return self.looks[-1].pairs

    @property
    def sequential(self) -> bool:
        """Whether there is more than one look."""
        return len(self.looks) > 1


def plans_of(rule: DecisionRule, *, num_seeds: int) -> tuple[Plan, ...]:
    """Return the plans that the stored seeds suffice for, as the analyzer has them.

    Args:
        rule: Constants, the looks and their levels among them.
        num_seeds: Stored seeds of the task.
    """
    free = dataclasses.replace(rule, seeds=None, always_valid=False)
    plans = {
        **{str(n): SeedPlan.fixed(n, free) for n in FIXED},
        LOOKS: SeedPlan.of(free, seeds_given=None),
        ALWAYS_VALID: SeedPlan.of(dataclasses.replace(free, always_valid=True), seeds_given=None),
    }
    return tuple(
        Plan(
            name=name,
            looks=tuple(
                Look(pairs=pairs, rule=plan.rule_at(k, free)) for k, pairs in enumerate(plan.looks)
            ),
        )
        for name, plan in plans.items()
        if plan.max_pairs <= num_seeds
    )
