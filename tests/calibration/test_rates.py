"""Rates over arms, targets and duels, against counts made by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import pytest
from scipy import stats
from synthetic_bank import ARMS, MARGIN, Planted, SyntheticBank

from harness.analysis.analyzer import analyze_model
from harness.analysis.rule import DecisionRule
from harness.calibration.contenders import Contender, contenders
from harness.calibration.draws import draw_orders
from harness.calibration.duels import Duel, duels
from harness.calibration.judging import judge_task
from harness.calibration.plans import LOOKS
from harness.calibration.rates import (
    HALF_A,
    arms_of,
    clustered,
    compute_share,
    rate,
    sweep_share,
    wilson,
)
from harness.calibration.results import ArmResult, Tally, TaskResult
from harness.calibration.targets import reported_half, targets
from harness.calibration.truth import Effect, Truth

RULE = DecisionRule()


@pytest.fixture(scope="module")
def judged() -> TaskResult:
    bank = SyntheticBank().add("toy")
    return judge_task(
        bank, "toy", rule=RULE, rules=contenders(), draws=20, shift_draws=60, digest="d"
    )


def _arm(
    name: str = "arm",
    *,
    task: str = "recurrent",
    kind: str = "fault",
    label: str = "harm",
    size: float = 3.0,
    num_seeds: int = 24,
    **tallies: tuple[float, float, float],
) -> ArmResult:
    """One arm whose rule `<rule>__<plan>` has these shares of accept, undecided, reject."""
    return ArmResult(
        task=task,
        name=name,
        kind=kind,
        family=name,
        dose="",
        sentence="",
        truth=Truth(
            label=label,  # type: ignore[arg-type]
            size=size,
            effects={"train": Effect(mean=size, se=0.1, sd=0.5)},
            hard_failures=0.0,
            num_seeds=num_seeds,
        ),
        probe=None,
        num_seeds=num_seeds,
        tallies={
            key.replace("__", "@"): Tally(
                accept=a,
                inconclusive=u,
                reject=r,
                seeds=3.0 if key.endswith("looks") else _pairs(key),
                runs=3.0 if key.endswith("looks") else _pairs(key),
                pairs=_pairs(key),
            )
            for key, (a, u, r) in tallies.items()
        },
    )


def _pairs(key: str) -> int:
    plan = key.split("__")[1]
    return int(plan) if plan.isdigit() else 8


def _task(*arms: ArmResult, name: str = "recurrent") -> TaskResult:
    return TaskResult(
        task=name,
        digest="",
        num_steps=300,
        num_seeds=24,
        draws=100,
        unit="nats",
        progress=2.0,
        margins={"train": (0.02, "progress")},
        unstable=0,
        void=None,
        incomplete=(),
        arms=arms,
    )


def test_groups_follow_the_truth_but_null_arms_stay_null(judged: TaskResult) -> None:
    groups = {arm.name: arm.group for arm in judged.arms}
    assert groups == {
        "fp32_noise": "null",
        "fp32_ulp": "null",
        "bf16": "harmless",
        "one_margin": "grey",
        "two_margins": "harm",
        "ten_margins": "harm",
        "held_out_only": "harm",
        "stalls": "quiet_fault",
        "nan": "harm",
        "rare_nan": "intermittent",
    }
    assert _arm(kind="null", label="harm").group == "null"
    assert _arm(kind="harmless", label="harm").group == "harm"
    assert _arm(kind="null", label="void").group == "void"


def test_shares_are_those_counted_with_the_analyzer(judged: TaskResult) -> None:
    bank = SyntheticBank().add("toy")
    records, count = bank.records("toy"), {"accept": 0, "reject": 0, "inconclusive": 0}
    orders = draw_orders(range(12), draws=20, task="toy")
    for order in orders:
        findings = analyze_model(
            [records[name][seed] for name in ("fp32", "two_margins") for seed in order[:3]],
            sweep_id="s",
            policies=["fp32", "two_margins"],
            seeds=order[:3],
            reference="fp32",
            rule=RULE,
            timings=None,
            speed_note="",
            command="",
            descriptions={},
        )
        count[findings.verdicts[0].outcome] += 1
    (arm,) = (a for a in judged.arms if a.name == "two_margins")
    tally = arm.tallies["ours@3"]
    assert (tally.accept, tally.reject, tally.inconclusive) == tuple(
        count[name] / 20 for name in ("accept", "reject", "inconclusive")
    )
    assert 0 < tally.reject < 1


def test_known_truth_comes_out(judged: TaskResult) -> None:
    by_name = {arm.name: arm.tallies for arm in judged.arms}
    assert by_name["ten_margins"]["ours@looks"].reject == 1
    assert by_name["ten_margins"]["ours@looks"].seeds == 3
    assert by_name["fp32_noise"]["ours@looks"].accept == 1
    # The training loss alone does not see it.
    assert by_name["held_out_only"]["train_only@5"].accept == 1
    assert by_name["held_out_only"]["held_out_only@5"].reject == 1
    # The probe turns every acceptance into an undecided verdict, at the first look that accepts.
    assert by_name["stalls"]["ours@looks"].inconclusive == 1
    assert by_name["stalls"]["ours_without_probe@looks"].accept == 1
    assert (
        by_name["stalls"]["ours@looks"].seeds == by_name["stalls"]["ours_without_probe@looks"].seeds
    )
    # A rival needs its pairs: two for a t test, three for steps to a target.
    assert "paired_t@1" not in by_name["bf16"]
    assert by_name["ten_margins"]["paired_t@3"].reject == 1


def test_runs_that_ended_early_cost_what_they_ran(judged: TaskResult) -> None:
    (arm,) = (a for a in judged.arms if a.name == "nan")
    # Half of the seeds stop after 45 of 120 steps.
    orders = draw_orders(range(12), draws=20, task="toy")
    expected = np.mean([sum(0.375 if s % 2 == 0 else 1.0 for s in order[:5]) for order in orders])
    assert arm.tallies["ours@5"].runs == pytest.approx(expected)
    assert arm.tallies["ours@5"].seeds == 5


def test_a_result_survives_its_file(judged: TaskResult) -> None:
    assert TaskResult.from_json(judged.to_json()).to_json() == judged.to_json()
    assert TaskResult.from_json(judged.to_json()).arms[0] == judged.arms[0]
    with pytest.raises(ValueError, match="not the result of a task"):
        TaskResult.from_json('{"task": "toy"}')


def test_shifts_are_judged_by_their_size(judged: TaskResult) -> None:
    assert {c.arm for c in judged.shifts} == {"fp32_noise", "fp32_ulp", "bf16"}
    for curve in judged.shifts:
        shares = {p.shift: (p.accept, p.reject) for p in curve.points}
        assert shares[0.0] == (1.0, 0.0)
        assert shares[4.0] == (0.0, 1.0)
        accepts = [p.accept for p in curve.points]
        assert accepts == sorted(accepts, reverse=True)


@pytest.mark.slow
def test_error_at_the_margin_is_that_of_the_test() -> None:
    """Many seeds, so that draws are as good as fresh ones: about alpha on either side."""
    bank = SyntheticBank().add(
        "toy", {"bf16": Planted(kind="harmless", luck=0.02)}, seeds=range(200), num_steps=30
    )
    result = judge_task(bank, "toy", rule=RULE, rules=contenders()[:1], draws=250, shift_draws=250)
    assert {c.plan for c in result.shifts} == {"3", "5", "8", "looks", "always_valid"}
    for curve in result.shifts:
        point = curve.at_own_margin
        # Both endpoints move together here, so acceptance errs at alpha and rejection at half of
        # it; five binomial standard deviations of 250 draws above are 0.12 and 0.075.
        assert point.accept < 0.12, curve.plan
        assert point.reject < 0.075, curve.plan


def test_rate_is_the_mean_over_arms_with_its_worst() -> None:
    arms = [
        _arm("a", ours__3=(0.0, 0.5, 0.5)),
        _arm("b", ours__3=(0.3, 0.5, 0.2)),
        _arm("c", task="diffusion", ours__3=(0.0, 0.0, 1.0)),
        _arm("not_asked"),
    ]
    found = rate(arms, "ours@3", "accept")
    assert found is not None
    assert (found.mean, found.worst, found.worst_arm) == (pytest.approx(0.1), 0.3, "recurrent/b")
    assert found.num_arms == 3
    assert found.low <= found.mean <= found.high
    assert rate(arms, "ours@99", "accept") is None
    assert rate([], "ours@3", "accept") is None


def test_no_error_in_few_experiments_is_no_proof() -> None:
    found = rate([_arm(ours__8=(0.0, 0.0, 1.0))], "ours@8", "accept")
    assert found is not None
    # 24 seeds hold three disjoint experiments of eight: Wilson's upper end for 0 of 3.
    assert (found.mean, found.low) == (0.0, 0.0)
    assert found.high == pytest.approx(1.959964**2 / (3 + 1.959964**2))


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (1, 10), (5, 9), (10, 10)])
def test_wilson_is_scipys(successes: int, trials: int) -> None:
    expected = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    assert wilson(successes / trials, trials) == pytest.approx(tuple(expected), abs=1e-6)


def test_clustered_interval_is_wider_where_tasks_differ() -> None:
    same = clustered(["a"] * 10 + ["b"] * 10, [0.0, 1.0] * 10)
    apart = clustered(["a"] * 10 + ["b"] * 10, [0.0] * 10 + [1.0] * 10)
    assert apart == (0.0, 1.0)
    # Of one task only the arms are drawn: the binomial spread of the mean of ten.
    low, high = clustered(["a"] * 10, [0.0, 1.0] * 5)
    assert (low, high) == pytest.approx((0.2, 0.8), abs=0.11)
    assert same[1] - same[0] < 0.5
    assert clustered(["a"], [0.25]) == (0.25, 0.25)


def test_compute_counts_candidate_and_reference_runs() -> None:
    def costly(name: str, seeds: float, runs: float, full: float) -> ArmResult:
        arm = _arm(name)
        tallies = {
            "ours@looks": dataclasses.replace(_TALLY, seeds=seeds, runs=runs),
            "ours@8": dataclasses.replace(_TALLY, seeds=8.0, runs=full),
        }
        return dataclasses.replace(arm, tallies=tallies)

    arms = [costly("a", 3.0, 3.0, 8.0), costly("b", 5.0, 1.0, 2.0)]
    assert compute_share(arms, "ours@looks", "ours@8") == (6 + 6) / (16 + 10)
    assert compute_share([], "ours@looks", "ours@8") is None


_TALLY = Tally(accept=1.0, inconclusive=0.0, reject=0.0, seeds=3.0, runs=3.0, pairs=8)


def test_a_sweep_runs_its_reference_as_long_as_any_candidate() -> None:
    arms = {
        "bf16": ARMS["bf16"],
        "noisy": Planted(kind="harmless", luck=0.03),
    }
    bank = SyntheticBank().add("toy", arms)
    result = judge_task(bank, "toy", rule=RULE, rules=contenders(), draws=20, shift_draws=1)
    assert result.sweep is not None
    used = {arm.name: arm.tallies["ours@looks"].seeds for arm in result.arms}
    # BF16 is settled at once here, so the reference runs as long as the noisy arm.
    assert used["bf16"] == 3
    assert result.sweep.adaptive == pytest.approx(3 + 2 * used["noisy"])
    assert result.sweep.fixed == 24
    assert sweep_share([result]) == result.sweep.adaptive / 24


def _good() -> dict[str, tuple[float, float, float]]:
    return {"ours__3": (0, 0.02, 0.98), "ours__looks": (0, 0, 1), "ours__8": (0, 0, 1)}


def _fine() -> dict[str, tuple[float, float, float]]:
    return {"ours__3": (0.9, 0.1, 0), "ours__looks": (1, 0, 0), "ours__8": (1, 0, 0)}


def _verdicts(tasks: list[TaskResult]) -> Mapping[tuple[str, str], bool | None]:
    return {(t.title, plan): aim.met for t in targets(tasks, "B") for plan, aim in t.aims.items()}


def test_targets_are_met_or_missed_by_the_numbers_alone() -> None:
    good = _task(
        _arm("n", kind="null", label="benign", size=0.0, **_fine()),
        _arm("h", kind="harmless", label="benign", size=-0.1, **_fine()),
        _arm("f", **_good()),
    )
    met = _verdicts([good])
    assert met[("harmful arms of 2 margins or more rejected", "3")] is None
    assert {value for key, value in met.items() if value is not None} == {True}
    # Half A does not count.
    bad_accept = _arm("g", size=1.2, **{**_good(), "ours__looks": (0.04, 0.0, 0.96)})
    assert (
        _verdicts([good, _task(dataclasses.replace(bad_accept, task="kernel"), name="kernel")])
        == met
    )
    missed = _verdicts([_task(*good.arms, bad_accept)])
    assert missed[("harmful arms accepted, mean", LOOKS)] is False
    assert missed[("harmful arms accepted, worst arm", LOOKS)] is False
    assert missed[("harmful arms accepted, mean", "3")] is True
    (row,) = (
        t for t in targets([_task(*good.arms, bad_accept)], "B") if "accepted, worst" in t.title
    )
    assert [arm.name for arm in row.aims[LOOKS].culprits] == ["g"]


def test_only_large_harm_must_be_rejected() -> None:
    slow = {**_good(), "ours__looks": (0.0, 0.5, 0.5)}
    small = _task(_arm("f", size=1.9, **slow), _arm("g", size=math.inf, **_good()))
    large = _task(_arm("f", size=2.0, **slow), _arm("g", size=math.inf, **_good()))
    key = ("harmful arms of 2 margins or more rejected", LOOKS)
    assert _verdicts([small])[key] is True
    assert _verdicts([large])[key] is False


def _rival(name: str) -> Contender:
    return Contender(name=name, title=name, judge=lambda e: ("accept", True), is_rival=True)


def test_duels_find_a_better_rival() -> None:
    def arms(reject: float, accept: float) -> TaskResult:
        own = {"ours__5": (0.0, 0.98, 0.02), "ours__looks": (0.0, 0.98, 0.02)}
        theirs = (1 - reject, 0.0, reject)
        return _task(
            _arm("h", kind="harmless", label="benign", size=0.0, **own, r__5=theirs),
            _arm("f", ours__5=(0.1, 0.0, 0.9), ours__looks=(0.1, 0.0, 0.9),
                 r__5=(accept, 0, 1 - accept)),
        )  # fmt: skip

    def found(reject: float, accept: float) -> list[Duel]:
        return list(duels([arms(reject, accept)], [_rival("r")], "B"))

    better = found(0.01, 0.05)
    assert [(d.theirs, d.ours) for d in better] == [("r@5", "ours@5"), ("r@5", "ours@looks")]
    assert all(d.better and d.dominates for d in better)
    assert not any(d.better or d.dominates for d in found(0.01, 0.2))
    assert [d.better for d in found(0.02, 0.05)] == [False, False]
    assert [d.dominates for d in found(0.02, 0.05)] == [True, True]
    assert not any(d.dominates for d in found(0.02, 0.1))


def test_halves_are_those_of_the_tasks() -> None:
    from harness.calibration.tasks import TASKS

    assert {name for name, info in TASKS.items() if info.half == "A"} == HALF_A
    assert reported_half([_task(name="kernel")]) is None
    assert reported_half([_task(name="kernel"), _task(name="diffusion")]) == "B"
    arm = _arm(task="kernel", size=-1.0)
    assert arms_of([_task(arm, name="kernel")], half="A") == [arm]
    assert arms_of([_task(arm, name="kernel")], half="B") == []


def test_margin_of_the_synthetic_bank(judged: TaskResult) -> None:
    # The planted sizes are in this unit.
    assert judged.margins["train"][0] == pytest.approx(MARGIN, rel=0.02)
