"""The table at the end of a sweep, at narrow and wide widths and in a log file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from report_samples import make_findings, make_verdict
from rich.console import Console

from harness.analysis.findings import Choice, ModelFindings, Reason
from harness.report.terminal import print_findings

_PATH = Path(
    "/somewhere/rather/long/reports/precision-1a2b3c4d/char_gpt/deep/down/in/folders/report.html"
)


def _printed(findings: ModelFindings, width: int, **options: Any) -> str:
    file = io.StringIO()
    print_findings(findings, Console(file=file, width=width, **options), report_path=_PATH)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_fits_and_has_no_control_codes(written: Any, width: int) -> None:
    text = _printed(written.findings, width)
    assert "\x1b" not in text
    whole_lines = {str(_PATH), "seed=0,1,2,3,4"}  # what is copied is never wrapped
    for line in text.splitlines():
        assert len(line) <= width or any(part in line for part in whole_lines)
    for verdict in written.findings.verdicts:
        (row,) = [x for x in text.splitlines() if x.startswith((f"{verdict.policy} ",))]
        assert ("control" if verdict.is_control else verdict.outcome) in row
        if not verdict.is_control:
            assert verdict.main_reason.code in row


def test_rows_carry_interval_ratios_and_emulation(written: Any) -> None:
    rows = {line.split()[0]: line for line in _printed(written.findings, 80).splitlines() if line}
    assert "1.42x" in rows["bf16"]
    assert "0.87x" in rows["bf16"]
    assert rows["tf32"].startswith("tf32 *")
    assert rows["bf16_pure"].count("[") == 1
    wide = _printed(written.findings, 140).splitlines()
    (row,) = [line for line in wide if line.startswith("bf16_pure ")]
    assert row.count("[") == 2


def test_recommendation_path_and_settling_command_are_whole(written: Any) -> None:
    text = _printed(written.findings, 80)
    assert f"Report: {_PATH}\n" in text
    command = "python -m harness +sweep=precision workload=char_gpt policy=fp32,bf16_fallback"
    assert f"  {command} seed=0,1,2,3,4\n" in text
    assert written.findings.choice.sentence in " ".join(text.split())


def test_names_are_not_console_markup() -> None:
    name = "[red]x[/red][/nothing]"
    reason = Reason(code="NONFINITE", message="[bold]m[/bold][/nothing]")
    findings = make_findings(
        make_verdict(name, "reject", reasons=(reason,)),
        workload=name,
        choice=Choice(policy=None, sentence=name, speed_basis="measured"),
    )
    text = _printed(findings, 200)
    assert text.count(name) == 4  # heading, row, reason, recommendation
    assert "[bold]m[/bold][/nothing]" in text


def test_a_failed_model_prints_its_sentence() -> None:
    text = _printed(make_findings(failed="The reference crashed."), 80)
    assert "No verdict: The reference crashed." in text


def test_colour_only_in_a_terminal(written: Any) -> None:
    assert "\x1b[" in _printed(written.findings, 80, force_terminal=True, color_system="standard")


def test_output_is_ascii_where_the_stream_is(written: Any) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_findings(written.findings, Console(file=stream, width=80), report_path=_PATH)
    stream.flush()
    assert b"bf16_pure" in raw.getvalue()
