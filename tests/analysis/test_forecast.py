"""How many seeds settle a verdict, and the command that adds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factories import make_grid, with_series

from harness.analysis.decision import DecisionRule, estimate, non_inferiority
from harness.analysis.findings import Endpoint, Estimate
from harness.analysis.forecast import forecast, lean_of, min_detectable_harm, settle_command
from harness.analysis.statistics import pairs_needed

RULE = DecisionRule()


def estimates_of(differences: tuple[float, ...]) -> dict[Endpoint, Estimate]:
    e = estimate(
        differences,
        unit="nats",
        margin=1.0,
        margin_term="progress",
        progress=100.0,
        reference_loss=2.0,
        num_endpoints=1,
        rule=RULE,
    )
    return {"train": e}


def test_forecast_settles_what_it_promises() -> None:
    """With the forecast number of seeds, at least 80 % of new experiments are accepted."""
    undecided = (-0.6, 0.1, 0.8)
    assert non_inferiority(estimates_of(undecided), rule=RULE).outcome == "inconclusive"
    ahead = forecast(estimates_of(undecided), RULE)
    assert ahead.extra_seeds is not None
    total = 3 + ahead.extra_seeds
    draws = np.random.default_rng(0).normal(0.1, 0.7, (500, total))
    settled = [non_inferiority(estimates_of(tuple(d)), rule=RULE).outcome for d in draws]
    # The formula adds two t quantiles, which is a little optimistic at small n: 0.75.
    assert settled.count("accept") / 500 > 0.75


def test_out_of_reach_is_said() -> None:
    for differences in ((-5.0, 0.9, 6.8), (-0.8, 0.2, 1.2)):  # hopeless; about 12 pairs
        ahead = forecast(estimates_of(differences), RULE)
        assert (ahead.extra_seeds, ahead.reason) == (None, "UNRESOLVABLE_AT_NMAX")
    more = DecisionRule(max_pairs=20)
    assert (forecast(estimates_of((-0.8, 0.2, 1.2)), more).extra_seeds or 0) > 5


@pytest.mark.parametrize(("differences", "extra"), [((), 3), ((0.1,), 2), ((0.1, 0.12), 1)])
def test_too_few_pairs_need_at_least_three(differences: tuple[float, ...], extra: int) -> None:
    estimates = estimates_of(differences) if differences else {}
    assert forecast(estimates, RULE).extra_seeds == extra


def test_lean() -> None:
    assert lean_of(estimates_of((0.5, 0.7))) == "acceptable"
    assert lean_of(estimates_of((1.5, 1.7))) == "unacceptable"
    assert lean_of(estimates_of((1.0, 1.0))) == "unclear"
    assert lean_of(estimates_of((0.5, float("nan")))) == "unclear"
    assert lean_of({}) == "unclear"


def test_harm_of_the_stated_size_is_rejected_with_80_percent_power() -> None:
    sd, seeds = 0.5, 5
    base = estimates_of((-0.5, 0.0, 0.5, -0.5, 0.5))["train"]
    assert base.sd == pytest.approx(0.5)
    harm = min_detectable_harm(base, RULE)
    assert harm is not None
    draws = np.random.default_rng(1).normal(harm, sd, (1000, seeds))
    rejected = [non_inferiority(estimates_of(tuple(d)), rule=RULE).outcome for d in draws]
    # Central t for a noncentral one: within a few percent of 80 %.
    assert 0.72 < rejected.count("reject") / 1000 < 0.92
    assert min_detectable_harm(estimates_of((0.1, 0.2))["train"], RULE) is None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m harness +sweep=precision", "python -m harness +sweep=precision {}"),
        ("python -m harness seed=0,1,2 policy=fp32", "python -m harness policy=fp32 {}"),
        ("harness 'seed=0,1,2' train.steps=9", "harness train.steps=9 {}"),
        ('harness seed="range(0, 3)"', "harness {}"),
        ("harness seed=range(0,3)", "harness {}"),
        ("harness workload.seed=3 myseed=1", "harness workload.seed=3 myseed=1 {}"),
    ],
)
def test_the_command_replaces_its_seeds(command: str, expected: str) -> None:
    settled = settle_command(command, seeds=(0, 1, 2), extra=2)
    assert settled == expected.format("seed=0,1,2,3,4")


def test_new_seeds_are_the_smallest_unused_ones() -> None:
    assert settle_command("harness", seeds=(1, 5), extra=2) == "harness seed=1,5,0,2"
    assert settle_command("", seeds=(0,), extra=1) is None


def test_an_undecided_verdict_prints_the_command(analysis: Any) -> None:
    shifts = (-0.01, 0.002, 0.013)
    records = [
        r
        if r.policy == "fp32"
        else with_series(r, loss=[x + shifts[r.seed] for x in r.series["loss"]])
        for r in make_grid(["fp32", "bf16"])
    ]
    verdict = analysis.verdict(records)
    assert (verdict.outcome, verdict.main_reason.code) == ("inconclusive", "CI_SPANS_MARGIN")
    assert verdict.extra_seeds is not None
    seeds = ",".join(map(str, range(3 + verdict.extra_seeds)))
    assert verdict.settle_command == f"python -m harness +sweep=precision seed={seeds}"
    assert analysis.verdict(make_grid(["fp32", "bf16"])).settle_command is None


def test_acceptance_waits_for_the_slowest_endpoint() -> None:
    """The train mean is nearer to its margin, the held-out spread is what costs seeds."""
    (near,) = estimates_of((0.49, 0.5, 0.51)).values()
    (wide,) = estimates_of((-0.6, 0.1, 0.8)).values()
    both: dict[Endpoint, Estimate] = {"train": near, "held_out": wide}
    assert forecast({"train": near}, RULE).extra_seeds == 1
    assert forecast(both, RULE) == forecast({"train": wide}, RULE)
    assert (forecast(both, RULE).extra_seeds or 0) > 1


def test_rejection_is_forecast_at_its_own_level() -> None:
    """Of two endpoints each is rejected at 2.5 %, which takes more pairs than 5 %."""
    differences = (1.3, 2.0, 2.4)
    e = estimate(
        differences,
        unit="nats",
        margin=1.0,
        margin_term="progress",
        progress=100.0,
        reference_loss=2.0,
        num_endpoints=2,
        rule=RULE,
    )
    numbers = {"distance": 0.9, "num_pairs": 3, "power": 0.8, "limit": 50}
    sd = float(np.std(differences, ddof=1))
    at_half, at_whole = (pairs_needed(sd=sd, alpha=a, **numbers) for a in (0.025, 0.05))
    assert at_half is not None
    assert at_whole is not None
    assert at_half > at_whole
    assert forecast({"train": e}, RULE).extra_seeds == at_half - 3
