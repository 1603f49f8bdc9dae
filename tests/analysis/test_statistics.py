"""Oracle: every statistic against scipy.stats, statsmodels' textbook rule, or brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis import statistics


@pytest.mark.parametrize("df", [1, 2, 4, 7, 30])
@pytest.mark.parametrize("probability", [0.8, 0.95, 0.975, 0.985])
def test_t_quantile_and_tail_agree_with_scipy(df: int, probability: float) -> None:
    from scipy import stats

    # 1e-9: two implementations of the same inverse, both iterated to near FP64 accuracy.
    quantile = statistics.t_quantile(probability, df)
    assert quantile == pytest.approx(stats.t.ppf(probability, df), rel=1e-9)
    assert statistics.t_tail(quantile, df) == pytest.approx(1 - probability, rel=1e-9)


def test_t_quantile_has_the_published_multipliers() -> None:
    # Two decimals as printed in t tables.
    assert round(statistics.t_quantile(0.95, 2), 2) == 2.92
    assert round(statistics.t_quantile(0.975, 2), 2) == 4.30


@pytest.mark.parametrize(("probability", "df"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_t_quantile_refuses_what_has_none(probability: float, df: int) -> None:
    with pytest.raises(ValueError, match="no t quantile"):
        statistics.t_quantile(probability, df)


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=8), st.floats(-1e6, 1e6))
def test_one_sided_test_agrees_with_scipy(values: list[float], margin: float) -> None:
    from scipy import stats

    mean, sd = statistics.mean_sd(values)
    assert sd is not None
    if sd < 1e-6 * (1 + max(map(abs, values))):
        return  # scipy warns of catastrophic cancellation there
    p = statistics.tail_probability(margin - mean, sd / math.sqrt(len(values)), len(values) - 1)
    expected = stats.ttest_1samp(values, margin, alternative="less").pvalue
    # 1e-7: the two subtract the margin in different order.
    assert p == pytest.approx(expected, rel=1e-7, abs=1e-12)


def test_mean_sd_of_few_and_of_equal_values() -> None:
    assert math.isnan(statistics.mean_sd([])[0])
    assert statistics.mean_sd([3.0]) == (3.0, None)
    # 0.1 is no FP64 value: a sum and division would leave a spread of one ulp.
    assert statistics.mean_sd([0.1] * 7) == (0.1, 0.0)
    assert statistics.mean_sd([1.0, 2.0, 4.0])[1] == pytest.approx(np.std([1, 2, 4], ddof=1))


def test_tail_probability_without_spread() -> None:
    assert statistics.tail_probability(0.1, 0.0, 2) == 0.0
    assert statistics.tail_probability(0.0, 0.0, 2) == 1.0
    assert math.isnan(statistics.tail_probability(math.nan, 0.0, 2))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_rejects_exactly_what_the_step_down_procedure_rejects(p_values: list[float]) -> None:
    adjusted = statistics.holm(p_values)
    for alpha in (0.01, 0.05, 0.2):
        rejected = set()
        for rank, k in enumerate(sorted(range(len(p_values)), key=lambda k: p_values[k])):
            if (len(p_values) - rank) * p_values[k] > alpha:
                break
            rejected.add(k)
        assert {k for k, p in enumerate(adjusted) if p <= alpha} == rejected


def test_failure_rate_bound() -> None:
    from scipy import stats

    for runs, expected in ((3, 0.63), (5, 0.45), (8, 0.31)):
        bound = statistics.failure_rate_bound(runs)
        assert round(bound, 2) == expected
        # The bound is the rate at which seeing no failure has probability 5 %.
        assert stats.binom.pmf(0, runs, bound) == pytest.approx(0.05)
    assert statistics.failure_rate_bound(0) == 1.0


def test_pairs_needed_is_the_first_number_that_is_enough() -> None:
    arguments = {"distance": 1.0, "sd": 0.8, "alpha": 0.05, "power": 0.8, "limit": 50}
    needed = statistics.pairs_needed(num_pairs=3, **arguments)

    def width(n: int) -> float:
        t = statistics.t_quantile(0.95, n - 1) + statistics.t_quantile(0.8, n - 1)
        return t * 0.8 / math.sqrt(n)

    assert needed is not None
    assert width(needed) <= 1.0 < width(needed - 1)
    # Pairs that are there already did not settle it.
    assert statistics.pairs_needed(num_pairs=needed, **arguments) == needed + 1
    assert statistics.pairs_needed(num_pairs=3, **{**arguments, "distance": 0.0}) is None
    assert statistics.pairs_needed(num_pairs=3, **{**arguments, "sd": math.nan}) is None


def test_slope_agrees_with_polyfit() -> None:
    y = np.random.default_rng(0).standard_normal(17)
    assert statistics.slope(y) == pytest.approx(np.polyfit(range(17), y, 1)[0])
    assert math.isnan(statistics.slope([1.0]))


def test_exponential_average_against_its_definition() -> None:
    values = [3.0, 1.0, 2.0, 5.0]
    expected = [
        0.9**t * values[0] + sum(0.1 * 0.9 ** (t - k) * values[k] for k in range(1, t + 1))
        for t in range(4)
    ]
    assert statistics.exponential_average(values, decay=0.9) == pytest.approx(expected)
    assert len(statistics.exponential_average([], decay=0.9)) == 0


def test_count_spikes_against_brute_force() -> None:
    values = list(np.random.default_rng(1).standard_normal(90) * 0.1)
    for step in (40, 41, 70):
        values[step] += 5.0
    brute = 0
    for step in range(11, len(values)):
        window = np.array(values[step - 11 : step])
        median = np.median(window)
        brute += values[step] > median + 6 * np.median(np.abs(window - median))
    assert statistics.count_spikes(values, window=11, mads=6.0) == brute >= 3
    assert statistics.count_spikes([1.0] * 40, window=11, mads=6.0) == 0
    assert statistics.count_spikes(values[:11], window=11, mads=6.0) == 0


@given(st.lists(st.sampled_from([0.0, 1.0]), max_size=12))
def test_longest_run_against_grouping(flags: list[float]) -> None:
    groups = [len(list(group)) for flag, group in itertools.groupby(flags) if flag]
    assert statistics.longest_run(flags) == max(groups, default=0)
