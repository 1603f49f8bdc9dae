"""The verdicts in a terminal or a log file: one table and one sentence per model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from harness.analysis.findings import Endpoint, ModelFindings, Ratio, Verdict
from harness.report.phrases import (
    caution_lines,
    emulated_policies,
    margin_lines,
    own_margin_hint,
    reason_phrase,
)
from harness.report.plan_view import plan_line, savings_line, short_claims
from harness.report.rounding_error import callout
from harness.report.text import (
    ENDPOINT_LABELS,
    NOT_AVAILABLE,
    difference_text,
    main_reason,
    outcome_label,
    ratio_text,
    shown_endpoints,
    worst_endpoint,
)

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"accept": "green", "reject": "red", "inconclusive": "yellow", "control": "dim"}
# Both endpoints side by side need this many columns; below it the worse one is shown.
_WIDE = 104
_EMULATED = "*"


def print_findings(findings: ModelFindings, console: Console, *, report_path: Path) -> None:
    """Print one model's verdict table, cautions, reasons, recommendation and report path.

    Differences are multiples of the margin: accepted means that the interval's upper end is below
    +1. Readable from 80 columns on; without a terminal no control codes are written.
    """
    wide = console.width >= _WIDE
    console.print()
    console.print(Text(f"{findings.workload}: {findings.scope}", style="bold"))
    if findings.verdicts:
        console.print(_table(findings, wide=wide))
        for footnote in _footnotes(findings, wide=wide):
            console.print(Text(footnote, style="dim"))
    for caution in caution_lines(findings):
        console.print(Text.assemble(("Caution: ", "yellow"), caution))
    for reason in _why(findings):
        console.print(reason)
    for line in _stops(findings):
        console.print(line)
    for line in _where_to_look(findings):
        console.print(line)
    if findings.failed_line is not None:
        console.print(Text(findings.failed_line, style="bold red"))
    console.print(Text.assemble(("Recommendation: ", "bold"), findings.choice.sentence))
    for verdict in findings.verdicts:
        if not verdict.is_control:
            _print_settling(verdict, console)
    console.print(Text(f"Report: {report_path}"), soft_wrap=True)


def _print_settling(verdict: Verdict, console: Console) -> None:
    # A command or path must survive copying, so it is never wrapped.
    if verdict.settle_command:
        console.print(Text(f"To settle {verdict.policy}:"))
        console.print(Text(f"  {verdict.settle_command}"), soft_wrap=True)
    if verdict.settle:
        console.print(Text(f"What would settle {verdict.policy}:"))
    for sentence in verdict.settle:
        console.print(Text(f"  {sentence}"), soft_wrap="python -m" in sentence)


@dataclass(frozen=True, kw_only=True)
class _Column:
    """One column: its heading, what it shows of a verdict, whether its text may wrap."""

    heading: str
    cell: Callable[[Verdict], Text]
    wraps: bool = False


def _columns(findings: ModelFindings, *, wide: bool) -> list[_Column]:
    """Return the columns; ratios that no policy has are left out."""
    columns = [
        _Column(heading="policy", cell=_policy, wraps=True),
        _Column(heading="verdict", cell=_outcome),
        *_loss_columns(findings, wide=wide),
        _ratio_column(f"time\n/ {findings.reference_policy}", lambda v: v.step_time_ratio),
        _ratio_column(f"memory\n/ {findings.reference_policy}", lambda v: v.peak_memory_ratio),
        _Column(heading="main reason", cell=_reason, wraps=True),
    ]
    ratios = columns[-3:-1]
    empty = [
        column
        for column in ratios
        if all(column.cell(v).plain == NOT_AVAILABLE for v in findings.verdicts)
    ]
    return [column for column in columns if column not in empty]


def _loss_columns(findings: ModelFindings, *, wide: bool) -> list[_Column]:
    endpoints = shown_endpoints(findings)
    if len(endpoints) == 1 or wide:
        return [
            _Column(
                heading=f"{ENDPOINT_LABELS[endpoint]}\nin margins",
                cell=functools.partial(_difference, endpoint=endpoint),
            )
            for endpoint in endpoints
        ]
    return [_Column(heading="loss difference\nin margins", cell=_worst)]


def _ratio_column(heading: str, ratio: Callable[[Verdict], Ratio | None]) -> _Column:
    return _Column(heading=heading, cell=lambda verdict: Text(ratio_text(ratio(verdict))))


def _table(findings: ModelFindings, *, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    columns = _columns(findings, wide=wide)
    for column in columns:
        table.add_column(
            # Headings of one line stand at the bottom, beside those of two.
            column.heading if "\n" in column.heading else f"\n{column.heading}",
            no_wrap=not column.wraps,
            overflow="fold" if column.wraps else "ellipsis",
        )
    for verdict in findings.verdicts:
        table.add_row(*(column.cell(verdict) for column in columns))
    return table


def _policy(verdict: Verdict) -> Text:
    mark = f" {_EMULATED}" if _is_emulated(verdict) else ""
    mark += f" (for {verdict.fallback_of})" if verdict.fallback_of else ""
    return Text(f"{verdict.policy}{mark}")


def _outcome(verdict: Verdict) -> Text:
    label = outcome_label(verdict)
    return Text(label, style=_STYLES[label])


def _difference(verdict: Verdict, endpoint: Endpoint) -> Text:
    return Text(difference_text(verdict.estimates.get(endpoint)))


def _worst(verdict: Verdict) -> Text:
    endpoint = worst_endpoint(verdict)
    return Text(NOT_AVAILABLE if endpoint is None else difference_text(verdict.estimates[endpoint]))


def _reason(verdict: Verdict) -> Text:
    reason = main_reason(verdict)
    if verdict.is_control:
        return Text("for comparison only", style="dim")
    return Text(NOT_AVAILABLE if reason is None else reason_phrase(reason))


def _is_emulated(verdict: Verdict) -> bool:
    return verdict.execution == "emulated"


def _footnotes(findings: ModelFindings, *, wide: bool) -> list[str]:
    both = len(shown_endpoints(findings)) > 1
    which = "; the worse of training and held-out loss" if both and not wide else ""
    lines = [f"Mean [interval]{which}. Accepted when the interval ends below +1."]
    lines += margin_lines(findings)
    lines += [hint] if (hint := own_margin_hint(findings)) else []
    lines += short_claims(findings)
    if any(map(_is_emulated, findings.verdicts)):
        lines.append(f"{_EMULATED} emulated on this device: numerics only, no step time.")
        lines += [f"  {policies}: {clause}" for policies, clause in emulated_policies(findings)]
    if findings.choice.speed_basis != "measured":
        lines.append(
            f"Speed: {findings.choice.speed_basis}; step times on {findings.device} did not count."
        )
    return lines


def _stops(findings: ModelFindings) -> list[Text]:
    """Return why each candidate stopped and what that saved, where seeds are taken in looks."""
    if findings.plan is None or not findings.plan.adaptive:
        return []
    lines = [Text(plan_line(findings))]
    lines += [
        Text.assemble((f"{v.policy}: ", _STYLES[v.outcome]), v.look.sentence)
        for v in findings.verdicts
        if v.look is not None and not v.is_control
    ]
    saved = savings_line(findings)
    return [*lines, Text(saved)] if saved else lines


def _where_to_look(findings: ModelFindings) -> list[Text]:
    """Return the module that the evidence names for each candidate, as the page shows it."""
    return [
        Text.assemble((f"{verdict.policy}: ", _STYLES[verdict.outcome]), (sentence, "bold"))
        for verdict in findings.verdicts
        if not verdict.is_control and (sentence := callout(verdict).replace("`", ""))
    ]


def _why(findings: ModelFindings) -> list[Text]:
    lines = []
    for verdict in findings.verdicts:
        reason = main_reason(verdict)
        if verdict.is_control or verdict.outcome == "accept" or reason is None:
            continue
        style = _STYLES[verdict.outcome]
        # Where no command settles it, what would instead.
        advice = [r.message for r in verdict.reasons[1:] if r.code == verdict.extra_seeds_reason]
        text = " ".join([reason.message, *advice])
        lines.append(Text.assemble((f"{verdict.policy}: ", style), text))
    return lines
