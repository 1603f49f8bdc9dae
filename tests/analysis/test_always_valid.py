"""The always-valid interval: its closed form, its p-value, and that looking often costs nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import t

from harness.analysis.decision import DecisionRule, estimate, non_inferiority
from harness.analysis.findings import Endpoint, Estimate
from harness.analysis.forecast import min_detectable_harm
from harness.analysis.statistics import always_valid_p, always_valid_quantile, detectable

ALWAYS = DecisionRule(always_valid=True)


def estimates_of(
    differences: tuple[float, ...], *, num_endpoints: int = 1, rule: DecisionRule = ALWAYS
) -> dict[Endpoint, Estimate]:
    e = estimate(
        differences,
        unit="nats",
        margin=1.0,
        margin_term="progress",
        progress=100.0,
        reference_loss=2.0,
        num_endpoints=num_endpoints,
        rule=rule,
    )
    return {"train": e}


@pytest.mark.parametrize(
    ("pairs", "quantile"),
    # Tabulated when the closed form was derived, at the two-sided level 0.10 and g = 50.
    [(3, 7.53), (4, 5.90), (5, 5.21), (8, 4.42), (12, 4.07), (20, 3.85)],
)
def test_quantiles_are_the_tabulated_ones(pairs: int, quantile: float) -> None:
    assert always_valid_quantile(pairs, 0.10) == pytest.approx(quantile, abs=0.005)
    assert always_valid_quantile(pairs, 0.10) > t.ppf(0.95, pairs - 1)


@pytest.mark.parametrize("pairs", [3, 5, 8, 30])
@pytest.mark.parametrize("level", [0.10, 0.05])
def test_the_quantile_is_where_the_martingale_reaches_one_over_the_level(
    pairs: int, level: float
) -> None:
    """Brute force: the t-martingale as a ratio of integrals over the scale and the mean.

    Under the right-Haar prior on sigma the likelihood depends on the data through t alone; the
    Gaussian mixture over the mean gives sqrt(1/a) * ((1 + x/(n-1)) / (1 + x/((n-1)a)))^(n/2),
    with x = t^2 and a = 1 + g*n.
    """
    a = 1 + 50 * pairs

    def log_martingale(x: float) -> float:
        ratio = (1 + x**2 / (pairs - 1)) / (1 + x**2 / ((pairs - 1) * a))
        return -0.5 * math.log(a) + pairs / 2 * math.log(ratio)

    root = brentq(lambda x: log_martingale(x) - math.log(1 / level), 1e-9, 1e6)
    assert always_valid_quantile(pairs, level) == pytest.approx(root, rel=1e-9)


@pytest.mark.parametrize("pairs", [3, 4, 8, 20])
@pytest.mark.parametrize("alpha", [0.05, 0.025, 0.004])
def test_the_p_value_inverts_the_quantile(pairs: int, alpha: float) -> None:
    quantile = always_valid_quantile(pairs, 2 * alpha)
    if math.isinf(quantile):
        assert always_valid_p(1.0, 0.0, pairs) > alpha
        return
    assert always_valid_p(quantile * 0.3, 0.3, pairs) == pytest.approx(alpha, rel=1e-9)


def test_edges_of_the_p_value() -> None:
    assert always_valid_p(-1.0, 0.5, 5) == 1.0
    assert always_valid_p(0.0, 0.0, 5) == 1.0
    assert math.isnan(always_valid_p(math.nan, 0.5, 5))
    assert 0 < always_valid_p(1.0, 0.0, 3) < 0.025
    assert always_valid_quantile(2, 0.05) == math.inf


@pytest.mark.parametrize(("level", "crossing"), [(0.10, 0.042), (0.05, 0.023)])
def test_looking_after_every_pair_rarely_ever_leaves_the_band(
    level: float, crossing: float
) -> None:
    """20,000 Gaussian sequences of 40 pairs, the band looked at from pair 3 on."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(20_000, 40))
    n = np.arange(1, 41)
    mean = x.cumsum(axis=1) / n
    squares = (x**2).cumsum(axis=1) - n * mean**2
    sd = np.sqrt(np.maximum(squares, 0) / np.maximum(n - 1, 1))
    reach = np.array([always_valid_quantile(int(k), level) for k in n[2:]])
    left = np.abs(mean[:, 2:]) > reach * (sd / np.sqrt(n))[:, 2:]
    rate = left.any(axis=1).mean()
    # Four binomial standard errors around what an independent simulation gave.
    assert abs(rate - crossing) < 4 * math.sqrt(crossing * (1 - crossing) / 20_000) + 0.0005
    assert rate < level


def test_the_interval_and_the_harm_use_the_quantile() -> None:
    differences = (-0.2, 0.1, 0.25, 0.0)
    e = estimates_of(differences, num_endpoints=2)["train"]
    mean, sd = float(np.mean(differences)), float(np.std(differences, ddof=1))
    error = sd / 2
    assert e.ci_high == pytest.approx(mean + always_valid_quantile(4, 0.10) * error)
    assert e.ci_low == pytest.approx(mean - always_valid_quantile(4, 0.05) * error)
    width = always_valid_quantile(4, 0.05) + t.ppf(0.8, 3)
    assert min_detectable_harm(e, ALWAYS) == pytest.approx(1.0 + width * error)
    plain = DecisionRule()
    ours, theirs = (estimates_of(differences, rule=r)["train"].ci_high for r in (ALWAYS, plain))
    assert ours is not None
    assert theirs is not None
    assert ours > theirs


@pytest.mark.parametrize(
    ("difference", "outcome"), [(0.2, "accept"), (2.0, "reject"), (1.0, "inconclusive")]
)
def test_constant_differences_decide_at_three_pairs(difference: float, outcome: str) -> None:
    test = non_inferiority(estimates_of((difference,) * 3), rule=ALWAYS)
    assert test.outcome == outcome
    two = estimates_of((difference,) * 2)["train"]
    assert two.ci_low == two.ci_high == difference


@pytest.mark.parametrize("seed", range(6))
def test_p_and_interval_agree(seed: int) -> None:
    """An interval inside the margin and a p below alpha are one and the same statement."""
    draws = np.random.default_rng(seed).normal(0.4, 0.25, 6)
    e = estimates_of(tuple(draws), num_endpoints=2)["train"]
    assert e.ci_high is not None
    assert e.p_accept is not None
    assert (e.ci_high < e.margin) == (e.p_accept < e.alpha_accept)


def test_nothing_spreads_and_nothing_is_needed() -> None:
    assert detectable(0.0, 2, alpha=0.025, power=0.8, always_valid=True) == 0.0
