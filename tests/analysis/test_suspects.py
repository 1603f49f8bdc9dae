"""Which module is named: where harm starts before where it shows, the innermost, and only one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.analysis.probe_findings import MAX_SUSPICION, ModuleFinding
from harness.analysis.rule import DecisionRule
from harness.analysis.suspects import (
    contains,
    error_outliers,
    guilty,
    guilty_sentence,
    largest_exact_integer,
    rank,
)
from harness.precision.policy import PrecisionPolicy

RULE = DecisionRule()
BF16 = PrecisionPolicy(name="bf16", compute_format="bf16")
PURE = PrecisionPolicy(name="bf16_pure", compute_format="bf16", param_format="bf16")


def ranked(*modules: ModuleFinding, policy: PrecisionPolicy = BF16, triage: Any = None) -> Any:
    return rank(modules, policy=policy, triage=triage, rule=RULE)


def module(name: str, **fields: Any) -> ModuleFinding:
    return ModuleFinding(module=name, **fields)


def test_a_container_is_not_blamed_for_what_is_inside_it() -> None:
    modules = [
        module("(model)", local_forward_error=0.9),
        module("net", local_forward_error=0.9),
        module("net.bad", local_forward_error=0.5),
        module("net.good", local_forward_error=1e-3),
        module("head", local_forward_error=1e-3),
    ]
    assert guilty(ranked(*modules), RULE).module == "net.bad"
    assert [m.module for m in error_outliers(modules, BF16, RULE)] == ["net.bad"]


def test_a_containers_own_code_is_blamed_where_nothing_inside_it_is() -> None:
    found = guilty(
        ranked(
            module("(model)", local_forward_error=0.9),
            module("net.a", local_forward_error=1e-3),
            module("net.b", local_forward_error=2e-3),
        ),
        RULE,
    )
    assert found.module == "(model)"
    assert guilty_sentence(found).startswith("look at the model's own forward: given FP32's own")


def test_where_harm_starts_outranks_where_it_shows() -> None:
    rows = ranked(
        module("loud", noise_ratio=1e4),
        module("start", local_forward_error=0.06),
        module("calm", local_forward_error=1e-4),
    )
    assert [m.module for m in rows] == ["start", "loud", "calm"]
    assert rows[0].suspicion == pytest.approx(0.06 / RULE.module_error)
    assert rows[1].suspicion < 1
    assert rows[1].evidence == ""


def test_gradients_name_a_module_only_if_it_stands_out() -> None:
    alike = ranked(*(module(name, noise_ratio=0.5) for name in "abcd"))
    assert all(m.suspicion == pytest.approx(5) for m in alike)
    assert guilty(alike, RULE) is None
    one = ranked(module("a", noise_ratio=0.5), *(module(n, noise_ratio=0.01) for n in "bcd"))
    assert guilty(one, RULE).module == "a"


def test_modules_without_weights_do_not_make_one_with_weights_stand_out() -> None:
    """Underflow everywhere: every gradient is gone, and activations have none to lose."""
    gone = [module(name, noise_ratio=0.5) for name in "abc"]
    assert guilty(ranked(*gone, *(module(name) for name in "vwxyz")), RULE) is None


def test_of_several_that_overflow_the_first_is_named() -> None:
    rows = ranked(*(module(n, nonfinite=("output of mm in BF16",)) for n in "abc"))
    assert guilty(rows, RULE).module == "a"
    assert all(m.starts_here for m in rows)


def test_an_error_that_all_modules_share_is_the_format_and_no_module() -> None:
    """FP8 rounds every product's output by several percent, and the others' not at all."""
    fp8 = [module(n, local_forward_error=0.06) for n in "ab"]
    fp8 += [module(n, local_forward_error=0.0) for n in "vwxyz"]
    policy = PrecisionPolicy(name="fp8", compute_format="fp8_e4m3")
    assert error_outliers(fp8, policy, RULE) == []
    assert [m.module for m in error_outliers(fp8, BF16, RULE)] == ["a", "b"]
    modules = [module(name, local_forward_error=0.06) for name in "abcd"]
    assert error_outliers(modules, BF16, RULE) == []
    assert guilty(ranked(*modules), RULE) is None


def test_triage_outranks_everything_and_is_quoted() -> None:
    triage = {"module": "b", "sentence": "step 3: output of `b` overflows."}
    rows = ranked(
        module("a", local_forward_error=0.9), module("b"), module("c"), triage=triage, policy=BF16
    )
    assert guilty(rows, RULE).module == "b"
    assert guilty_sentence(rows[0]) == "look at `b`: step 3: output of `b` overflows."


def test_a_wrong_loss_scale_or_learning_rate_is_no_modules_fault() -> None:
    for cause, blamed in (("loss_scale", False), ("learning_rate", False), ("layer", True)):
        triage = {"module": "b", "cause": cause, "sentence": "s."}
        rows = ranked(module("a"), module("b"), module("c"), triage=triage)
        assert (guilty(rows, RULE) is not None) is blamed


def test_lost_updates_count_for_weights_that_round_to_nearest_alone() -> None:
    rows = [module("a", lost_update_share=0.9), *(module(n, lost_update_share=0.1) for n in "bcd")]
    assert guilty(ranked(*rows, policy=PURE), RULE).module == "a"
    assert guilty(ranked(*rows, policy=BF16), RULE) is None
    rounded = PrecisionPolicy(
        name="s", compute_format="bf16", param_format="bf16", weight_rounding="stochastic"
    )
    assert guilty(ranked(*rows, policy=rounded), RULE) is None


def test_what_is_not_a_number_blames_nobody_and_infinity_is_bounded() -> None:
    rows = ranked(module("a", noise_ratio=math.nan), module("b", noise_ratio=math.inf))
    assert [m.suspicion for m in rows] == [MAX_SUSPICION, 0.0]
    (only,) = ranked(module("a", local_forward_error=math.nan))
    assert only.suspicion == MAX_SUSPICION
    assert "not finite" in only.evidence


def test_nothing_measured_names_nobody() -> None:
    assert guilty(ranked(module("a"), module("b")), RULE) is None
    assert guilty((), RULE) is None


@pytest.mark.parametrize(
    ("fmt", "largest"),
    [("bf16", 256), ("fp16", 2048), ("tf32", 2048), ("fp8_e4m3", 16), ("e5m3", 16)],
)
def test_whole_numbers_that_a_format_holds(fmt: str, largest: int) -> None:
    assert largest_exact_integer(fmt) == largest


def test_containment() -> None:
    assert contains("a", "a.b.c")
    assert contains("(model)", "a")
    assert not contains("a", "a")
    assert not contains("a", "ab")
