"""What all records share on disk."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from tiny_workloads import run

from harness.runs.record import RunRecord
from harness.runs.record_files import (
    read_if_there,
    stored_number,
    strict_json,
    versioned_fields,
    with_numbers,
    write_atomically,
)


def test_numbers_that_json_lacks_come_back() -> None:
    values = (1.5, math.nan, -math.inf, None, True, 3)
    text = strict_json({"values": values, "inside": {7: (math.inf,)}})
    stored = json.loads(text, parse_constant=pytest.fail)
    assert stored == {
        "values": [1.5, "NaN", "-Infinity", None, True, 3],
        "inside": {"7": ["Infinity"]},
    }
    back = [stored_number(value) for value in stored["values"]]
    assert math.isnan(back.pop(1) or 0.0)
    assert back == [1.5, -math.inf, None, None, 3.0]


def test_what_is_no_number() -> None:
    assert [stored_number(value) for value in ("7", True, [1], {}, None)] == [None] * 5
    assert with_numbers({"kind": "layer", "error": "Infinity"}) == {
        "kind": "layer",
        "error": math.inf,
    }


def test_numbers_of_probes_in_a_run_record() -> None:
    found = {"norms": {"values": [math.nan]}}
    record = dataclasses.replace(run(steps=1), probes=found)
    assert RunRecord.from_json(record.to_json()).probes == {"norms": {"values": ["NaN"]}}


def test_a_record_from_before_the_probes_is_read() -> None:
    data = json.loads(run(steps=1).to_json())
    del data["probes"]
    data["schema_version"] = 1
    assert RunRecord.from_json(json.dumps(data)).probes == {}
    data["schema_version"] = 3
    with pytest.raises(ValueError, match="versions 1 and 2"):
        RunRecord.from_json(json.dumps(data))


@pytest.mark.parametrize("damage", ["x", None, [1.0]])
def test_a_series_with_something_else_in_it_is_refused(damage: object) -> None:
    data = json.loads(run(steps=1).to_json())
    data["series"]["loss"] = [damage]
    with pytest.raises(ValueError, match=r"incomplete: .* is no number"):
        RunRecord.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[1]", "{}", "7", "null"])
def test_something_else_is_no_record(text: str) -> None:
    with pytest.raises(ValueError, match="not a timing record"):
        versioned_fields(text, kind="timing record", readable=(1,))


def test_another_version_is_named() -> None:
    fields = {"schema_version": 9}
    with pytest.raises(ValueError, match=r"timing record has schema version 9; .* version 1$"):
        versioned_fields(strict_json(fields), kind="timing record", readable=(1,))
    assert versioned_fields(strict_json(fields), kind="timing record", readable=(1, 9)) == fields


def test_a_file_that_is_damaged_is_named_and_one_that_is_absent_is_none(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert read_if_there(path, str.upper) is None
    write_atomically(path, "text")
    assert read_if_there(path, str.upper) == "TEXT"
    assert list(tmp_path.iterdir()) == [path]

    def refuse(text: str) -> str:
        raise ValueError(f"not {text}")

    with pytest.raises(ValueError, match=r"record\.json: not text"):
        read_if_there(path, refuse)
