"""The table of fingerprints: what agrees, and that a planted disagreement shows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from factories import crashed, diverged, make_record
from report_samples import make_findings, make_verdict

from harness.report.evidence import gather
from harness.report.pair_proof import PairRow, pair_rows
from harness.runs.record import RunRecord


def _row(*records: RunRecord) -> PairRow:
    (row,) = pair_rows(gather(make_findings(make_verdict("bf16")), list(records)))
    return row


def _changed(record: RunRecord, **fields: Any) -> RunRecord:
    prints = dataclasses.replace(record.fingerprints, **fields)
    return dataclasses.replace(record, fingerprints=prints)


def test_pairs_agree_over_seeds_and_steps() -> None:
    records = [make_record(p, s) for p in ("fp32", "bf16") for s in (0, 1)]
    row = _row(*records)
    assert row.equal
    assert row.cells == (
        "equal in 2 seeds",
        "equal in 240 steps",
        "equal in 240 steps",
        "equal in 2 seeds",
    )


@pytest.mark.parametrize(
    ("name", "column", "wanted"),
    [
        ("init_sha256", 0, "DIFFER in 1 of 1 seed"),
        ("batches", 1, "DIFFER in 1 of 120 steps"),
        ("dropout", 2, "DIFFER in 1 of 120 steps"),
        ("held_out_sha256", 3, "DIFFER in 1 of 1 seed"),
    ],
)
def test_planted_disagreements_show(name: str, column: int, wanted: str) -> None:
    candidate = make_record("bf16", 0)
    before = getattr(candidate.fingerprints, name)
    planted = "x" * 64 if isinstance(before, str) else (*before[:50], -1, *before[51:])
    row = _row(make_record("fp32", 0), _changed(candidate, **{name: planted}))
    assert not row.equal
    assert row.cells[column] == wanted
    assert sum(cell.startswith("DIFFER") for cell in row.cells) == 1


def test_runs_that_ended_early_are_compared_as_far_as_they_got() -> None:
    reference = [make_record("fp32", 0), make_record("fp32", 1)]
    row = _row(*reference, diverged(make_record("bf16", 0), at_step=20))
    assert row.cells[1] == "equal in 45 steps"
    # A crash in step 7 leaves that step's masks incomplete.
    row = _row(*reference, crashed(make_record("bf16", 1), at_step=7))
    assert row.equal
    assert row.cells[2] == "equal in 7 steps"


def test_models_without_dropout_or_held_out_data() -> None:
    pair = [
        _changed(make_record(p, 0, held_out=False), dropout=(0,) * 120) for p in ("fp32", "bf16")
    ]
    assert _row(*pair).cells[2:] == ("none drawn", "n/a")


def test_without_reference_runs_there_is_no_table() -> None:
    evidence = gather(make_findings(make_verdict("bf16")), [make_record("bf16", 0)])
    assert pair_rows(evidence) == ()
