"""How shares, sizes and tables read in the document."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.calibration.rates import Rate
from harness.report.templating import markdown_prose

ABSENT = "n/a"


def share_text(share: float | None) -> str:
    """Return a share in percent; what is next to 0 or 1 is never written as 0 or 100 %."""
    if share is None or math.isnan(share):
        return ABSENT
    percent = 100 * share
    if share in (0, 1):
        return f"{percent:.0f} %"
    if percent < 0.05:
        return "<0.1 %"
    if percent >= 99.95:
        return ">99.9 %"
    return f"{percent:.1f} %" if percent < 9.95 or percent > 90 else f"{percent:.0f} %"


def rate_text(rate: Rate | None, *, worst: bool = True) -> str:
    """Return `0.4 % [3.0 %]`: mean over arms and, in brackets, the worst arm."""
    if rate is None:
        return ABSENT
    return f"{share_text(rate.mean)} [{share_text(rate.worst)}]" if worst else share_text(rate.mean)


def interval_text(rate: Rate | None) -> str:
    """Return `0 to 1.2 %`: the 95 % interval of the mean."""
    if rate is None:
        return ABSENT
    return f"{share_text(rate.low).removesuffix(' %')} to {share_text(rate.high)}"


def margins_text(value: float) -> str:
    """Return a number of margins: `1.8`, `24`, `not finite`."""
    if math.isnan(value):
        return ABSENT
    if math.isinf(value):
        return "not finite"
    if abs(value) >= 1e5:
        return f"{value:.0e}"
    digits = 0 if abs(value) >= 99.5 else 1 if abs(value) >= 9.95 else 2
    rounded = round(value, digits)
    # A zero has no sign.
    return f"{rounded:.{digits}f}" if rounded else "0"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int = 0) -> str:
    """Return a Markdown table; cells are escaped, names between backticks are code.

    Args:
        headings: One per column.
        rows: Cells of each row.
        numbers: How many columns at the end are set flush right.
    """
    width = len(headings)
    rule = ["---"] * (width - numbers) + ["---:"] * numbers
    lines = [_row(headings), f"| {' | '.join(rule)} |"]
    for row in rows:
        assert len(row) == width, (headings, row)
        lines.append(_row(row))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(markdown_prose(cell) for cell in cells)} |"
