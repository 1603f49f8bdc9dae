"""The non-inferiority test: A/A and power over many simulated experiments, and its invariances."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
from factories import diverged, make_grid, with_series

from harness.analysis import statistics
from harness.analysis.decision import DecisionRule, TestResult, estimate, non_inferiority
from harness.analysis.findings import Endpoint, Estimate

RULE = DecisionRule()


def estimates_of(*endpoints: tuple[float, ...], margin: float = 1.0) -> dict[Endpoint, Estimate]:
    names: tuple[Endpoint, ...] = ("train", "held_out")
    return {
        name: estimate(
            differences,
            unit="nats",
            margin=margin,
            margin_term="progress",
            progress=100 * margin,
            reference_loss=2.0,
            num_endpoints=len(endpoints),
            rule=RULE,
        )
        for name, differences in zip(names, endpoints, strict=False)
    }


def decide(*endpoints: tuple[float, ...], margin: float = 1.0) -> TestResult:
    return non_inferiority(estimates_of(*endpoints, margin=margin), rule=RULE)


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_aa_and_power_over_simulated_experiments(seeds: int) -> None:
    """A/A: thousands of null pairs are never rejected beyond alpha; harm is never accepted so.

    Differences on the two endpoints are correlated, as they are in trainings.
    """
    rng = np.random.default_rng(seeds)
    trials = 2000

    def rates(shift: float, spread: float) -> tuple[float, float]:
        shared = rng.standard_normal((trials, 1, seeds))
        own = rng.standard_normal((trials, 2, seeds))
        draws = shift + spread * (0.8 * shared + 0.6 * own)
        outcomes = [decide(tuple(d[0]), tuple(d[1])).outcome for d in draws]
        return outcomes.count("accept") / trials, outcomes.count("reject") / trials

    # 3 binomial standard errors of a 5 % rate over 2000 trials: 0.015.
    slack = 0.015
    # Null: 0.02 by a wide margin, since the mean lies a whole margin inside.
    accept, reject = rates(0.0, 0.3)
    assert reject <= 0.002
    assert accept > (0.4 if seeds == 3 else 0.9)
    # At the margin itself: both errors at most alpha.
    accept, reject = rates(1.0, 0.3)
    assert accept <= 0.05 + slack
    assert reject <= 0.05 + slack
    accept, reject = rates(3.0, 0.3)
    assert accept == 0.0
    assert reject > 0.6


def test_bitwise_equal_runs_are_accepted() -> None:
    result = decide((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    assert (result.outcome, result.p_accept, result.p_reject) == ("accept", 0.0, 1.0)


def test_constant_differences_need_no_rule_of_their_own() -> None:
    assert decide((0.5,) * 3).outcome == "accept"
    assert decide((1.5,) * 3).outcome == "reject"
    assert decide((1.0,) * 3).outcome == "inconclusive"


def test_the_interval_has_the_levels_that_are_tested() -> None:
    differences = (0.1, 0.4, -0.2, 0.3)
    for count, alpha_reject in ((1, 0.05), (2, 0.025)):
        e = estimates_of(*[differences] * count)["train"]
        half = np.std(differences, ddof=1) / math.sqrt(4)
        assert e.ci_high == pytest.approx(0.15 + statistics.t_quantile(0.95, 3) * half)
        assert e.ci_low == pytest.approx(0.15 - statistics.t_quantile(1 - alpha_reject, 3) * half)
        assert (e.alpha_accept, e.alpha_reject) == (0.05, alpha_reject)
        assert e.confidence == pytest.approx(0.95 - alpha_reject)


def test_p_values_agree_with_the_decision() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        draws = [tuple(rng.normal(rng.uniform(-1, 3), 0.5, 3)) for _ in range(2)]
        result = decide(*draws)
        assert result.p_accept is not None
        assert result.p_reject is not None
        assert (result.outcome == "accept") == (result.p_accept < 0.05)
        assert (result.outcome == "reject") == (result.p_reject < 0.05)


def test_either_endpoint_can_reject_and_both_must_accept() -> None:
    good, bad, wide = (0.0, 0.01, 0.02), (2.0, 2.01, 2.02), (-3.0, 0.0, 3.0)
    assert decide(good, bad).reason.code == "INFERIOR_HELDOUT"
    assert decide(bad, good).reason.code == "INFERIOR_TRAIN"
    assert decide(good, wide).reason.code == "CI_SPANS_MARGIN"
    assert decide(good, good).reason.code == "NONINFERIOR"


@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_too_few_pairs_decide_nothing(pairs: int) -> None:
    result = decide((5.0,) * pairs) if pairs else non_inferiority({}, rule=RULE)
    assert (result.outcome, result.reason.code) == ("inconclusive", "TOO_FEW_SEEDS")


def test_nan_is_never_averaged_away() -> None:
    result = decide((0.0, math.nan, 0.0))
    assert result.outcome == "inconclusive"
    assert (result.p_accept, result.p_reject) == (None, None)
    e = estimates_of((0.0, math.nan, 0.0))["train"]
    assert math.isnan(e.mean_difference)
    assert (e.sd, e.ci_low, e.ci_high, e.num_pairs) == (None, None, None, 3)


SPEC: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32_twin": {"luck": 0.002},
    "bf16": {"luck": 0.002},
    "fp16": {"luck": 0.03},
    "bf16_pure": {"offset": 0.05, "luck": 0.004},
}


def test_the_order_of_records_and_seeds_is_irrelevant(analysis: Any) -> None:
    records = make_grid(SPEC)
    shuffled = records[:]
    random.Random(0).shuffle(shuffled)
    policies = list(SPEC)
    plain = analysis.findings(records, policies=policies)
    mixed = analysis.findings(shuffled, policies=policies)
    assert plain == mixed
    other = analysis.findings(records, policies=policies, seeds=(2, 0, 1))
    assert [v.outcome for v in other.verdicts] == [v.outcome for v in plain.verdicts]
    assert [v.estimates for v in other.verdicts] == [v.estimates for v in plain.verdicts]


def test_a_hopeless_candidate_does_not_change_anothers_verdict(analysis: Any) -> None:
    records = make_grid({name: SPEC[name] for name in ("fp32", "bf16", "fp16")})
    alone = analysis.findings(records)
    hopeless = [diverged(r) for r in make_grid({"bf16_pure": {}})]
    crowded = analysis.findings([*records, *hopeless])
    for before, after in zip(alone.verdicts, crowded.verdicts, strict=False):
        # Only Holm's adjustment knows of the others.
        assert dataclasses.replace(after, p_accept_holm=before.p_accept_holm) == before


def test_the_control_is_computed_but_never_counts(analysis: Any) -> None:
    findings = analysis.findings(make_grid(SPEC))
    (control,) = [v for v in findings.verdicts if v.is_control]
    assert control.policy == "fp32_twin"
    assert control.estimates["train"].ci_high is not None
    # Not tested, so no code of the test: it must not read as if it had passed.
    assert [r.code for r in control.reasons if r.kind in ("test", "caveat")] == ["CONTROL"]
    assert control.p_accept_holm is None
    only = analysis.findings(make_grid({"fp32": {}, "fp32_twin": {}}))
    assert only.choice.policy == "fp32"


def test_holm_binds_only_when_asked(analysis: Any) -> None:
    """Four candidates, each accepted at p between 1.25 % and 5 %."""
    names = ("bf16", "bf16_fallback", "fp16", "fp16_unscaled")
    shifts = (-0.008, 0.0, 0.008)

    def shifted(records: list[Any]) -> list[Any]:
        return [
            r
            if r.policy == "fp32"
            else with_series(r, loss=[x + shifts[r.seed] for x in r.series["loss"]])
            for r in records
        ]

    records = shifted(make_grid(["fp32", *names], held_out=False))
    free = analysis.findings(records)
    assert free.choice.policy == "bf16"
    assert any(r.startswith("Adjusted for the number of") for r in free.choice.reasons)
    chosen = free.verdicts[0]
    assert chosen.p_accept is not None
    assert chosen.p_accept < 0.05 < (chosen.p_accept_holm or 0)
    assert chosen.reasons[-1].code == "HOLM_NOT_MET"
    assert chosen.reasons[-1].kind == "warning"
    bound = analysis.findings(records, rule=DecisionRule(familywise=True))
    assert {v.outcome for v in bound.verdicts} == {"inconclusive"}
    assert bound.verdicts[0].main_reason.code == "HOLM_NOT_MET"
    assert bound.choice.policy == "fp32"


def test_losses_near_1e_minus_7_are_judged_like_losses_near_1(analysis: Any) -> None:
    """No absolute tolerance: a dead layer at 1e-7 is rejected, a benign candidate accepted."""
    records = make_grid(
        {
            "fp32": {},
            "bf16": {"luck": 1e-10},
            "fp16_unscaled": {"offset": 3e-7},
        },
        start=5e-7,
        floor=9e-8,
        noise=0.01,
        seed_sd=0.0,
        held_out=False,
    )
    findings = analysis.findings(records)
    outcomes = {v.policy: v.outcome for v in findings.verdicts}
    assert outcomes == {"bf16": "accept", "fp16_unscaled": "reject"}


def test_negative_and_constant_losses(analysis: Any) -> None:
    negative = make_grid(["fp32", "bf16"], start=1.0, floor=-2.0)
    assert analysis.verdict(negative).outcome == "accept"
    constant = make_grid(["fp32", "bf16"], start=2.0, floor=2.0, noise=0.0, seed_sd=0.0)
    assert analysis.verdict(constant).main_reason.code == "REFERENCE_NOT_LEARNING"


def test_bitwise_equal_candidates_are_accepted_with_a_warning(analysis: Any) -> None:
    verdict = analysis.verdict(make_grid(["fp32", "bf16"]))
    assert verdict.outcome == "accept"
    assert "IDENTICAL_TO_FP32" in analysis.codes(verdict)


def test_a_missing_held_out_set_allows_a_verdict_and_is_said(analysis: Any) -> None:
    findings = analysis.findings(make_grid({"fp32": {}, "bf16": {"luck": 1e-3}}, held_out=False))
    (verdict,) = findings.verdicts
    assert verdict.outcome == "accept"
    assert list(verdict.estimates) == ["train"]
    assert verdict.estimates["train"].alpha_reject == 0.05
    assert "HELDOUT_MISSING" in analysis.codes(verdict)
    assert "HELDOUT_MISSING" in [c.code for c in findings.caveats]


def test_seeds_that_differ_in_scale_can_all_have_learned(analysis: Any) -> None:
    """Each seed learns 90 % of a loss that differs tenfold between seeds."""
    records = [
        with_series(r, loss=[x * 10.0 ** (r.seed - 1) for x in r.series["loss"]])
        for r in make_grid(["fp32", "bf16"], held_out=False, floor=0.4)
    ]
    assert analysis.verdict(records).outcome == "accept"


def test_a_candidate_that_failed_still_counts_in_holms_family(analysis: Any) -> None:
    """Which candidates survive is seen after the fact, so the family is the grid's."""
    records = make_grid({name: SPEC[name] for name in ("fp32", "fp32_twin", "bf16", "fp16")})
    records = [r for r in records if r.policy != "fp16"]
    (alone,) = [v for v in analysis.findings(records).verdicts if v.policy == "bf16"]
    assert alone.p_accept_holm == alone.p_accept
    failed = [diverged(r) for r in make_grid({"fp16": {}})]
    crowded = {v.policy: v for v in analysis.findings([*records, *failed]).verdicts}
    assert crowded["bf16"].p_accept_holm == pytest.approx(2 * (alone.p_accept or 0.0))
    assert crowded["fp16"].p_accept_holm is None
