"""Oracles: each rival against its source's published numbers, scipy, or a brute-force version."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from factories import make_record, with_series
from paired_runs import make_pairs, noise, pair_of, shift
from scipy import stats

from harness.analysis.pairing import make_pair
from harness.analysis.rivals import RIVALS
from harness.analysis.rivals.block_bootstrap import block_length, lower_end
from harness.analysis.rivals.curves import curve_of, curves_of
from harness.analysis.rivals.steps_to_target import allowed_deviation, olympic_mean
from harness.analysis.rule import DecisionRule

RULE = DecisionRule()


def find(name, pairs, twins=()):
    return RIVALS[name].find(pairs, twins=twins, rule=RULE)


def tails(pairs):
    """Return the candidates' and the references' mean loss over the last third."""
    return [
        [np.mean(run.series["loss"][80:]) for run in runs]
        for runs in ([p.candidate for p in pairs], [p.reference for p in pairs])
    ]


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("size", [-0.01, 0.0, 0.005, 0.02])
def test_paired_t_is_scipys(count, size):
    pairs = make_pairs(shift(size, 0.02), range(count))
    expected = stats.ttest_rel(*tails(pairs), alternative="greater").pvalue
    found = find("paired_t", pairs)
    assert found.value == pytest.approx(1 - expected, rel=1e-9)
    assert (found.outcome == "reject") == (expected < 0.05)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("size", [-0.01, 0.0, 0.01, 0.05])
def test_welch_t_is_scipys(count, size):
    # Unequal spreads, so that Welch's degrees of freedom differ from the pooled ones.
    pairs = make_pairs(shift(size, 0.05), range(count))
    expected = stats.ttest_ind(*tails(pairs), equal_var=False, alternative="greater").pvalue
    found = find("welch_t", pairs)
    assert found.value == pytest.approx(1 - expected, rel=1e-9)
    assert (found.outcome == "reject") == (expected < 0.05)


def test_bitwise_equal_differences_decide_without_a_spread():
    assert find("paired_t", make_pairs(seeds=range(2))).value == 0.0
    flat = [pair_of(with_series(make_record("fp32", s), loss=[2.0] * 120)) for s in range(3)]
    worse = [make_pair(with_series(p.candidate, loss=[2.5] * 120), p.reference) for p in flat]
    for name in ("paired_t", "welch_t"):
        assert find(name, flat).outcome == "accept"
        assert find(name, worse).outcome == "reject"


@pytest.mark.parametrize(
    ("num_runs", "num_references", "published"), [(10, 20, 0.73), (5, 10, 1.24), (3, 6, 2.63)]
)
def test_steps_to_target_allows_what_mlperf_allows(num_runs, num_references, published):
    assert allowed_deviation(num_runs, num_references) == pytest.approx(published, abs=0.005)


@pytest.mark.parametrize(
    ("num_runs", "num_references"), [(10, 20), (5, 10), (3, 6), (5, 5), (8, 8)]
)
def test_the_allowed_deviation_is_where_the_pooled_t_test_turns(num_runs, num_references):
    """The checker's own call: means, the reference's deviation twice, and trimmed counts."""

    def p_value(gap):
        # scipy takes the deviations as given, whatever divisor they were computed with.
        return stats.ttest_ind_from_stats(
            100 + gap, 4.0, num_runs - 2, 100, 4.0, num_references - 2, alternative="greater"
        ).pvalue

    allowed = 4.0 * allowed_deviation(num_runs, num_references)
    assert p_value(allowed * 1.001) < 0.05 < p_value(allowed * 0.999)


def test_three_against_three_count_all_runs():
    expected = stats.t.ppf(0.95, 4) * math.sqrt(2 / 3)
    assert allowed_deviation(3, 3) == pytest.approx(expected)
    with pytest.raises(ValueError, match="olympic mean of 2 runs"):
        allowed_deviation(2, 6)


def test_the_olympic_mean_drops_the_best_and_the_worst():
    assert olympic_mean([7, 1, 4, 100, 4]) == 5.0
    assert olympic_mean([3, 9, 5]) == 5.0


def test_steps_to_a_target_are_those_of_a_scan():
    run = make_record("fp32", 3, noise=0.3)
    losses, curve = run.series["loss"], curve_of(run, RULE)
    average, scanned = losses[0], []
    for loss in losses:
        average = 0.9 * average + 0.1 * loss
        scanned.append(average)
    for target in np.linspace(min(scanned) - 0.1, losses[0] + 0.1, 40):
        expected = next((k + 1 for k, x in enumerate(scanned) if x <= target), None)
        assert curve.steps_to(float(target)) == expected


def test_steps_to_target_by_hand():
    pairs = make_pairs(shift(0.03, 0.01), range(5), noise=0.05)
    heads = [np.mean(p.reference.series["loss"][:5]) for p in pairs]
    target = np.mean(heads) - 0.95 * (np.mean(heads) - np.mean(tails(pairs)[1]))

    def steps(run):
        return curve_of(run, RULE).steps_to(float(target))

    ours = sorted(steps(p.candidate) or 120 for p in pairs)
    theirs = sorted(steps(p.reference) or 120 for p in pairs)
    found = find("steps_to_target", pairs)
    assert found.value == pytest.approx(np.mean(ours[1:-1]))
    slowest = np.mean(theirs[1:-1]) + stats.t.ppf(0.95, 4) * math.sqrt(2 / 3) * np.std(theirs)
    assert found.threshold == pytest.approx(slowest)


def test_a_second_run_that_never_converges_fails_the_submission():
    def stuck(pair):
        losses = [max(loss, 3.0) for loss in pair.candidate.series["loss"]]
        return make_pair(with_series(pair.candidate, loss=losses), pair.reference)

    pairs = make_pairs(seeds=range(8))
    assert find("steps_to_target", [stuck(pairs[0]), *pairs[1:]]).outcome == "accept"
    two = find("steps_to_target", [*map(stuck, pairs[:2]), *pairs[2:]])
    assert (two.outcome, two.why) == ("reject", "2 runs do not reach the target loss")


@pytest.mark.parametrize("num_steps", [1, 2, 10, 40, 97, 100])
def test_the_bootstrap_resamples_whole_blocks(num_steps):
    """Against a loop over resamples with the same blocks drawn."""
    series = np.random.default_rng(num_steps).standard_normal(num_steps) + 0.1
    length = block_length(num_steps)
    first = np.random.default_rng([num_steps, 200]).integers(
        num_steps - length + 1, size=(math.ceil(num_steps / length), 200)
    )
    means = sorted(
        np.mean(np.concatenate([series[k : k + length] for k in first[:, r]])) for r in range(200)
    )
    # 2.5 % of 200: the fifth smallest.
    assert lower_end(series, level=0.05, resamples=200) == pytest.approx(means[4])


def test_the_bootstrap_covers_a_white_series_as_often_as_it_says():
    """Where steps are independent the rule errs as often as it admits: 2.5 % on either side."""
    rng = np.random.default_rng(5)
    wrong = np.mean(
        [lower_end(rng.standard_normal(100), level=0.05, resamples=1000) > 0 for _ in range(2000)]
    )
    # 3.3 binomial standard errors (0.0035) around 2.5 %, and up to 2.5 % more, since a percentile
    # interval of ten blocks is known to be too narrow.
    assert 0.013 < wrong < 0.062


def test_the_bootstrap_takes_an_offset_of_one_trajectory_for_harm():
    """The known flaw: an offset that is constant within a run has no variance over steps."""
    rejected = [find("block_bootstrap", make_pairs(noise(1e-3), [s])).outcome for s in range(40)]
    assert 10 <= rejected.count("reject") <= 30


def test_relative_rules_by_hand():
    flat = pair_of(with_series(make_record("fp32", 0), loss=[2.0] * 120))

    def against(losses):
        return [make_pair(with_series(flat.candidate, loss=losses), flat.reference)]

    for size, outcome in ((0.019, "accept"), (0.021, "reject")):
        for name in ("relative_tail", "last_step"):
            found = find(name, against([2.0 + size] * 120))
            assert found.outcome == outcome
            assert found.value == pytest.approx(size / 2)
    # One last step is the last step's rule alone.
    assert find("last_step", against([2.0] * 119 + [2.1])).outcome == "reject"
    assert find("relative_tail", against([2.0] * 119 + [2.1])).outcome == "accept"
    # 2 % of 2 is 0.04, and a bump of 0.6 in the 30th step is smoothed to 0.06.
    bump = [2.0] * 120
    bump[30] = 2.6
    assert find("pointwise_band", against(bump)).value == pytest.approx(0.03)
    # The same during the first twelve steps, long forgotten after them, would be warm-up.
    early = [2.0] * 120
    early[2] = 2.2
    assert find("pointwise_band", against(early)).outcome == "accept"
    assert find("pointwise_band", against([2.0 - 0.039] * 120)).outcome == "accept"
    assert find("pointwise_band", against([2.0 - 0.041] * 120)).outcome == "reject"


def test_the_envelope_is_three_times_the_largest_twin():
    def constant(size):
        return pair_of(make_record("fp32", 0), lambda losses, _: losses + size)

    twins = [constant(0.01), constant(-0.02)]
    for size, outcome in ((0.059, "accept"), (0.061, "reject"), (-0.061, "reject")):
        found = find("ulp_envelope", [constant(size)], twins)
        assert (found.outcome, found.threshold) == (outcome, pytest.approx(0.06))
    missing = find("ulp_envelope", [constant(0.0)])
    assert missing.outcome == "inconclusive"
    assert "policy=fp32_ulp" in missing.why


def test_curves_are_computed_once_per_window():
    pair = pair_of(make_record("fp32", 0))
    first = curves_of(pair, RULE)
    assert curves_of(make_pair(pair.candidate, pair.reference), RULE) is first
    other = curves_of(pair, dataclasses.replace(RULE, tail_divisor=2))
    assert (first.reference.tail_start, other.reference.tail_start) == (80, 60)
    # The same runs the other way round are another pair.
    swapped = make_pair(pair.reference, pair.candidate)
    assert curves_of(swapped, RULE).reference.losses is first.candidate.losses
