"""Properties of the whole analyzer on input that no healthy training leaves behind.

Hypothesis draws grids of runs with all kinds of damage; whatever they are, no exception, no
warning, and no verdict without evidence.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from analyses import Analysis
from factories import crashed, diverged, make_grid, make_record, with_series
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analysis.findings import ModelFindings, Verdict
from harness.analysis.methods import METHODS
from harness.analysis.pairing import pairing_fault
from harness.analysis.rule import DecisionRule
from harness.report.decision_json import decision_text
from harness.runs.record import RunRecord

STEPS = 60
Damage = Callable[[RunRecord], RunRecord]


def losses(change: Callable[[list[float]], list[float]]) -> Damage:
    return lambda run: with_series(run, loss=change(list(run.series["loss"])))


def held_out(change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> Damage:
    def damage(run: RunRecord) -> RunRecord:
        if run.held_out is None:
            return run
        return dataclasses.replace(
            run, held_out=dataclasses.replace(run.held_out, loss=change(run.held_out.loss))
        )

    return damage


def without_held_out(run: RunRecord) -> RunRecord:
    prints = dataclasses.replace(run.fingerprints, held_out_sha256=None)
    return dataclasses.replace(run, held_out=None, fingerprints=prints)


DAMAGES: dict[str, Damage] = {
    "none": lambda run: run,
    "one NaN": losses(lambda x: [*x[:40], math.nan, *x[41:]]),
    "one infinity": losses(lambda x: [*x[:-1], math.inf]),
    "both infinities": losses(lambda x: [*x[:-2], math.inf, -math.inf]),
    "huge": losses(lambda x: [*x[:-1], 1e300]),
    "one step short": losses(lambda x: x[:-1]),
    "no step": losses(lambda x: []),
    "constant": losses(lambda x: [2.0] * len(x)),
    "zero": losses(lambda x: [0.0] * len(x)),
    "negative": losses(lambda x: [-abs(v) for v in x]),
    "rising": losses(lambda x: x[::-1]),
    "tiny": losses(lambda x: [v * 1e-30 for v in x]),
    "held-out NaN": held_out(lambda x: (*x[:-1], math.nan)),
    "held-out infinite": held_out(lambda x: (*x[:-2], math.inf, -math.inf)),
    "held-out constant": held_out(lambda x: (1.0,) * len(x)),
    "held-out zero": held_out(lambda x: (0.0,) * len(x)),
    "no held-out": without_held_out,
    "diverged": lambda run: diverged(run, at_step=20),
    "crashed": lambda run: crashed(run, at_step=3),
}
NON_FINITE = {"one NaN", "one infinity", "both infinities", "diverged", "crashed", "no step"}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is wrong with the runs of one candidate and FP32; small, so that a failure is legible.

    `both` happens to every run, `ours` to the candidate's by seed, `theirs` to FP32's first.
    """

    ours: tuple[str, ...]
    both: str
    theirs: str
    offset: float

    @property
    def seeds(self) -> range:
        return range(len(self.ours))

    def records(self) -> list[RunRecord]:
        runs = []
        for seed, ours in enumerate(self.ours):
            reference = DAMAGES[self.both](make_record("fp32", seed, num_steps=STEPS))
            runs.append(DAMAGES[self.theirs](reference) if seed == 0 else reference)
            candidate = make_record("bf16", seed, num_steps=STEPS, offset=self.offset)
            runs.append(DAMAGES[ours](DAMAGES[self.both](candidate)))
        return runs


# Mostly healthy, or nothing but ruins would be drawn.
KINDS = st.one_of(st.just("none"), st.sampled_from(sorted(DAMAGES)))
GRIDS = st.builds(
    Grid,
    ours=st.lists(KINDS, min_size=1, max_size=5).map(tuple),
    both=KINDS,
    theirs=KINDS,
    offset=st.sampled_from([0.0, 0.001, 0.03, -0.5, 3.0]),
)


