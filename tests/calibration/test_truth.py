"""The truth of an arm: planted shifts are found for what they are, from all seeds."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from factories import POLICIES, crashed, make_record
from synthetic_bank import MARGIN, Planted, SyntheticBank

from harness.analysis.rule import DecisionRule
from harness.analysis.sequential import measure_reference
from harness.analysis.verdicts import Reference
from harness.calibration.truth import Truth, complete_seeds, truth_of
from harness.runs.record import RunRecord

RULE = DecisionRule()
SEEDS = range(12)


def _reference() -> Reference:
    return measure_reference({s: make_record("fp32", s) for s in SEEDS}, RULE)


def _truth(planted: Planted) -> Truth:
    bank = SyntheticBank().add("toy", {"arm": planted})
    return truth_of(bank.records("toy")["arm"], _reference(), RULE)


def test_planted_shifts_are_harm_and_noise_is_benign() -> None:
    assert _truth(Planted(offset=2 * MARGIN)).label == "harm"
    assert _truth(Planted(held_out_offset=2 * MARGIN)).label == "harm"
    assert _truth(Planted(offset=0.7 * MARGIN)).label == "grey"
    assert _truth(Planted()).label == "benign"
    # Better than FP32 is not worse than it.
    assert _truth(Planted(offset=-5 * MARGIN)).label == "benign"


def test_too_noisy_to_tell_is_grey() -> None:
    # Twelve seeds of 5 margins of noise: two standard errors are about 3 margins.
    assert _truth(Planted(luck=5 * MARGIN)).label == "grey"


def test_effects_are_mean_and_standard_error_in_margins() -> None:
    bank = SyntheticBank().add("toy", {"arm": Planted(offset=2 * MARGIN)})
    runs, reference = bank.records("toy")["arm"], _reference()
    found = truth_of(runs, reference, RULE)
    # By hand: the tail is the last third, 40 of 120 steps.
    d = np.array(
        [
            np.mean(runs[s].series["loss"][80:])
            - np.mean(make_record("fp32", s).series["loss"][80:])
            for s in SEEDS
        ]
    )
    margin = reference.levels["train"].margin
    assert found.effects["train"].mean == pytest.approx(d.mean() / margin)
    assert found.effects["train"].se == pytest.approx(d.std(ddof=1) / math.sqrt(12) / margin)
    assert found.size == max(e.mean for e in found.effects.values())
    assert found.num_seeds == 12
    assert found.hard_failures == 0


@pytest.mark.parametrize(
    ("failing", "label"), [(0, "benign"), (1, "intermittent"), (2, "intermittent"), (3, "harm")]
)
def test_a_quarter_of_failing_seeds_is_harm_and_fewer_are_set_apart(
    failing: int, label: str
) -> None:
    found = _truth(Planted(diverges=frozenset(range(failing))))
    assert found.label == label
    assert found.hard_failures == failing / 12
    assert math.isinf(found.size) == (failing > 0)


def test_a_rare_failure_does_not_hide_the_harm_of_the_other_seeds() -> None:
    found = _truth(Planted(offset=2 * MARGIN, diverges=frozenset([0])))
    assert (found.label, found.hard_failures) == ("harm", 1 / 12)


def test_crashes_are_hard_failures() -> None:
    runs = {s: crashed(make_record("bf16", s), at_step=5) for s in SEEDS}
    found = truth_of(runs, _reference(), RULE)
    assert (found.label, found.hard_failures) == ("harm", 1.0)


def test_runs_that_are_no_pairs_are_void() -> None:
    def other_batches(record: RunRecord) -> RunRecord:
        prints = dataclasses.replace(record.fingerprints, batches=(1,) * record.num_steps)
        return dataclasses.replace(record, fingerprints=prints)

    runs = {s: other_batches(make_record("bf16", s)) for s in SEEDS}
    assert truth_of(runs, _reference(), RULE).label == "void"


def test_a_reference_that_does_not_learn_makes_everything_void() -> None:
    flat = {s: make_record("fp32", s, start=2.001, floor=2.0) for s in SEEDS}
    runs = {s: make_record("bf16", s, start=2.001, floor=2.0) for s in SEEDS}
    assert truth_of(runs, measure_reference(flat, RULE), RULE).label == "void"


def test_seeds_are_those_that_every_arm_has_but_for_arms_that_lack_most() -> None:
    def runs(name: str, *seeds: int) -> dict[int, RunRecord]:
        return {s: make_record(POLICIES[name], s) for s in seeds}

    records = {
        "fp32": runs("fp32", 0, 1, 2, 3),
        "bf16": runs("bf16", 0, 1, 2),
        "fp16": runs("fp16", 0),
    }
    assert complete_seeds(records, "fp32") == [0, 1, 2]
