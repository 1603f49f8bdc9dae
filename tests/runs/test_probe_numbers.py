"""Numbers of probes in a stored record."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from tiny_workloads import run

from harness.runs.record import RunRecord, probe_number


def test_numbers_that_are_none_come_back() -> None:
    found = {"norms": {"values": [1.5, math.nan, -math.inf, None]}}
    record = dataclasses.replace(run(steps=1), probes=found)
    stored = RunRecord.from_json(record.to_json()).probes["norms"]["values"]
    assert stored == [1.5, "NaN", "-Infinity", None]
    values = [probe_number(value) for value in stored]
    assert values[0] == 1.5
    assert math.isnan(values[1] or 0.0)
    assert values[2:] == [-math.inf, None]
    with pytest.raises(ValueError, match="'fp32' is no number"):
        probe_number("fp32")


def test_a_record_from_before_the_probes_is_read() -> None:
    data = json.loads(run(steps=1).to_json())
    del data["probes"]
    data["schema_version"] = 1
    assert RunRecord.from_json(json.dumps(data)).probes == {}
    data["schema_version"] = 3
    with pytest.raises(ValueError, match="versions 1 and 2"):
        RunRecord.from_json(json.dumps(data))
