"""Which plan the settings mean, and that its levels add up to no more than alpha."""

from __future__ import annotations

import json

import pytest

from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan

RULE = DecisionRule()


def test_looks_are_the_default() -> None:
    plan = SeedPlan.of(RULE, seeds_given=None)
    assert (plan.kind, plan.looks, plan.alphas) == ("looks", (3, 5, 8), (0.02, 0.015, 0.015))
    assert sum(plan.alphas) == pytest.approx(RULE.alpha)
    assert (plan.adaptive, plan.max_pairs) == (True, 8)
    assert [plan.seeds_at(k, range(8)) for k in range(3)] == [
        (0, 1, 2),
        (0, 1, 2, 3, 4),
        tuple(range(8)),
    ]


@pytest.mark.parametrize(
    ("rule", "given", "pairs"),
    [
        (RULE, 3, 3),
        (RULE, 1, 1),
        (DecisionRule(seeds=5), None, 5),
        (DecisionRule(seeds=5), 2, 2),  # seeds named one by one are what runs
        (DecisionRule(seeds=4, always_valid=True), None, 4),
        # A level of one's own needs no levels of looks where there are none.
        (DecisionRule(alpha=0.01), 3, 3),
    ],
)
def test_named_seeds_or_a_number_of_seeds_mean_the_fixed_plan(
    rule: DecisionRule, given: int | None, pairs: int
) -> None:
    plan = SeedPlan.of(rule, seeds_given=given)
    assert (plan.kind, plan.looks, plan.alphas) == ("fixed", (pairs,), (rule.alpha,))
    assert not plan.adaptive
    assert plan.rule_at(0, rule).always_valid is False


def test_always_valid_looks_after_every_seed_at_the_whole_level() -> None:
    plan = SeedPlan.of(DecisionRule(always_valid=True, looks=(3, 5, 6)), seeds_given=None)
    assert (plan.kind, plan.looks, plan.alphas) == ("always_valid", (3, 4, 5, 6), (0.05,) * 4)
    assert plan.rule_at(2, RULE).always_valid is True
    assert plan.rule_at(2, RULE).alpha == 0.05


def test_each_look_has_its_level() -> None:
    plan = SeedPlan.of(RULE, seeds_given=None)
    assert [plan.rule_at(k, RULE).alpha for k in range(3)] == [0.02, 0.015, 0.015]
    assert plan.rule_at(0, RULE).looks == RULE.looks


def test_levels_that_add_up_to_more_than_alpha_are_refused_with_some_that_do_not() -> None:
    with pytest.raises(ValueError, match=r"decision\.look_alphas=.* add up to 0\.05") as error:
        SeedPlan.of(DecisionRule(alpha=0.01), seeds_given=None)
    assert "\n" not in str(error.value)
    assert "decision.alpha=0.01" in str(error.value)
    (proposal,) = str(error.value).split("e.g. ")[1:]
    assert proposal == "decision.look_alphas=[0.004,0.003,0.003]"
    fitting = DecisionRule(alpha=0.01, look_alphas=(0.004, 0.003, 0.003))
    assert SeedPlan.of(fitting, seeds_given=None).alphas == (0.004, 0.003, 0.003)


@pytest.mark.parametrize(("alpha", "looks"), [(0.05, 3), (0.05, 1), (0.01, 7), (0.02, 6)])
def test_the_levels_that_a_refusal_proposes_are_allowed(alpha: float, looks: int) -> None:
    """Rounded to three digits they must not add up to more than alpha: 3 * 0.0167 does."""
    settings = {"alpha": alpha, "looks": list(range(3, 3 + looks))}
    too_much = DecisionRule.from_mapping({**settings, "look_alphas": [0.4] * looks})
    refusals = []
    with pytest.raises(ValueError, match="add up to") as error:
        SeedPlan.of(too_much, seeds_given=None)
    refusals.append(str(error.value))
    with pytest.raises(ValueError, match="one level for each") as error:
        DecisionRule.from_mapping({**settings, "look_alphas": [0.001] * (looks + 1)})
    refusals.append(str(error.value))
    for refusal in refusals:
        proposal = json.loads(refusal.split("e.g. decision.look_alphas=")[1])
        rule = DecisionRule.from_mapping({**settings, "look_alphas": proposal})
        assert SeedPlan.of(rule, seeds_given=None).alphas == tuple(proposal)
        assert sum(proposal) == pytest.approx(alpha, rel=0.01)


@pytest.mark.parametrize("rule", [RULE, DecisionRule(seeds=4), DecisionRule(always_valid=True)])
def test_a_plan_survives_being_stored(rule: DecisionRule) -> None:
    plan = SeedPlan.of(rule, seeds_given=None)
    assert SeedPlan.from_mapping(plan.as_mapping()) == plan
