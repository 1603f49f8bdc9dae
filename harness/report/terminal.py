"""The verdicts in a terminal or a log file: one table and one sentence per model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from harness.analysis.findings import ModelFindings, Verdict
from harness.report.text import (
    NOT_AVAILABLE,
    difference_text,
    main_reason,
    outcome_label,
    ratio_text,
    worst_endpoint,
)

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"accept": "green", "reject": "red", "inconclusive": "yellow", "control": "dim"}
# Both endpoints side by side need this many columns; below it the worse one is shown.
_WIDE = 104
_EMULATED = "*"


def print_findings(findings: ModelFindings, console: Console, *, report_path: Path) -> None:
    """Print the verdict table of one model, its reasons, the recommendation and the report's path.

    Differences are multiples of the margin: accepted means that the interval's upper end is below
    +1. Readable from 80 columns on; without a terminal no control codes are written.
    """
    console.print()
    console.print(Text(f"{findings.workload}: {findings.scope}", style="bold"))
    if findings.verdicts:
        console.print(_table(findings, wide=console.width >= _WIDE))
        for footnote in _footnotes(findings, wide=console.width >= _WIDE):
            console.print(Text(footnote, style="dim"))
        for reason in _why(findings):
            console.print(reason)
    if findings.failed:
        console.print(Text(f"No verdict: {findings.failed}", style="bold red"))
    console.print(Text.assemble(("Recommendation: ", "bold"), findings.choice.sentence))
    for verdict in findings.verdicts:
        if verdict.settle_command and not verdict.is_control:
            console.print(Text(f"To settle {verdict.policy}:"))
            # A command or path must survive copying, so it is never wrapped.
            console.print(Text(f"  {verdict.settle_command}"), soft_wrap=True)
    console.print(Text(f"Report: {report_path}"), soft_wrap=True)


def _table(findings: ModelFindings, *, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("policy", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    if wide:
        table.add_column("train loss / margin", no_wrap=True)
        table.add_column("held-out / margin", no_wrap=True)
    else:
        table.add_column("loss diff / margin", no_wrap=True)
    table.add_column("time", no_wrap=True)
    table.add_column("mem", no_wrap=True)
    table.add_column("main reason", overflow="fold")
    for verdict in findings.verdicts:
        table.add_row(*_row(verdict, wide=wide))
    return table


def _row(verdict: Verdict, *, wide: bool) -> list[Text]:
    label = outcome_label(verdict)
    mark = f" {_EMULATED}" if verdict.execution == "emulated" else ""
    cells = [Text(f"{verdict.policy}{mark}"), Text(label, style=_STYLES[label])]
    if wide:
        estimates = (verdict.estimates.get("train"), verdict.estimates.get("held_out"))
        cells += [Text(difference_text(estimate)) for estimate in estimates]
    else:
        worst = worst_endpoint(verdict)
        shown = NOT_AVAILABLE if worst is None else difference_text(verdict.estimates[worst])
        cells.append(Text(shown))
    reason = main_reason(verdict)
    cells += [
        Text(ratio_text(verdict.step_time_ratio)),
        Text(ratio_text(verdict.peak_memory_ratio)),
        Text(NOT_AVAILABLE if reason is None or verdict.is_control else reason.code),
    ]
    return cells


def _footnotes(findings: ModelFindings, *, wide: bool) -> list[str]:
    which = "" if wide else "worse endpoint of training and held-out loss; "
    lines = [f"Loss difference over the margin: {which}accepted when the interval ends below +1."]
    if any(v.execution == "emulated" for v in findings.verdicts):
        lines.append(f"{_EMULATED} emulated on this device: numerics only, no step time.")
    if findings.choice.speed_basis != "measured":
        lines.append(
            f"Speed: {findings.choice.speed_basis}; step times on {findings.device} did not count."
        )
    return lines


def _why(findings: ModelFindings) -> list[Text]:
    lines = []
    for verdict in findings.verdicts:
        reason = main_reason(verdict)
        if verdict.is_control or verdict.outcome == "accept" or reason is None:
            continue
        style = _STYLES[verdict.outcome]
        lines.append(Text.assemble((f"{verdict.policy}: ", style), reason.message))
    return lines
