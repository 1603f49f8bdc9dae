"""Draws of seeds, and that judging them is what the analyzer would have said."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from synthetic_bank import ARMS, Planted, SyntheticBank

from harness.analysis.analyzer import analyze_model
from harness.analysis.rule import DecisionRule
from harness.analysis.run_memory import num_remembered, once_per_run
from harness.analysis.same_point_rule import measure
from harness.analysis.seed_plan import SeedPlan
from harness.calibration.contenders import OURS, contenders
from harness.calibration.draws import draw_orders
from harness.calibration.plans import ALWAYS_VALID, FIXED, LOOKS, plans_of
from harness.calibration.simulated import Candidate, Draw, replay
from harness.calibration.truth import policy_of
from harness.runs.record import RunRecord

RULE = DecisionRule()
OUR_RULE = next(c for c in contenders() if c.name == OURS)
# Beside the arms with clear verdicts, some that land on either side from draw to draw.
NOISY = {
    **ARMS,
    "noisy": Planted(kind="harmless", luck=0.03, probe={}),
    "noisy_harm": Planted(offset=0.035, luck=0.02),
    "biased": Planted(offset=0.004, luck=0.01, probe={"beta": 0.3}),
}


def test_orders_are_distinct_seeds_and_a_function_of_the_task_alone() -> None:
    orders = draw_orders(range(24), draws=400, task="toy")
    assert len(orders) == 400
    assert all(len(set(order)) == 8 and set(order) <= set(range(24)) for order in orders)
    assert orders == draw_orders(list(reversed(range(24))), draws=400, task="toy")
    assert orders[:100] == draw_orders(range(24), draws=100, task="toy")
    assert orders != draw_orders(range(24), draws=400, task="other")


def test_every_seed_is_as_likely_at_every_place() -> None:
    orders = draw_orders(range(6), draws=6000, task="toy", longest=3)
    for place in range(3):
        counts = Counter(order[place] for order in orders)
        # 1000 expected each; five binomial standard deviations are 144.
        assert all(abs(counts[seed] - 1000) < 5 * math.sqrt(6000 / 6 * 5 / 6) for seed in range(6))


def test_fewer_seeds_than_a_draw_give_shorter_orders() -> None:
    assert all(len(order) == 3 for order in draw_orders((4, 5, 6), draws=5, task="toy"))
    assert draw_orders((), draws=5, task="toy") == ()


def test_plans_are_those_that_the_seeds_suffice_for() -> None:
    assert [p.name for p in plans_of(RULE, num_seeds=24)] == [
        "1",
        "3",
        "5",
        "8",
        LOOKS,
        ALWAYS_VALID,
    ]
    assert [p.name for p in plans_of(RULE, num_seeds=5)] == ["1", "3", "5"]
    looks = next(p for p in plans_of(RULE, num_seeds=8) if p.name == LOOKS)
    assert [(k.pairs, k.rule.alpha) for k in looks.looks] == [(3, 0.02), (5, 0.015), (8, 0.015)]
    fixed = next(p for p in plans_of(RULE, num_seeds=8) if p.name == "8")
    assert [(k.pairs, k.rule.alpha) for k in fixed.looks] == [(8, 0.05)]


def _candidates(bank: SyntheticBank) -> list[Candidate]:
    found = []
    for name, runs in bank.records("toy").items():
        if name == "fp32":
            continue
        probe = bank.same_point("toy").get(name)
        measured = None if probe is None else measure(probe, RULE)
        assert not isinstance(measured, str)
        found.append(
            Candidate(
                facts=bank.stored_arms("toy")[name],
                policy=policy_of(runs),
                runs=runs,
                probe=measured,
            )
        )
    return found


@pytest.mark.parametrize("plan", [*map(str, FIXED), LOOKS, ALWAYS_VALID])
def test_a_replay_is_what_the_analyzer_says_of_the_same_runs(plan: str) -> None:
    bank = SyntheticBank().add("toy", NOISY)
    records = bank.records("toy")
    chosen = next(p for p in plans_of(RULE, num_seeds=12) if p.name == plan)
    outcomes = set()
    for order in draw_orders(range(12), draws=4, task="toy"):
        draw = Draw(order, records["fp32"], RULE)
        seeds = order[: chosen.pairs]
        findings = analyze_model(
            [records[name][seed] for name in records for seed in seeds],
            sweep_id="s",
            policies=list(records),
            seeds=seeds,
            reference="fp32",
            rule=RULE,
            timings=None,
            speed_note="",
            command="",
            descriptions={},
            same_point=bank.same_point("toy"),
            plan=_seed_plan(plan),
        )
        judged = {v.policy: v for v in findings.verdicts}
        for candidate in _candidates(bank):
            verdict = judged[candidate.facts.name]
            outcome, pairs = replay(draw, chosen, OUR_RULE, candidate, None)
            if verdict.is_control:
                # The product tells nobody a verdict on its own control.
                continue
            outcomes.add(outcome)
            assert outcome == verdict.outcome, (candidate.facts.name, verdict.main_reason)
            if chosen.sequential:
                assert verdict.look is not None
                assert pairs == verdict.look.pairs
    # All three verdicts occur, or the comparison shows little; one pair accepts nothing.
    assert outcomes == ({"reject", "inconclusive"} | ({"accept"} if plan != "1" else set()))


def _seed_plan(plan: str) -> SeedPlan:
    if plan == LOOKS:
        return SeedPlan.of(RULE, seeds_given=None)
    if plan == ALWAYS_VALID:
        pairs = tuple(range(3, 9))
        return SeedPlan(kind="always_valid", looks=pairs, alphas=(0.05,) * 6)
    return SeedPlan.fixed(int(plan), RULE)


def test_looks_by_hand_stop_at_the_first_settled_one() -> None:
    bank = SyntheticBank().add("toy", NOISY)
    plans = {p.name: p for p in plans_of(RULE, num_seeds=12)}
    used = Counter()
    for order in draw_orders(range(12), draws=12, task="toy"):
        draw = Draw(order, bank.records("toy")["fp32"], RULE)
        for candidate in _candidates(bank):
            outcome, pairs = replay(draw, plans[LOOKS], OUR_RULE, candidate, None)
            for look in plans[LOOKS].looks:
                said, settled = OUR_RULE.judge(draw.evidence(candidate, None, look))
                if settled:
                    break
            assert (outcome, pairs) == (said, look.pairs)
            used[pairs] += 1
    assert set(used) == {3, 5, 8}
    assert all(a < b for a, b in pairwise(sorted(used)))


def test_answers_about_a_run_are_computed_once_and_go_with_it() -> None:
    calls = []

    @once_per_run
    def length(record: RunRecord, factor: int, *, more: int = 0) -> int:
        calls.append(record.seed)
        return factor * len(record.series["loss"]) + more

    before = num_remembered()
    record, other = (SyntheticBank().add("t", seeds=[s]).records("t")["fp32"][s] for s in (0, 1))
    assert [length(record, 2), length(record, 2), length(record, 3)] == [240, 240, 360]
    assert length(record, 2, more=1) == 241
    assert length(other, 2) == 240
    assert calls == [0, 0, 0, 1]
    assert num_remembered() == before + 2
    del record, other
    assert num_remembered() == before
