"""Error rates of the decision over thousands of simulated experiments, generator and all fixed.

An experiment draws the paired differences of one candidate on both endpoints, in margins, and is
judged by the real gates, the real test and the real plan of looks. A rate may exceed its level by
three binomial standard errors.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from factories import make_record

from harness.analysis.analyzer import analyze_model
from harness.analysis.decision import estimate, non_inferiority
from harness.analysis.endpoints import Level
from harness.analysis.findings import Endpoint
from harness.analysis.gates import Comparison, apply_gates
from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan
from harness.precision.policy import PrecisionPolicy

RULE = DecisionRule()
BF16 = PrecisionPolicy(name="bf16", compute_format="bf16")
PLANS = {
    "3": SeedPlan.fixed(3, RULE),
    "5": SeedPlan.fixed(5, RULE),
    "8": SeedPlan.fixed(8, RULE),
    "looks": SeedPlan.of(RULE, seeds_given=None),
    "always valid": SeedPlan.of(DecisionRule(always_valid=True), seeds_given=None),
}
TRIALS = 2000
ENDPOINTS: tuple[Endpoint, ...] = ("train", "held_out")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares of experiments that ended in each way, and the pairs they used on average."""

    accept: float
    reject: float
    pairs: float


def slack(rate: float) -> float:
    """Return three binomial standard errors of a rate over the trials."""
    return 3 * math.sqrt(rate * (1 - rate) / TRIALS)


def judge(differences: np.ndarray, rule: DecisionRule, sigma: float | None) -> str:
    """Return the outcome of one look at differences of shape (endpoints, pairs), in margins."""
    estimates = {
        endpoint: estimate(
            tuple(row),
            unit="nats",
            margin=1.0,
            margin_term="progress",
            progress=100.0,
            reference_loss=100.0,
            num_endpoints=len(differences),
            rule=rule,
        )
        for endpoint, row in zip(ENDPOINTS, differences.tolist(), strict=False)
    }
    level = Level(
        unit="nats",
        progress=100.0,
        learned=0.5,
        learned_se=0.01,
        start=200.0,
        tail=100.0,
        sigma=sigma,
        margin=1.0,
        margin_term="progress",
        formula_margin=1.0,
    )
    comparison = Comparison(
        policy=BF16,
        runs=(),
        pairs=(),
        missing=(),
        levels=dict.fromkeys(ENDPOINTS, level),
        estimates=estimates,
    )
    hits = apply_gates(comparison, unstable=None, not_learning=None, rule=rule)
    return hits[0].outcome if hits else non_inferiority(estimates, rule=rule).outcome


def simulate(
    plan: SeedPlan,
    *,
    shift: float,
    spread: float,
    heavy_tails: bool = False,
    sigma: float | None = None,
    seed: int = 0,
) -> Rates:
    """Return the rates over experiments whose differences are `shift + spread * noise`.

    The endpoints' noise has correlation 0.64, as it is in trainings, and unit variance; with heavy
    tails it is Student's with 3 degrees of freedom.
    """
    rng = np.random.default_rng(seed)

    def noise(*shape: int) -> np.ndarray:
        if heavy_tails:
            return rng.standard_t(3, shape) / math.sqrt(3)
        return rng.standard_normal(shape)

    shared, own = noise(TRIALS, 1, plan.max_pairs), noise(TRIALS, 2, plan.max_pairs)
    rules = [plan.rule_at(look, RULE) for look in range(len(plan.looks))]
    outcomes: Counter[str] = Counter()
    used = 0
    for differences in shift + spread * (0.8 * shared + 0.6 * own):
        for pairs, rule in zip(plan.looks, rules, strict=True):
            outcome = judge(differences[:, :pairs], rule, sigma)
            if outcome != "inconclusive":
                break
        outcomes[outcome] += 1
        used += pairs
    return Rates(
        accept=outcomes["accept"] / TRIALS,
        reject=outcomes["reject"] / TRIALS,
        pairs=used / TRIALS,
    )


@pytest.mark.parametrize("plan", PLANS)
def test_aa_is_never_rejected(plan: str) -> None:
    """Pairs that differ by noise alone, of the size that BF16 autocast has on calm trainings."""
    rates = simulate(PLANS[plan], shift=0.0, spread=0.3)
    assert rates.reject == 0.0
    assert rates.accept > {"3": 0.9, "looks": 0.99, "always valid": 0.95}.get(plan, 0.999)


