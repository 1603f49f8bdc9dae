"""Margins and levels against their formulas, written out by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from factories import diverged, make_record, with_series

from harness.analysis.decision import DecisionRule
from harness.analysis.endpoints import (
    OWN_UNIT,
    head_loss,
    measure_levels,
    paired_difference,
    tail_evaluations,
    tail_start,
    train_tail,
)
from harness.runs.record import RunRecord

RULE = DecisionRule()


def references(**keywords: object) -> list[RunRecord]:
    return [make_record("fp32", seed, **keywords) for seed in range(3)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("steps", "start"), [(300, 200), (100, 66), (1, 0), (2, 1)])
def test_tail_is_the_last_third(steps: int, start: int) -> None:
    assert tail_start(steps, RULE) == start


def test_the_evaluation_before_training_is_never_in_the_tail() -> None:
    assert tail_evaluations(make_record("fp32", num_steps=1), RULE) == (1,)
    assert tail_evaluations(make_record("fp32"), RULE) == (88, 96, 104, 112, 120)


def test_differences_are_tail_means_of_both_endpoints() -> None:
    reference, candidate = make_record("fp32", 3), make_record("bf16", 3, offset=0.25)
    a, b = np.array(reference.series["loss"]), np.array(candidate.series["loss"])
    assert paired_difference(candidate, reference, "train", RULE) == pytest.approx(
        np.mean(b[80:]) - np.mean(a[80:])
    )
    assert paired_difference(candidate, reference, "held_out", RULE) == pytest.approx(0.25)


def test_a_run_that_ended_early_has_no_difference() -> None:
    reference, candidate = make_record("fp32", 3), diverged(make_record("bf16", 3))
    assert math.isnan(paired_difference(candidate, reference, "train", RULE))
    assert math.isnan(paired_difference(candidate, reference, "held_out", RULE))


def test_progress_comes_from_the_held_out_loss_for_both_endpoints() -> None:
    levels = measure_levels(references(), RULE)
    held = [r.held_out for r in references()]
    gains = [h.loss[0] - np.mean(h.loss[1:]) for h in held if h is not None]
    assert levels["train"].progress == levels["held_out"].progress == pytest.approx(np.mean(gains))
    assert levels["train"].learned == pytest.approx(
        np.mean(np.divide(gains, [h.loss[0] for h in held if h]))
    )
    assert levels["train"].tail == pytest.approx(
        np.mean([train_tail(r, RULE) for r in references()])
    )


def test_without_a_held_out_set_the_head_of_training_counts() -> None:
    runs = references(held_out=False)
    levels = measure_levels(runs, RULE)
    assert set(levels) == {"train"}
    expected = np.mean([head_loss(r, RULE) - train_tail(r, RULE) for r in runs])
    assert levels["train"].progress == pytest.approx(expected)
    assert levels["train"].sigma is None


def test_an_eval_fn_in_its_own_unit_is_never_mixed_with_the_loss() -> None:
    runs = references(held_out_unit="own units")
    levels = measure_levels(runs, RULE)
    assert levels["held_out"].unit == "own units"
    assert levels["train"].unit == "loss units"
    expected = np.mean([head_loss(r, RULE) - train_tail(r, RULE) for r in runs])
    assert levels["train"].progress == pytest.approx(expected)
    assert levels["train"].sigma is None
    assert levels["held_out"].sigma is not None


def test_seed_sd_needs_one_held_out_set_for_all_seeds() -> None:
    runs = references(seed_sd=0.2)
    sigma = measure_levels(runs, RULE)["train"].sigma
    tails = [np.mean(r.held_out.loss[1:]) for r in runs if r.held_out is not None]
    assert sigma == pytest.approx(np.std(tails, ddof=1))
    prints = dataclasses.replace(runs[1].fingerprints, held_out_sha256="e" * 64)
    runs[1] = dataclasses.replace(runs[1], fingerprints=prints)
    assert measure_levels(runs, RULE)["train"].sigma is None
    assert measure_levels(references(seed_sd=0.2)[:2], RULE)["train"].sigma is None


CASES: list[tuple[dict[str, float], str, Callable[[float, float, float], float]]] = [
    # L is large, seeds are alike: 1 % of what was learned.
    ({"floor": 2.0, "seed_sd": 0.0}, "progress", lambda d, loss, sigma: 0.01 * d),
    # L is small: 2 % of it.
    ({"floor": 0.3, "seed_sd": 0.0}, "loss", lambda d, loss, sigma: 0.02 * loss),
    ({"floor": 2.0, "seed_sd": 1.0}, "seed_sd", lambda d, loss, sigma: 0.5 * sigma),
    ({"floor": 2.0, "seed_sd": 4.0}, "cap", lambda d, loss, sigma: 0.05 * d),
]


@pytest.mark.parametrize(("keywords", "term", "formula"), CASES)
def test_margin_and_the_term_that_set_it(
    keywords: dict[str, float], term: str, formula: Callable[[float, float, float], float]
) -> None:
    level = measure_levels(references(**keywords), RULE)["held_out"]
    assert level.margin_term == term
    assert level.margin == pytest.approx(formula(level.progress, level.tail, level.sigma or 0.0))


def test_a_loss_that_can_be_negative_has_no_loss_term() -> None:
    level = measure_levels(references(start=1.0, floor=-0.5, seed_sd=0.0), RULE)["train"]
    assert (level.margin_term, level.tail < 0) == ("progress", True)
    assert level.margin == pytest.approx(0.01 * level.progress)


def test_one_negative_loss_is_enough_to_leave_the_loss_term_out() -> None:
    runs = references(start=1.0, floor=0.2, seed_sd=0.0, held_out=False)
    assert measure_levels(runs, RULE)["train"].margin_term == "loss"
    runs[0] = with_series(runs[0], loss=[*runs[0].series["loss"][:-1], -0.01])
    assert measure_levels(runs, RULE)["train"].margin_term == "progress"


def test_margin_of_ones_own_and_of_a_reference_that_learned_nothing() -> None:
    formula = measure_levels(references(), RULE)
    for endpoint, level in measure_levels(references(), DecisionRule(margin=0.3)).items():
        assert (level.margin, level.margin_term) == (0.3, "user")
        assert level.formula_margin == formula[endpoint].margin == formula[endpoint].formula_margin
    assert measure_levels(references(start=2.0, floor=2.5), RULE)["train"].margin == 0.0


def test_a_margin_in_one_unit_leaves_an_endpoint_in_another_to_the_formula() -> None:
    runs = references(held_out_unit=OWN_UNIT)
    formula = measure_levels(runs, RULE)
    of_loss = measure_levels(runs, DecisionRule(margin=0.3))
    assert (of_loss["train"].margin, of_loss["held_out"]) == (0.3, formula["held_out"])
    own = measure_levels(runs, DecisionRule(margin="0.3 own"))
    assert (own["held_out"].margin, own["train"]) == (0.3, formula["train"])
    assert own["held_out"].margin_term == "user"
    share = measure_levels(runs, DecisionRule(margin="3 %"))
    for endpoint, level in share.items():
        assert level.margin_term == "user"
        assert level.margin == pytest.approx(0.03 * formula[endpoint].progress)


def test_a_share_of_nothing_learned_is_no_margin() -> None:
    level = measure_levels(references(start=2.0, floor=2.5), DecisionRule(margin="3 %"))["train"]
    assert (level.margin, level.margin_term) == (0.0, "progress")


@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_everything_scales_with_the_loss(scale: float) -> None:
    """No absolute tolerance anywhere: scaled losses give scaled margins."""

    def scaled(record: RunRecord) -> RunRecord:
        held = record.held_out
        assert held is not None
        record = with_series(record, loss=[scale * x for x in record.series["loss"]])
        loss = tuple(scale * x for x in held.loss)
        return dataclasses.replace(record, held_out=dataclasses.replace(held, loss=loss))

    runs = references(seed_sd=0.05)
    plain = measure_levels(runs, RULE)
    for endpoint, level in measure_levels([scaled(r) for r in runs], RULE).items():
        assert level.margin_term == plain[endpoint].margin_term
        assert level.margin == pytest.approx(scale * plain[endpoint].margin, rel=1e-9)