def verdict_of(findings: ModelFindings) -> Verdict | None:
    return findings.verdicts[0] if findings.verdicts else None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(GRIDS, st.sampled_from(METHODS))
def test_whatever_the_runs_there_is_a_verdict_or_a_reason_for_none(grid, method) -> None:
    rule = DecisionRule(method=method)
    findings = Analysis().findings(grid.records(), seeds=grid.seeds, rule=rule)
    verdict = verdict_of(findings)
    # Strict JSON: no NaN slips through, whatever was measured.
    json.loads(decision_text(findings))
    if verdict is None:
        assert findings.failed
        return
    assert verdict.reasons
    assert all(reason.message.endswith(".") for reason in verdict.reasons)
    if verdict.outcome == "accept":
        assert method != "non_inferiority" or len(grid.ours) >= 3
        # A seed that FP32 itself failed in is left out for everybody.
        assert not NON_FINITE & {grid.ours[seed] for seed in verdict.seeds_used}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(GRIDS, st.randoms(use_true_random=False))
def test_the_order_of_records_is_irrelevant(grid, random) -> None:
    def text(records: list[RunRecord]) -> str:
        policies = ["fp32", "bf16"]
        return decision_text(Analysis().findings(records, policies=policies, seeds=grid.seeds))

    records = grid.records()
    before = text(records)
    random.shuffle(records)
    assert text(records) == before


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(DAMAGES)), st.sampled_from(sorted(DAMAGES)), st.integers(1, 5))
def test_fp32_against_itself_is_never_rejected(first, second, count) -> None:
    """Bitwise the same runs, whatever is wrong with them."""
    records = []
    for seed in range(count):
        run = DAMAGES[second](DAMAGES[first](make_record("fp32", seed, num_steps=STEPS)))
        own = make_record("bf16", seed)
        records += [
            run,
            dataclasses.replace(
                run, policy="bf16", policy_content=own.policy_content, run_key=own.run_key
            ),
        ]
    verdict = verdict_of(Analysis().findings(records, seeds=range(count)))
    assert verdict is None or verdict.outcome != "reject"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([0.0, 0.005, 0.02, 0.05, 0.2, 2.0]),
    st.sampled_from([0.0, 0.002, 0.02]),
    st.integers(1, 5),
    st.integers(-40, 40),
)
def test_the_scale_of_the_loss_is_irrelevant(offset, luck, count, exponent) -> None:
    """A loss in other units is the same loss: a power of two changes no rounding."""
    scale = 2.0**exponent
    grid = make_grid(
        {"fp32": {}, "bf16": {"offset": offset, "luck": luck}}, range(count), num_steps=STEPS
    )
    scaled = [
        held_out(lambda x: tuple(v * scale for v in x))(losses(lambda x: [v * scale for v in x])(r))
        for r in grid
    ]
    plain = verdict_of(Analysis().findings(grid, seeds=range(count)))
    other = verdict_of(Analysis().findings(scaled, seeds=range(count)))
    assert plain is not None
    assert other is not None
    assert (other.outcome, Analysis.codes(other)) == (plain.outcome, Analysis.codes(plain))
    assert other.p_accept == plain.p_accept


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from([0.0, 0.005, 0.02]), st.integers(3, 5))
def test_more_harm_is_never_judged_better(luck, count) -> None:
    rank = {"accept": 0, "inconclusive": 1, "reject": 2}
    outcomes = [
        rank[
            Analysis()
            .verdict(
                make_grid(
                    {"fp32": {}, "bf16": {"offset": harm, "luck": luck}},
                    range(count),
                    num_steps=STEPS,
                ),
                seeds=range(count),
            )
            .outcome
        ]
        for harm in (0.0, 0.01, 0.02, 0.03, 0.06, 0.2, 1.0)
    ]
    assert outcomes == sorted(outcomes)
    assert outcomes[-1] == 2


