"""Notes on time and memory: how the ratios were measured stands beside them."""

from __future__ import annotations

from factories import make_record
from report_samples import make_findings, make_verdict

from harness.analysis.findings import Ratio
from harness.report import evidence as ev
from harness.report.costs import cost_notes

NOTE = "8 alternating blocks of 5 steps; twin took 0.88 of its time"


def _notes(ratio: Ratio | None) -> tuple[str, ...]:
    verdict = make_verdict("bf16", step_time_ratio=ratio, speed_note=NOTE)
    records = [make_record("fp32", 0), make_record("bf16", 0)]
    return cost_notes(ev.gather(make_findings(verdict), records))


def test_how_ratios_were_measured_is_told_once_where_there_are_any() -> None:
    assert _notes(Ratio(value=0.9)).count(f"The ratios were measured in {NOTE}.") == 1


def test_without_ratios_nothing_is_said_of_their_measurement() -> None:
    assert not any(NOTE in line for line in _notes(None))
