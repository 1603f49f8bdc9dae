"""How many seeds each policy is run on: fixed, in looks that stop when settled, or seed by seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from harness.analysis.findings import ModelFindings
from harness.analysis.methods import NON_INFERIORITY
from harness.analysis.rule import DecisionRule
from harness.analysis.wording import number, number_below


@dataclass(frozen=True, kw_only=True)
class SeedPlan:
    """When a candidate is judged, and how much each look may err.

    Attributes:
        kind: `fixed`: once, over all seeds; `looks`: group sequential, the levels of the looks
            adding up to at most alpha (union bound, so dependence between looks does not matter);
            `always_valid`: after every seed, by intervals that hold at all numbers of seeds
            together.
        looks: Pairs at each look, increasing.
        alphas: Level of each look. In an always-valid plan each is the whole alpha: there the
            interval is wider instead.
    """

    kind: Literal["fixed", "looks", "always_valid"]
    looks: tuple[int, ...]
    alphas: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.looks, "a plan has at least one look"
        assert len(self.looks) == len(self.alphas), "every look has its level"

    @classmethod
    def of(cls, rule: DecisionRule, *, seeds_given: int | None) -> SeedPlan:
        """Return the plan that the rule asks for.

        Args:
            rule: Constants.
            seeds_given: How many seeds were named one by one (`seed=0,1,2`); None if none were.
                They mean the fixed plan, and so does `rule.seeds`, or a rival's method.

        Raises:
            ValueError: The levels of the looks add up to more than alpha; one line, with levels
                that would do.
        """
        fixed = seeds_given if seeds_given is not None else rule.seeds
        if fixed is None and rule.method != NON_INFERIORITY:
            # A rival's rule has no levels that could be shared out over looks.
            fixed = rule.looks[-1]
        if fixed is not None:
            return cls.fixed(fixed, rule)
        if rule.always_valid:
            pairs = tuple(range(rule.min_pairs, rule.looks[-1] + 1))
            return cls(kind="always_valid", looks=pairs, alphas=(rule.alpha,) * len(pairs))
        _check_levels(rule)
        return cls(kind="looks", looks=rule.looks, alphas=rule.look_alphas)

    @classmethod
    def fixed(cls, num_pairs: int, rule: DecisionRule) -> SeedPlan:
        """Return the plan of one look at `num_pairs` pairs, at the whole alpha."""
        return cls(kind="fixed", looks=(num_pairs,), alphas=(rule.alpha,))

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> SeedPlan:
        """Return the plan that `as_mapping` gave."""
        return cls(kind=data["kind"], looks=tuple(data["looks"]), alphas=tuple(data["alphas"]))

    def as_mapping(self) -> dict[str, Any]:
        """Return kind, looks and alphas as plain data."""
        return {"kind": self.kind, "looks": list(self.looks), "alphas": list(self.alphas)}

    @property
    def adaptive(self) -> bool:
        """Whether a settled candidate gets no further runs."""
        return self.kind != "fixed"

    @property
    def max_pairs(self) -> int:
        """The pairs of the last look."""
        return self.looks[-1]

    def seeds_at(self, look: int, seeds: Sequence[int]) -> tuple[int, ...]:
        """Return the seeds that look number `look` (from 0) is judged over, of all `seeds`."""
        return tuple(seeds[: self.looks[look]])

    def rule_at(self, look: int, rule: DecisionRule) -> DecisionRule:
        """Return the rule with the level and the kind of interval of look number `look`."""
        return _rule_with(rule, self.alphas[look], self.kind == "always_valid")


@lru_cache(maxsize=256)
def _rule_with(rule: DecisionRule, alpha: float, always_valid: bool) -> DecisionRule:
    # Kept, because checking every constant anew takes longer than judging a candidate.
    return dataclasses.replace(rule, alpha=alpha, always_valid=always_valid)


def open_policies(findings: ModelFindings) -> tuple[str, ...]:
    """Return who goes on to the next look: the candidates whose runs so far do not settle them.

    In grid order, without the control. Empty where the reference cannot be used at all.
    """
    return tuple(
        v.policy
        for v in findings.verdicts
        if not v.is_control and v.look is not None and v.look.stop == "unfinished"
    )


def _check_levels(rule: DecisionRule) -> None:
    total = sum(rule.look_alphas)
    if total <= rule.alpha + 1e-9:
        return
    fitting = ",".join(number_below(a * rule.alpha / total) for a in rule.look_alphas)
    raise ValueError(
        f"decision.look_alphas={list(rule.look_alphas)} add up to {number(total)}, more than "
        f"decision.alpha={number(rule.alpha)}; allowed: at most that in all, e.g. "
        f"decision.look_alphas=[{fitting}]"
    )
