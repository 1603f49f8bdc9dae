"""What a worker does beside training: reuse, the second try, and the copy that is made once."""

from __future__ import annotations

import dataclasses

from factories import diverged, make_record

from harness.analysis.analyzer import analyze_model
from harness.analysis.decision import DecisionRule
from harness.experiment.job import finished_record, run_folder, with_second_try
from harness.runs.record import RECORD_FILE, write_record


def test_a_finished_run_is_found_and_a_crashed_or_broken_one_is_not(tmp_path):
    record = make_record("bf16", 1)
    folder = run_folder(tmp_path, record.run_key)
    assert finished_record(tmp_path, record.run_key) is None
    write_record(record, folder)
    assert finished_record(tmp_path, record.run_key) == record
    write_record(dataclasses.replace(record, status="crashed"), folder)
    assert finished_record(tmp_path, record.run_key) is None
    (folder / RECORD_FILE).write_text("{")
    assert finished_record(tmp_path, record.run_key) is None


def test_second_try_leaves_the_first_and_notes_that_it_finished():
    first, second = diverged(make_record("bf16", 1)), make_record("bf16", 1)
    noted = with_second_try(first, second)
    assert dataclasses.replace(noted, events=first.events) == first
    assert noted.events[-1]["kind"] == "intermittent"
    assert with_second_try(first, diverged(second)) == first


def test_a_failure_that_went_away_is_still_rejected_and_called_intermittent():
    records = [make_record(policy, seed) for policy in ("fp32", "bf16") for seed in (0, 1, 2)]
    failed = with_second_try(diverged(records[-1]), records[-1])
    findings = analyze_model(
        [*records[:-1], failed],
        sweep_id="s",
        policies=["fp32", "bf16"],
        seeds=[0, 1, 2],
        reference="fp32",
        rule=DecisionRule(),
        timings=None,
        speed_note="",
        command="python -m harness",
        descriptions={},
    )
    (verdict,) = findings.verdicts
    assert verdict.outcome == "reject"
    assert "INTERMITTENT" in {reason.code for reason in verdict.reasons}
