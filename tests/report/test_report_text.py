"""Numbers and names as text; oracles are hand-written spellings."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import estimate, make_findings, make_verdict

from harness.analysis.findings import Ratio
from harness.report import text


@pytest.mark.parametrize(
    ("value", "digits", "wanted"),
    [
        (None, 4, "n/a"),
        (math.nan, 4, "non-finite"),
        (-math.inf, 4, "non-finite"),
        (0.0, 4, "0"),
        (1.23456, 4, "1.235"),
        (0.00012345, 3, "0.000123"),
        (1.2345e-7, 3, "1.23e-07"),
        (-123456.0, 3, "-123456"),
        (1.5e9, 2, "1.5e+09"),
    ],
)
def test_significant(value: float | None, digits: int, wanted: str) -> None:
    assert text.significant(value, digits) == wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, "n/a"),
        (math.nan, "non-finite"),
        (0.0, "0"),
        (0.001, "<0.01"),
        (-0.001, ">-0.01"),
        (1.0015, "+1.002"),
        (-0.126, "-0.13"),
        (16.08, "+16.1"),
        (-123.4, "-123"),
        (123456.0, "+1.2e+05"),
    ],
)
def test_margins_text(value: float | None, wanted: str) -> None:
    assert text.margins_text(value) == wanted


def test_difference_text_scales_by_the_margin() -> None:
    one = dataclasses.replace(
        estimate((0.01, 0.01, 0.01), margin=0.02), mean_difference=0.01, ci_low=-0.02, ci_high=0.05
    )
    assert text.difference_text(one) == "+0.50 [-1.00, +2.50]"
    assert text.difference_text(dataclasses.replace(one, ci_low=None)) == "+0.50"
    assert text.difference_text(dataclasses.replace(one, margin=0.0)) == "n/a"
    assert text.difference_text(None) == "n/a"


def test_an_interval_without_an_end_says_so() -> None:
    one = estimate((0.01, 0.03), margin=0.1)
    open_below = dataclasses.replace(one, ci_low=-math.inf)
    assert text.difference_text(open_below).startswith("+0.20 [-inf, +")
    assert text.interval_text(0.2, -math.inf, 143.0) == "+0.20 [-inf, +143]"
    assert text.interval_text(0.2, math.nan, math.nan) == "+0.20"


def test_worst_endpoint_is_the_one_that_reaches_furthest_in_margins() -> None:
    # Held-out is smaller in nats but larger in its own, tighter margin.
    train = dataclasses.replace(estimate((0.0, 0.0), margin=0.1), ci_high=0.05)
    held_out = dataclasses.replace(estimate((0.0, 0.0), margin=0.01), ci_high=0.02)
    verdict = make_verdict(estimates={"train": train, "held_out": held_out})
    assert text.worst_endpoint(verdict) == "held_out"
    broken = dataclasses.replace(train, mean_difference=math.nan, ci_high=None)
    verdict = make_verdict(estimates={"train": broken, "held_out": held_out})
    assert text.worst_endpoint(verdict) == "train"
    assert text.worst_endpoint(make_verdict(estimates={})) is None


def test_ratio_and_bytes() -> None:
    assert text.ratio_text(Ratio(value=0.8, ci_low=0.7, ci_high=0.91), interval=True) == (
        "0.80x [0.70, 0.91]"
    )
    assert text.ratio_text(Ratio(value=math.nan)) == "n/a"
    assert text.ratio_text(None) == "n/a"
    assert text.bytes_text(None) == "n/a"
    assert text.bytes_text(1536) == "1.50 KiB"
    assert text.bytes_text(3 * 2**30) == "3.00 GiB"
    assert text.percent_text(0.632) == "63.2 %"
    assert text.percent_text(math.nan) == "non-finite"


@pytest.mark.parametrize("name", ["char_gpt", "my-model.v2", "A"])
def test_safe_name_keeps_plain_names(name: str) -> None:
    assert text.safe_name(name) == name


@given(st.text(), st.text())
def test_safe_name_is_one_component_and_tells_names_apart(first: str, second: str) -> None:
    safe = text.safe_name(first)
    assert safe
    assert safe not in {".", ".."}
    assert not set(safe) & set('/\\<>:"|?*\0 ')
    assert len(safe) <= 90
    if first != second:
        assert safe != text.safe_name(second)


def test_safe_name_of_a_path_stays_in_its_folder() -> None:
    assert text.safe_name("../../etc/passwd").startswith("_.._etc_passwd-")


def test_used_codes_come_once_in_order() -> None:
    findings = make_findings(make_verdict("tf32"), make_verdict("bf16"))
    assert text.used_codes(findings) == ("NONINFERIOR", "PROBE_MISSING")


def test_flattened_nests_with_dots() -> None:
    data = {"a": {"b": 1, "c": {"d": None}}, "e": [1, 2], "f": {}}
    assert list(text.flattened(data)) == [
        ("a.b", "1"),
        ("a.c.d", "n/a"),
        ("e", "1, 2"),
        ("f", "{}"),
    ]


def test_codes_of_the_early_checks_are_explained_too() -> None:
    explained = text.code_explanations(("BATCHES_NOT_REPRODUCIBLE", "NONINFERIOR", "NO_SUCH_CODE"))
    assert list(explained) == ["BATCHES_NOT_REPRODUCIBLE", "NONINFERIOR"]
