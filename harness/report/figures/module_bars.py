"""Bars by module, one panel per quantity: the picture in which the guilty module sticks out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.report.figures.canvas import INK, MUTED, REJECT, Size, panels
from harness.report.text import NOT_AVAILABLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Rows that fit a page and a phone; a table holds the rest.
WIDE_ROWS = 15
NARROW_ROWS = 8
_LONGEST_NAME = 44
# Points per character of a name, and per row, at the size of the labels.
_CHARACTER = 5.9
_ROW, _NARROW_ROW = 21.0, 32.0
_DECADES_SHOWN = 8
_NUMBER_WIDTH = 44.0
# Share of the panel that the longest bar takes: the numbers stand behind the bars.
_LONGEST_BAR = 0.76


@dataclass(frozen=True, kw_only=True)
class BarColumn:
    """One panel.

    Attributes:
        title: Heading.
        values: One per row; None where it was not measured, infinite or NaN as such.
        text: How a value is written at the end of its bar.
        logarithmic: Powers of ten, zero being the axis' left end; else shares from 0 to 1.
        line: Where a vertical line marks a threshold or the expected size; None for none.
        line_label: What that line is.
    """

    title: str
    values: tuple[float | None, ...]
    text: Callable[[float], str]
    logarithmic: bool = True
    line: float | None = None
    line_label: str = ""


def module_bars(
    size: Size,
    *,
    gid: str,
    modules: Sequence[str],
    columns: Sequence[BarColumn],
    marked: Sequence[str] = (),
    colour: str = MUTED,
) -> Figure:
    """Return bars for the first modules of a list.

    Args:
        size: On a phone the panels stand below each other and names above their bars.
        gid: Identifier of the drawing; rows get `<gid>-<column>-<row>`.
        modules: Names, worst first.
        columns: Panels; their values follow `modules`.
        marked: Modules drawn as the guilty ones.
        colour: Of all other bars.
    """
    shown = list(modules[: NARROW_ROWS if size.narrow else WIDE_ROWS])
    names = [shortened(name) for name in shown]
    across = 1 if size.narrow else len(columns)
    longest = max((len(name) for name in names), default=0)
    left = 24.0 if size.narrow else 18.0 + _CHARACTER * longest
    figure, axes = panels(
        size, rows=len(columns) // across, columns=across,
        row_height=(_NARROW_ROW if size.narrow else _ROW) * len(shown) + 14,
        left=left, right=22, gap_x=26, gap_y=62, top=40, bottom=30,
    )  # fmt: skip
    figure.set_gid(gid)
    for index, (ax, column) in enumerate(zip(axes, columns, strict=True)):
        left_end, right_end = _scale(ax, column, len(shown))
        for row, name in enumerate(shown):
            value = column.values[row]
            shade = REJECT if name in marked else colour
            height = 0.4 if size.narrow else 0.62
            bar = f"{gid}-{index}-{row}"
            _bar(ax, row, value, (left_end, right_end), column, shade, height, bar)
        _names(ax, names, [n in marked for n in shown], size, first=index % across == 0)
    return figure


def how_many(num_modules: int) -> str:
    """Return a caption's first sentence: whether the picture holds all modules."""
    if num_modules <= NARROW_ROWS:
        return "All modules, the worst of the first panel on top."
    return f"The worst of {num_modules} modules; the table has all of them."


def shortened(name: str) -> str:
    """Return a name of at most 44 characters: its beginning and, more telling, its end."""
    if len(name) <= _LONGEST_NAME:
        return name
    kept = _LONGEST_NAME - 2
    return f"{name[: kept // 3]}..{name[-(kept - kept // 3) :]}"


def power_text(value: float) -> str:
    """Return a power of ten in few characters: `0.01`, `1e-5`."""
    exponent = round(math.log10(value))
    return f"{value:g}" if -3 <= exponent <= 3 else f"1e{exponent}"


