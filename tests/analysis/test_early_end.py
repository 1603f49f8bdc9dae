"""Runs are spared exactly where the verdict on what is there is a rejection by a gate."""

from __future__ import annotations

import dataclasses

import pytest
from factories import POLICIES, crashed, diverged, make_record

from harness.analysis.analyzer import analyze_model
from harness.analysis.early_end import rejected_by_gate
from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan

RULE = DecisionRule()
SEEDS = (0, 1, 2)
REFERENCES = {seed: make_record("fp32", seed) for seed in SEEDS}


def _gate(runs, references=REFERENCES, policy="bf16"):
    return rejected_by_gate(POLICIES[policy], runs, references, seeds=SEEDS, rule=RULE)


def _runs(seeds, **changes):
    return {seed: make_record("bf16", seed, **changes) for seed in seeds}


def test_a_sound_run_spares_nothing():
    assert _gate(_runs([0])) is None
    assert _gate({}) is None


def test_a_run_that_ended_in_trouble_is_enough():
    reason = _gate({0: diverged(make_record("bf16", 0))}, {0: REFERENCES[0]})
    assert reason is not None
    assert reason.code == "NONFINITE"


def test_a_crash_is_enough():
    reason = _gate({0: crashed(make_record("bf16", 0))})
    assert reason is not None
    assert reason.code == "CRASHED"


def _relapsed(seed):
    """A run that learned, went back to where it began and stayed there."""
    record = make_record("bf16", seed)
    losses = list(record.series["loss"])
    losses[len(losses) // 2 :] = [losses[0]] * (len(losses) - len(losses) // 2)
    return dataclasses.replace(record, series={**record.series, "loss": tuple(losses)})


def test_a_gate_with_a_margin_waits_for_every_reference_of_the_look():
    # The margin may grow with the seeds' spread, which three references show and two do not.
    runs = {0: _relapsed(0)}
    assert _gate(runs, {seed: REFERENCES[seed] for seed in (0, 1)}) is None
    reason = _gate(runs)
    assert reason is not None
    assert reason.code == "DIVERGED"


def test_gross_degradation_waits_for_every_seed_of_the_look():
    # "Every seed is worse" is not known of a seed that has not run, and whether it has must not
    # depend on how many workers there are.
    assert _gate(_runs([0, 1], offset=1.0)) is None


def test_what_cannot_judge_spares_nothing():
    failing = {0: diverged(make_record("bf16", 0))}
    assert _gate(failing, {**REFERENCES, 0: crashed(REFERENCES[0])}) is None
    assert _gate(failing, {0: diverged(REFERENCES[0])}) is None
    assert _gate(failing, {}) is None


@pytest.mark.parametrize(
    "runs",
    [
        {0: diverged(make_record("bf16", 0))},
        {1: diverged(make_record("bf16", 1))},
        {0: _relapsed(0)},
        {0: _relapsed(0), 1: make_record("bf16", 1)},
    ],
)
def test_the_verdict_on_the_same_runs_is_settled_by_the_same_gate(runs):
    reason = _gate(runs)
    assert reason is not None
    (verdict,) = analyze_model(
        [*REFERENCES.values(), *runs.values()],
        sweep_id="s",
        policies=["fp32", "bf16"],
        seeds=range(8),
        reference="fp32",
        rule=RULE,
        timings=None,
        speed_note="",
        command="python -m harness",
        descriptions={},
        plan=SeedPlan.of(RULE, seeds_given=None),
    ).verdicts
    assert (verdict.outcome, verdict.look.stop) == ("reject", "gate")
    assert verdict.main_reason.code == reason.code
