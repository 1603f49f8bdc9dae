"""Where the magnitudes of each kind of tensor lie, over what four formats can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from harness.numerics.formats import get_format
from harness.report.evidence import Evidence, Floats
from harness.report.exponent_ranges import (
    KINDS,
    RANGE_FORMATS,
    Histogram,
    histograms,
    range_losses,
    shares,
)
from harness.report.figures.canvas import INK, MUTED, REJECT, Drawing, Size, draw, panels
from harness.report.figures.module_bars import shortened
from harness.report.style import Styles
from harness.report.text import percent_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABELS = {"fp16": "FP16", "bf16": "BF16", "fp8_e4m3": "E4M3", "fp8_e5m2": "E5M2"}
_Tables = dict[str, dict[str, Histogram]]


def exponent_kinds(evidence: Evidence, styles: Styles) -> Drawing | None:
    """Draw the reference's exponents by kind of tensor; None without histograms by module."""
    reference = evidence.findings.reference_policy
    tables = histograms(evidence.runs[reference])
    if not tables:
        return None
    worst = {kind: _worst_module(kind, modules) for kind, modules in tables.items()}
    return draw(
        "exponent-kinds",
        title="Exponents by kind of tensor, over the formats' ranges",
        caption=(
            f"{reference}'s own numbers, so a what-if for every format: filled, all modules "
            "together; the red line, the one module of which FP16 would lose most. Bars show what "
            "a format holds without scaling: solid its normal numbers, faint its subnormal ones. "
            "What lies left of a bar becomes zero, what lies right of it overflows. Look for a "
            "hill that leaves its bar: a per-tensor scale (FP8) or a loss scale (gradients) "
            "shifts the hill, another format moves the bar."
        ),
        alt=_alt(tables, worst),
        render=lambda size: _render(size, tables, worst),
    )


def _worst_module(kind: str, modules: dict[str, Histogram]) -> str | None:
    """Return the module that loses most of this kind in FP16; None when none loses anything."""
    losses = range_losses({kind: modules})
    return losses[0].module if losses and losses[0].worst > 1e-3 else None


def _alt(tables: _Tables, worst: dict[str, str | None]) -> str:
    parts = []
    for kind, modules in tables.items():
        row = range_losses({kind: {"all": np.sum(list(modules.values()), axis=0)}})
        if not row:
            continue
        lost = max(row[0].flushed["fp16"], row[0].overflow["fp16"])
        name = worst[kind]
        most = f", most in {name}" if name is not None else ""
        parts.append(
            f"{KINDS[kind]}: 98 % between 2^{row[0].low} and 2^{row[0].high}, FP16 without "
            f"scaling loses {percent_text(lost)}{most}"
        )
    return "; ".join(parts) + "."


def _render(size: Size, tables: _Tables, worst: dict[str, str | None]) -> Figure:
    rows = -(-len(tables) // size.columns)
    figure, axes = panels(
        size, rows=rows, columns=size.columns, row_height=168, gap_y=62, gap_x=58, top=26,
        bottom=40, left=54,
    )  # fmt: skip
    figure.set_gid("exponent-kinds")
    low, high = _limits(tables)
    for ax, (kind, modules) in zip(axes, tables.items(), strict=False):
        _hill(ax, kind, modules, worst[kind], (low, high))
    for ax in axes[len(tables) :]:
        ax.remove()
    return figure


def _limits(tables: _Tables) -> tuple[float, float]:
    low, high = -26.0, 17.0
    for modules in tables.values():
        found = shares(modules.values())
        if found is not None:
            seen = np.flatnonzero(found > 1e-5) - 126
            if len(seen):
                low, high = min(low, seen[0] - 2.0), max(high, seen[-1] + 2.0)
    return max(low, -44.0), min(high, 44.0)


def _hill(
    ax: Axes,
    kind: str,
    modules: dict[str, Histogram],
    worst: str | None,
    limits: tuple[float, float],
) -> None:
    # Only what is inside the panel: empty exponents would be most of the file.
    first, last = int(limits[0]) + 126, int(limits[1]) + 127
    grid = np.arange(first, last) - 126.0
    everything = _between(shares(modules.values()), first, last)
    lone = _between(shares([modules[worst]]), first, last) if worst is not None else None
    top = max([float(s.max()) for s in (everything, lone) if s is not None] or [1.0])
    if everything is not None:
        ax.fill_between(
            grid, everything, step="post", color=MUTED, alpha=0.35, lw=0,
            gid=f"exponent-kinds-{kind}",
        )  # fmt: skip
    if worst is not None and lone is not None:
        _lone_hill(ax, grid, lone, worst)
    ax.set_xlim(*limits)
    # The lower part of the panel is kept for the formats' bars.
    ax.set_ylim(-0.62 * top, 1.12 * top)
    ax.axhline(0, color=MUTED, lw=0.8)
    ax.set_yticks([])
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.set_title(KINDS[kind], fontsize=11)
    ax.set_xlabel("magnitude as a power of two", fontsize=10)
    _format_bars(ax, top)


def _between(found: Floats | None, first: int, last: int) -> Floats | None:
    return None if found is None else found[first:last]


def _lone_hill(ax: Axes, grid: NDArray[Any], lone: Floats, worst: str) -> None:
    ax.plot(grid, lone, color=REJECT, lw=1.4, drawstyle="steps-post")
    ax.text(
        0.0, 0.985, shortened(worst), transform=ax.transAxes, ha="left", va="top", fontsize=9.5,
        color=REJECT, parse_math=False,
    )  # fmt: skip


def _format_bars(ax: Axes, top: float) -> None:
    for row, name in enumerate(RANGE_FORMATS):
        spec = get_format(name)
        bottom, normal, end = (
            float(np.log2(v)) for v in (spec.min_subnormal, spec.min_normal, spec.max_finite)
        )
        y = -(0.10 + 0.145 * row) * top
        height = 0.075 * top
        ax.barh(y, end - normal, left=normal, height=height, color=MUTED, lw=0)
        ax.barh(y, normal - bottom, left=bottom, height=height, color=MUTED, alpha=0.4, lw=0)
        ax.text(
            -0.01, y, _LABELS[name], transform=ax.get_yaxis_transform(), ha="right", va="center",
            fontsize=9, color=INK,
        )  # fmt: skip
