"""The rule's constants: the YAML is complete and equal to the defaults; bad values are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from harness.analysis.decision import DecisionRule
from harness.analysis.user_margin import parse_margin

YAML = Path(__file__).parents[2] / "conf" / "decision" / "default.yaml"


def test_yaml_holds_every_constant_with_its_default() -> None:
    data = yaml.safe_load(YAML.read_text(encoding="utf-8"))
    assert data == DecisionRule().as_mapping()
    assert DecisionRule.from_mapping(data) == DecisionRule()


def test_every_constant_is_explained_where_it_is_set() -> None:
    lines = YAML.read_text(encoding="utf-8").splitlines()
    for field in dataclasses.fields(DecisionRule):
        (line,) = [text for text in lines if text.startswith(f"{field.name}:")]
        assert "#" in line, field.name


def test_non_default_values_arrive() -> None:
    rule = DecisionRule.from_mapping(
        {
            "alpha": 0.02,
            "max_pairs": 5,
            "familywise": True,
            "margin": 0.1,
            "gross_margins": 4,
            "looks": [3, 6, 10],
            "look_alphas": [0.01, 0.005, 0.005],
            "seeds": 4,
            "always_valid": True,
            "try_fallback": True,
        }
    )
    assert (rule.alpha, rule.max_pairs, rule.familywise) == (0.02, 5, True)
    assert (rule.margin, rule.gross_margins) == (0.1, 4)
    assert (rule.looks, rule.look_alphas) == ((3, 6, 10), (0.01, 0.005, 0.005))
    assert (rule.seeds, rule.always_valid, rule.try_fallback) == (4, True, True)
    assert DecisionRule.from_mapping(rule.as_mapping()) == rule


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("alpha", 0.6, "in (0, 0.5)"),
        ("alpha", "5%", "a number"),
        ("alpha", True, "a number"),
        ("alpha", float("nan"), "in (0, 0.5)"),
        ("alpha", None, "a number"),
        ("min_pairs", 1, ">= 2"),
        ("min_pairs", 3.5, "a whole number"),
        ("familywise", 1, "true or false"),
        ("margin", -0.1, "> 0"),
        ("margin", 0, "> 0"),
        ("margin", float("inf"), "> 0"),
        ("margin", True, "a number"),
        ("margin", "2 per cent", '"2 %"'),
        ("margin", "-2 %", "> 0"),
        ("margin", "% 2", "> 0"),
        ("seeds", 0, ">= 1"),
        ("seeds", 2.5, "a whole number"),
        ("looks", [], "increasing numbers of pairs"),
        ("looks", [3, 3, 8], "increasing numbers of pairs"),
        ("looks", [8, 5, 3], "increasing numbers of pairs"),
        ("looks", [2, 5, 8], "the first >= decision.min_pairs=3, the last <= 1000"),
        ("looks", 3, "a list like [3,5,8]"),
        ("looks", "3,5,8", "a list like [3,5,8]"),
        ("look_alphas", [0.02, 0.03], "one level for each of decision.looks=[3, 5, 8]"),
        ("max_pairs", 2, ">= decision.min_pairs"),
    ],
)
def test_bad_values_name_key_value_and_what_is_allowed(
    key: str, value: object, allowed: str
) -> None:
    with pytest.raises(ValueError, match=f"decision.{key}") as error:
        DecisionRule.from_mapping({key: value})
    assert repr(value) in str(error.value)
    assert allowed in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "item"),
    [
        ("looks", [3, 5.5, 8], 5.5),
        ("looks", [3, True, 8], True),
        ("look_alphas", [0.02, 0.6, 0.01], 0.6),
        ("look_alphas", [0.02, float("nan"), 0.01], float("nan")),
    ],
)
def test_bad_items_of_a_list_are_named(key: str, value: object, item: object) -> None:
    with pytest.raises(ValueError, match=f"decision.{key}={item!r} is not allowed"):
        DecisionRule.from_mapping({key: value})


@pytest.mark.parametrize(
    ("value", "size", "basis"),
    [
        (0.02, 0.02, "loss"),
        (1, 1.0, "loss"),
        ("0.02", 0.02, "loss"),
        ("1e-3", 0.001, "loss"),
        ("2 %", 2.0, "progress"),
        (" 0.5%", 0.5, "progress"),
        ("0.3 own", 0.3, "own"),
        ("1e-3own", 0.001, "own"),
    ],
)
def test_forms_of_a_margin(value: float | str, size: float, basis: str) -> None:
    margin = parse_margin(value)
    assert margin is not None
    assert (margin.size, margin.basis) == (size, basis)
    assert parse_margin(margin.text) == margin


def test_without_a_margin_the_formula_stands() -> None:
    assert parse_margin(None) is None


def test_an_unknown_key_gets_the_closest_known_one() -> None:
    with pytest.raises(ValueError, match=r"decision\.alfa does not exist; did you mean .*alpha"):
        DecisionRule.from_mapping({"alfa": 0.05})
