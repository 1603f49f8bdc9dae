"""What is the same for all verdicts of one look at a model."""

from __future__ import annotations

from dataclasses import dataclass

from harness.analysis.pairing import Pair
from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is the same for all verdicts of one look at a model.

    Attributes:
        seeds: Seeds of the look.
        command: The command that trains the grid; empty where it is not known.
        rule: Constants, with the level of the look.
        plan: When candidates are judged; None: once, over `seeds`.
        look: Which look of the plan this is, from 0.
        twins: One-ulp twins of the FP32 runs, for the rival rule that needs them.
    """

    seeds: tuple[int, ...]
    command: str
    rule: DecisionRule
    plan: SeedPlan | None = None
    look: int = 0
    twins: tuple[Pair, ...] = ()

    @property
    def adaptive(self) -> bool:
        """Whether a settled candidate gets no further runs."""
        return self.plan is not None and self.plan.adaptive

    @property
    def last_look(self) -> bool:
        """Whether no look follows this one."""
        return self.plan is None or self.look == len(self.plan.looks) - 1
