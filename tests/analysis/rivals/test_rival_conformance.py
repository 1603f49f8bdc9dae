"""Conformance: what holds for every rule that can decide, the analyzer's own among them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
from analyses import Analysis
from factories import make_record
from paired_runs import make_pairs, noise, pair_of, shift, spoilt

from harness.analysis.methods import METHODS, NON_INFERIORITY, RIVAL_NAMES
from harness.analysis.pairing import Pair, make_pair
from harness.analysis.rivals import RIVALS
from harness.analysis.rule import DecisionRule

RULE = DecisionRule()
TWINS = make_pairs(noise(1e-4))
TWO_SIDED = {"pointwise_band", "ulp_envelope"}


def judge(method: str, pairs: Sequence[Pair], *, twins: Sequence[Pair] = TWINS) -> str:
    if method != NON_INFERIORITY:
        return RIVALS[method].judge(pairs, twins=twins, rule=RULE)
    records = [run for pair in pairs for run in (pair.reference, pair.candidate)]
    return Analysis().verdict(records, seeds=[pair.seed for pair in pairs]).outcome


def fewest(method: str) -> int:
    return RULE.min_pairs if method == NON_INFERIORITY else RIVALS[method].min_pairs


def test_the_names_are_those_of_the_key() -> None:
    assert tuple(RIVALS) == RIVAL_NAMES
    assert {name: rival.name for name, rival in RIVALS.items()} == {n: n for n in RIVAL_NAMES}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [3, 5, 8])
def test_the_reference_against_itself_is_accepted(method: str, count: int) -> None:
    assert judge(method, make_pairs(seeds=range(count))) == "accept"


@pytest.mark.parametrize("method", RIVALS)
def test_too_few_pairs_are_inconclusive(method: str) -> None:
    for count in range(fewest(method)):
        assert judge(method, make_pairs(shift(1.0), range(count))) == "inconclusive", count
    assert judge(method, make_pairs(seeds=range(fewest(method)))) == "accept"


@pytest.mark.parametrize("method", METHODS)
def test_a_gross_fault_is_rejected_by_the_fewest_pairs(method: str) -> None:
    assert judge(method, make_pairs(shift(1.0, 0.01), range(fewest(method)))) == "reject"
    assert judge(method, make_pairs(shift(1.0, 0.01))) == "reject"


@pytest.mark.parametrize("method", METHODS)
def test_a_better_candidate_is_rejected_only_by_a_band(method: str) -> None:
    outcome = judge(method, make_pairs(shift(-1.0, 0.01)))
    assert outcome == ("reject" if method in TWO_SIDED else "accept")


@pytest.mark.parametrize("method", RIVALS)
def test_the_order_of_seeds_is_irrelevant(method: str) -> None:
    pairs = make_pairs(shift(0.02, 0.05))
    find = RIVALS[method].find
    expected = find(pairs, twins=TWINS, rule=RULE)
    for seed in range(5):
        shuffled, twins = pairs.copy(), TWINS.copy()
        random.Random(seed).shuffle(shuffled)
        random.Random(seed).shuffle(twins)
        assert find(shuffled, twins=twins, rule=RULE) == expected


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [0, 60, 119])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_loss_that_is_not_finite_is_rejected(method: str, step: int, value: float) -> None:
    pairs = spoilt(make_pairs(), seed=3, loss=lambda x: [*x[:step], value, *x[step + 1 :]])
    assert judge(method, pairs) == "reject"
    # However few the pairs.
    assert judge(method, pairs[3:4]) == "reject"


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_ended_early_is_never_accepted(method: str) -> None:
    pairs = spoilt(make_pairs(), seed=3, loss=lambda x: x[:-1])
    assert judge(method, pairs) == ("inconclusive" if method == NON_INFERIORITY else "reject")


@pytest.mark.parametrize("method", RIVALS)
def test_a_longer_candidate_is_no_comparison(method: str) -> None:
    pairs = spoilt(make_pairs(), seed=3, loss=lambda x: [*x, x[-1]])
    assert judge(method, pairs) == "reject"


@pytest.mark.parametrize("method", METHODS)
def test_a_reference_that_fails_judges_nobody(method: str) -> None:
    def of(pair: Pair) -> Pair:
        swapped = spoilt([pair], seed=pair.seed, loss=lambda x: [*x[:50], *[math.nan] * 70])[0]
        # FP32 fails and the candidate does not.
        return make_pair(
            make_record("bf16", pair.seed),
            make_record("fp32", pair.seed, series=swapped.candidate.series),
        )

    assert judge(method, [of(pair) for pair in make_pairs()]) == "inconclusive"


@pytest.mark.parametrize("method", RIVALS)
def test_runs_that_are_no_pair_are_inconclusive(method: str) -> None:
    pairs = make_pairs()
    foreign = make_record("bf16", 0, fingerprints=make_record("bf16", 1).fingerprints)
    assert judge(method, [make_pair(foreign, pairs[0].reference), *pairs[1:]]) == "inconclusive"


@pytest.mark.parametrize("method", RIVALS)
def test_a_missing_held_out_set_changes_nothing(method: str) -> None:
    find = RIVALS[method].find
    pairs, without = (
        make_pairs(shift(0.02, 0.05)),
        make_pairs(shift(0.02, 0.05), held_out=False),
    )
    without = [
        make_pair(
            make_record("bf16", p.seed, held_out=False, series=p.candidate.series), p.reference
        )
        for p in without
    ]
    assert find(without, twins=TWINS, rule=RULE) == find(pairs, twins=TWINS, rule=RULE)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [0.0, 0.7, -3.0])
def test_a_constant_loss_rejects_nobody(method: str, value: float) -> None:
    flat = (value,) * 120
    pairs = [
        pair_of(make_record("fp32", seed, held_out=False, series={"loss": flat}))
        for seed in range(8)
    ]
    outcome = judge(method, pairs)
    # Nothing was learned: no target to reach, and nothing that harm could show in.
    learns = method not in ("steps_to_target", NON_INFERIORITY)
    assert outcome == ("accept" if learns else "inconclusive")


@pytest.mark.parametrize("method", METHODS)
def test_a_negative_loss_has_its_worse_side_upwards(method: str) -> None:
    losses = {"start": -1.0, "floor": -3.0}
    worse = make_pairs(shift(1.0, 0.01), **losses)
    assert judge(method, worse) == "reject"
    if method not in TWO_SIDED:
        assert judge(method, make_pairs(shift(-1.0, 0.01), **losses)) == "accept"


@pytest.mark.parametrize("method", METHODS)
def test_one_pair_never_divides_by_zero(method: str) -> None:
    allowed = {"accept", "reject"} if fewest(method) == 1 else {"inconclusive"}
    for change in (None, noise(0.01), shift(0.02)):
        assert judge(method, make_pairs(change, seeds=[4])) in allowed


@pytest.mark.parametrize("method", RIVALS)
def test_a_rule_that_is_asked_again_is_quick(method: str) -> None:
    pairs = make_pairs(noise(0.01), num_steps=300)
    find = RIVALS[method].judge
    find(pairs, twins=TWINS, rule=RULE)
    started, calls = time.process_time(), 200
    for _ in range(calls):
        find(pairs, twins=TWINS, rule=RULE)
    # 0.3 ms on a quiet core, which a study of a million draws can afford; a busy one gets thrice.
    assert (time.process_time() - started) / calls < 1e-3


def test_the_synthetic_noise_is_what_it_says() -> None:
    pairs = make_pairs(noise(0.5), range(200))
    means = [
        np.mean(p.candidate.series["loss"]) - np.mean(p.reference.series["loss"]) for p in pairs
    ]
    assert np.std(means) == pytest.approx(0.5, rel=0.2)