def _scale(ax: Axes, column: BarColumn, num_rows: int) -> tuple[float, float]:
    from matplotlib.ticker import LogLocator, NullLocator

    known = [v for v in column.values[:num_rows] if v is not None and math.isfinite(v) and v > 0]
    if column.logarithmic:
        ends = [*known, *([column.line] if column.line else [])] or [1e-3, 1.0]
        low = 10.0 ** math.floor(math.log10(min(ends)) - 0.3)
        low = max(low, max(ends) * 10.0**-_DECADES_SHOWN)
        high = low * (max(ends) / low) ** (1 / _LONGEST_BAR)
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(10, numticks=5))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(lambda x, _: power_text(x))
    else:
        low, high = 0.0, max([0.01, *known]) / _LONGEST_BAR
        ax.locator_params(axis="x", nbins=4)
        # The room for the numbers goes beyond all of it.
        ax.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g} %" if x <= 1 else "")
    ax.set_xlim(low, high)
    ax.set_ylim(num_rows - 0.4, -0.75)
    ax.grid(visible=False, axis="y")
    ax.set_title(column.title, fontsize=11, pad=18 if column.line_label else 6)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=9.5)
    if column.line is not None and low < column.line < high:
        ax.axvline(column.line, color=INK, lw=1.1, ls=(0, (4, 2)))
        spot = math.log(column.line / low) / math.log(high / low) if column.logarithmic else 0.5
        ax.text(
            column.line, 1.005, column.line_label, transform=ax.get_xaxis_transform(),
            ha="right" if spot > 0.55 else "left", va="bottom", fontsize=9, color=INK,
        )  # fmt: skip
    return low, high


def _bar(
    ax: Axes,
    row: int,
    value: float | None,
    ends: tuple[float, float],
    column: BarColumn,
    colour: str,
    height: float,
    gid: str,
) -> None:
    low, high = ends
    if value is None:
        end, text = low, NOT_AVAILABLE
    elif not math.isfinite(value):
        end, text = high, "not finite"
    else:
        end, text = min(max(value, low), high), column.text(value)
    ax.barh(row, end - low, left=low, height=height, color=colour, alpha=0.75, lw=0, gid=gid)
    # A bar of infinite length carries its words inside: there is no room behind it.
    inside = end == high
    shift = -4.0 if inside else 4.0 + _step_over_line(ax, end, column, ends)
    ax.annotate(
        text, (end, row), xytext=(shift, 0), textcoords="offset points",
        ha="right" if inside else "left", va="center", fontsize=9.5, color=INK,
    )  # fmt: skip


def _step_over_line(ax: Axes, end: float, column: BarColumn, ends: tuple[float, float]) -> float:
    """Return how far, in points, a number must move so that the dashed line does not cross it."""
    if column.line is None or not ends[0] < column.line < ends[1]:
        return 0.0
    width = ax.get_position().width * float(ax.figure.bbox.width)
    ratio = column.line / end if end > 0 else math.inf
    gap = width * math.log(ratio) / math.log(ends[1] / ends[0]) if column.logarithmic else -1.0
    return gap if 0 <= gap < _NUMBER_WIDTH else 0.0


def _names(
    ax: Axes, names: Sequence[str], marked: Sequence[bool], size: Size, *, first: bool
) -> None:
    ax.spines["left"].set_visible(size.narrow is False)
    ax.set_yticks([])
    if not (first or size.narrow):
        return
    for row, (name, is_marked) in enumerate(zip(names, marked, strict=True)):
        ax.text(
            0.0 if size.narrow else -0.012 / max(ax.get_position().width, 0.05) * 0.5,
            row - 0.23 if size.narrow else row, name, transform=ax.get_yaxis_transform(),
            ha="left" if size.narrow else "right", va="bottom" if size.narrow else "center",
            fontsize=10.5, color=REJECT if is_marked else INK,
            fontweight="bold" if is_marked else "normal", parse_math=False,
        )  # fmt: skip
