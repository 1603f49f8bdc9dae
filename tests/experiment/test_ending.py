"""Which runs may end themselves, and which stored runs that did so still count."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import POLICIES, make_record, with_series

from harness.analysis.rule import DecisionRule
from harness.config import RunConfig
from harness.experiment.conclude import load_records
from harness.experiment.ending import in_run_gate, still_counts
from harness.experiment.job import run_folder
from harness.experiment.manifest import Manifest, PlannedRun
from harness.runs.record import ENDED_EARLY, RunRecord, write_record

FP32 = make_record("fp32", num_steps=300)


def config(policy: str, **decision: Any) -> RunConfig:
    """Return the parts of a configuration that are asked for."""
    values = {**POLICIES[policy].content(), "name": policy}
    rule = DecisionRule(**decision).as_mapping()
    return SimpleNamespace(policy=values, decision=rule, reference="fp32")  # type: ignore[return-value]


def ended(loss: float) -> RunRecord:
    """Return a run that ended itself after 50 steps, with this loss at step 30."""
    record = make_record("bf16", num_steps=300)
    losses = list(record.series["loss"][:50])
    losses[30] = loss
    short = {name: values[:50] for name, values in record.series.items()}
    event = {"step": 50, "kind": ENDED_EARLY, "message": "the loss is not finite at step 30"}
    record = dataclasses.replace(record, status="diverged", series=short, events=(event,))
    return with_series(record, loss=losses)


@pytest.mark.parametrize("policy", ["fp32", "fp32_twin"])
def test_the_reference_and_a_control_are_never_ended(policy: str) -> None:
    assert in_run_gate(config(policy), FP32) is None


def test_a_candidate_is_unless_it_is_off() -> None:
    gate = in_run_gate(config("bf16"), FP32)
    assert gate is not None
    assert gate({"loss": [1.0, math.nan]}) == "the loss is not finite at step 1"
    assert in_run_gate(config("bf16", end_early=False), FP32) is None


def test_a_run_that_ended_itself_counts_while_it_still_would() -> None:
    assert still_counts(ended(math.nan), in_run_gate(config("bf16"), FP32))
    # Ended under other settings, or with the switch off now: to be trained to its end.
    assert not still_counts(ended(2.0), in_run_gate(config("bf16"), FP32))
    assert not still_counts(ended(math.nan), in_run_gate(config("bf16", end_early=False), FP32))
    whole = make_record("bf16", num_steps=300)
    assert still_counts(whole, None)


def test_a_run_that_another_sweep_made_under_another_name_has_the_name_of_this_one(
    tmp_path: Path,
) -> None:
    record = make_record("bf16", 1)
    write_record(record, run_folder(tmp_path, record.run_key))
    planned = [
        PlannedRun(run_key=record.run_key, workload="toy", policy=name, seed=1)
        for name in ("bf16", "fp16_in_bf16")
    ]
    manifest = Manifest(
        sweep_id="s",
        sweep="precision",
        command="",
        device="cpu",
        reference="fp32",
        runs=tuple(planned),
        descriptions={},
    )
    records, troubles = load_records(manifest, tmp_path)
    assert not troubles
    assert records == [record, dataclasses.replace(record, policy="fp16_in_bf16")]