@pytest.mark.parametrize("plan", ["3", "5", "8", "looks"])
@pytest.mark.parametrize("heavy_tails", [False, True])
def test_aa_in_chaos_is_rejected_within_its_level(plan: str, heavy_tails: bool) -> None:
    """As far apart as unrelated FP32 runs: sqrt(2) sigma, the margin being half a sigma."""
    rates = simulate(
        PLANS[plan], shift=0.0, spread=2 * math.sqrt(2), sigma=2.0, heavy_tails=heavy_tails
    )
    assert rates.reject <= 0.02 + slack(0.02)


@pytest.mark.parametrize("plan", ["3", "looks"])
@pytest.mark.parametrize("sigma_known", [True, False])
@pytest.mark.parametrize("spread", [10.0, 100.0])
def test_a_margin_far_below_seed_luck_does_not_make_noise_gross(
    plan: str, sigma_known: bool, spread: float
) -> None:
    """A user's margin, or the cap, may be far below what a seed's luck does.

    Every one of three harmless differences then exceeds three margins in up to one experiment of
    eight, and the gate must not take that for harm.
    """
    sigma = spread / math.sqrt(2) if sigma_known else None
    rates = simulate(PLANS[plan], shift=0.0, spread=spread, sigma=sigma)
    assert rates.reject <= 0.05 + slack(0.05)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("heavy_tails", [False, True])
def test_both_errors_at_the_margin_keep_their_level(plan: str, heavy_tails: bool) -> None:
    rates = simulate(PLANS[plan], shift=1.0, spread=0.3, heavy_tails=heavy_tails, seed=1)
    assert rates.accept <= 0.05 + slack(0.05)
    assert rates.reject <= 0.05 + slack(0.05)


@pytest.mark.parametrize("plan", ["3", "5", "8", "looks"])
def test_two_margins_are_never_accepted_and_mostly_rejected(plan: str) -> None:
    rates = simulate(PLANS[plan], shift=2.0, spread=0.3)
    assert rates.accept == 0.0
    assert rates.reject > (0.85 if plan == "3" else 0.99)


def test_looks_spend_seeds_where_they_decide() -> None:
    clear = simulate(PLANS["looks"], shift=3.0, spread=0.3)
    near = simulate(PLANS["looks"], shift=1.0, spread=0.3)
    harmless = simulate(PLANS["looks"], shift=0.0, spread=0.3)
    assert clear.pairs < 3.6
    assert harmless.pairs < 4.2
    assert near.pairs > 7.5


def test_a_single_endpoint_keeps_its_level_too() -> None:
    """Without a held-out set rejection has the whole alpha."""
    rng = np.random.default_rng(2)
    outcomes = Counter(
        judge(row[None], RULE, None) for row in 1.0 + 0.3 * rng.standard_normal((TRIALS, 5))
    )
    for outcome in ("accept", "reject"):
        rate = outcomes[outcome] / TRIALS
        assert abs(rate - 0.05) <= slack(0.05)


def test_gross_harm_with_a_large_spread_is_seen_by_three_pairs() -> None:
    """What the gate is for: a fault of 105 margins whose seeds differ by 28."""
    rates = simulate(PLANS["3"], shift=105.0, spread=28.0, sigma=2.0)
    assert rates.reject > 0.99
    assert rates.accept == 0.0


def test_aa_records_through_the_whole_analyzer() -> None:
    """Null candidates from records to verdicts, in looks: none of some hundred is rejected."""
    verdicts = []
    for experiment in range(10):
        nulls = [
            PrecisionPolicy(name=f"null{experiment}_{k}", compute_format="bf16") for k in range(20)
        ]
        seeds = range(100 * experiment, 100 * experiment + 8)
        records = [make_record("fp32", seed) for seed in seeds]
        # A margin is 0.02 nats here, 1 % of what is learned.
        records += [make_record(null, seed, luck=0.012) for null in nulls for seed in seeds]
        findings = analyze_model(
            records,
            sweep_id="s",
            policies=["fp32", *(null.name for null in nulls)],
            seeds=tuple(seeds),
            reference="fp32",
            rule=RULE,
            timings=None,
            speed_note="not measured",
            command="python -m harness",
            descriptions={},
            plan=PLANS["looks"],
        )
        verdicts += findings.verdicts
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    assert outcomes["reject"] == 0
    assert outcomes["accept"] > 0.8 * len(verdicts)
    looked = Counter(verdict.look.pairs for verdict in verdicts if verdict.look is not None)
    assert set(looked) == {3, 5, 8}
