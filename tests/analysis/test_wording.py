"""How differences and margins are spelled; oracles are hand-written sentences."""

from __future__ import annotations

import math

import pytest

from harness.analysis.decision import estimate
from harness.analysis.findings import Estimate
from harness.analysis.rule import DecisionRule
from harness.analysis.wording import in_words, margin_basis, multiple

RULE = DecisionRule()


@pytest.mark.parametrize(
    ("relative", "wanted"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1e-9, "<0.01"),
        (-0.0049, ">-0.01"),
        (0.0051, "+0.01"),
        (-0.126, "-0.13"),
        (1.0, "+1.00"),
        # Near the boundary the digits tell the side; 0.9999999999 has more than any reader needs.
        (1.0015, "+1.002"),
        (0.9951, "+0.995"),
        (1.00003, "+1.000030"),
        (-1.0004, "-1.0004"),
        (1.83, "+1.83"),
        (9.996, "+10.0"),
        (16.08, "+16.1"),
        (-123.4, "-123"),
        (123456.0, "+1.2e+05"),
        (math.nan, "NaN"),
        (-math.inf, "-inf"),
    ],
)
def test_multiple(relative: float, wanted: str) -> None:
    assert multiple(relative) == wanted


def test_differences_are_margins_whatever_their_size() -> None:
    assert in_words(0.0026, 0.02) == "+0.13 margins"
    assert in_words(0.0366, 0.02) == "+1.83 margins"
    assert in_words(0.0366, 0.02, signed=False) == "1.83 margins"
    assert in_words(1e-5, 0.02) == "<0.01 margins"
    assert in_words(0.0366, 0.02, unit=False) == "+1.83"
    assert in_words(0.0366, 0.0) == "+0.0366"
    assert in_words(None, 0.02) == "unknown"


def _estimate(term: str) -> Estimate:
    return estimate(
        (0.0, 0.0, 0.0),
        unit="nats",
        margin=0.02,
        margin_term=term,
        progress=2.1224,
        reference_loss=0.6317,
        num_endpoints=1,
        rule=RULE,
    )


@pytest.mark.parametrize(
    ("term", "wanted"),
    [
        ("progress", "1 % of what FP32 learned (2.12 nats)"),
        ("loss", "2 % of FP32's loss at the end (0.632 nats)"),
        ("seed_sd", "50 % of the spread of FP32's held-out loss over seeds"),
        ("cap", "5 % of what FP32 learned (2.12 nats), the most that is allowed"),
        ("user", "your own (decision.margin)"),
    ],
)
def test_the_margin_is_explained_by_the_term_that_set_it(term: str, wanted: str) -> None:
    assert margin_basis(_estimate(term), RULE.as_mapping()) == wanted


def test_a_constant_of_ones_own_shows_and_an_unknown_one_is_left_out() -> None:
    rule = DecisionRule(margin_progress=0.025)
    text = margin_basis(_estimate("progress"), rule.as_mapping())
    assert text.startswith("2.5 % of what FP32 learned")
    assert margin_basis(_estimate("loss"), {}).startswith("a share of FP32's loss")