class TestByName:
    """The cases one by one, with the verdict that each must have."""

    @pytest.mark.parametrize("count", [1, 2])
    def test_too_few_seeds_never_accept(self, count, analysis) -> None:
        grid = make_grid(["fp32", "bf16"], range(count))
        verdict = analysis.verdict(grid, seeds=range(count))
        assert (verdict.outcome, verdict.main_reason.code) == ("inconclusive", "TOO_FEW_SEEDS")

    def test_identical_runs_are_accepted_and_noticed(self, analysis) -> None:
        verdict = analysis.verdict(make_grid(["fp32", "bf16"]))
        assert verdict.outcome == "accept"
        assert "IDENTICAL_TO_FP32" in analysis.codes(verdict)

    @pytest.mark.parametrize("damage", ["one NaN", "one infinity", "held-out NaN", "diverged"])
    def test_one_damaged_seed_of_five_rejects(self, damage, analysis) -> None:
        grid = make_grid(["fp32", "bf16"], range(5))
        grid = [DAMAGES[damage](r) if (r.policy, r.seed) == ("bf16", 4) else r for r in grid]
        verdict = analysis.verdict(grid, seeds=range(5))
        assert (verdict.outcome, verdict.main_reason.code) == ("reject", "NONFINITE")

    def test_the_same_damage_in_fp32_drops_the_seed_or_voids_the_comparison(self, analysis) -> None:
        def damaged(count: int) -> Verdict:
            grid = make_grid(["fp32", "bf16"], range(5))
            grid = [
                DAMAGES["one NaN"](r) if r.policy == "fp32" and r.seed < count else r for r in grid
            ]
            return analysis.verdict(grid, seeds=range(5))

        one, two = damaged(1), damaged(2)
        assert (one.outcome, one.seeds_dropped, len(one.seeds_used)) == ("accept", (0,), 4)
        assert (two.outcome, two.main_reason.code) == ("inconclusive", "REFERENCE_UNSTABLE")

    def test_unequal_lengths_are_never_averaged_over_what_there_is(self, analysis) -> None:
        grid = [
            DAMAGES["one step short"](r) if (r.policy, r.seed) == ("bf16", 1) else r
            for r in make_grid(["fp32", "bf16"], range(5))
        ]
        verdict = analysis.verdict(grid, seeds=range(5))
        assert verdict.outcome == "inconclusive"
        assert math.isnan(verdict.estimates["train"].mean_difference)

    def test_a_missing_held_out_set_leaves_one_endpoint(self, analysis) -> None:
        verdict = analysis.verdict(make_grid(["fp32", "bf16"], held_out=False))
        assert verdict.outcome == "accept"
        assert set(verdict.estimates) == {"train"}
        assert "HELDOUT_MISSING" in analysis.codes(verdict)
        assert verdict.estimates["train"].alpha_reject == 0.05

    @pytest.mark.parametrize("value", [2.0, 0.0, -1.0])
    def test_a_constant_loss_shows_nothing(self, value, analysis) -> None:
        grid = make_grid(["fp32", "bf16"], held_out=False)
        grid = [losses(lambda x: [value] * len(x))(r) for r in grid]
        verdict = analysis.verdict(grid)
        assert (verdict.outcome, verdict.main_reason.code) == (
            "inconclusive",
            "REFERENCE_NOT_LEARNING",
        )

    @pytest.mark.parametrize(("offset", "outcome"), [(0.0, "accept"), (1.0, "reject")])
    def test_a_negative_loss_is_judged_without_its_size(self, offset, outcome, analysis) -> None:
        grid = make_grid({"fp32": {}, "bf16": {"offset": offset}}, start=-1.0, floor=-3.0)
        verdict = analysis.verdict(grid)
        assert verdict.outcome == outcome
        assert verdict.estimates["train"].margin_term == "progress"


def test_the_damages_are_damage() -> None:
    run = make_record("bf16", 0, num_steps=STEPS)
    for name, damage in DAMAGES.items():
        damaged = damage(run)
        assert (damaged == run) == (name == "none"), name
        if name not in ("no held-out", "crashed"):
            assert pairing_fault(damaged, make_record("fp32", 0, num_steps=STEPS)) is None, name
