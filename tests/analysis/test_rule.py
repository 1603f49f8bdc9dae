"""The rule's constants: the YAML is complete and equal to the defaults; bad values are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from harness.analysis.decision import DecisionRule

YAML = Path(__file__).parents[2] / "conf" / "decision" / "default.yaml"


def test_yaml_holds_every_constant_with_its_default() -> None:
    data = yaml.safe_load(YAML.read_text(encoding="utf-8"))
    assert data == DecisionRule().as_mapping()
    assert DecisionRule.from_mapping(data) == DecisionRule()


def test_every_constant_is_explained_where_it_is_set() -> None:
    lines = YAML.read_text(encoding="utf-8").splitlines()
    for field in dataclasses.fields(DecisionRule):
        (line,) = [text for text in lines if text.startswith(f"{field.name}:")]
        explained = "#" in line or field.name == "margin_held_out"  # shares its neighbour's line
        assert explained, field.name


def test_non_default_values_arrive() -> None:
    rule = DecisionRule.from_mapping(
        {"alpha": 0.02, "max_pairs": 5, "familywise": True, "margin_train": 0.1, "gross_margins": 4}
    )
    assert (rule.alpha, rule.max_pairs, rule.familywise) == (0.02, 5, True)
    assert (rule.margin_train, rule.gross_margins) == (0.1, 4)


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
        ("margin_train", -0.1, "> 0"),
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


def test_an_unknown_key_gets_the_closest_known_one() -> None:
    with pytest.raises(ValueError, match=r"decision\.alfa does not exist; did you mean .*alpha"):
        DecisionRule.from_mapping({"alfa": 0.05})
