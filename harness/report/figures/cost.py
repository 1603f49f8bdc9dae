"""Step time and memory of each candidate over the reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.analysis.findings import Ratio, Verdict
from harness.report.evidence import Evidence
from harness.report.figures.canvas import (
    INK,
    MUTED,
    Drawing,
    Size,
    draw,
    panels,
    policy_label,
    policy_margin,
)
from harness.report.style import PolicyStyle, Styles
from harness.report.text import candidates, ratio_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = {"step time": "step_time_ratio", "peak memory": "peak_memory_ratio"}


def cost(evidence: Evidence, styles: Styles) -> Drawing | None:
    """Draw step-time and peak-memory ratios; None when there is nothing measured to draw.

    Step times are drawn only where the choice rests on them.
    """
    rows = candidates(evidence.findings)
    shown = [k for k in _KINDS if any(_ratio(v, k) is not None for v in rows)]
    if evidence.findings.choice.speed_basis != "measured":
        # Times that did not enter the choice (a CPU's) stay in the table, out of the picture.
        shown = [k for k in shown if k != "step time"]
    if not shown:
        return None
    reference = evidence.findings.reference_policy
    values = "; ".join(
        f"{v.policy}: " + ", ".join(f"{k} {ratio_text(_ratio(v, k))}" for k in shown) for v in rows
    )
    return draw(
        "cost",
        title="Step time and memory",
        caption=(
            f"Candidate over {reference}, with 95 % intervals (a bootstrap over blocks of steps) "
            "where they were estimated: left of 1 is faster or smaller. Emulated runs have no step "
            "time."
        ),
        alt=f"Ratios to {reference}. {values}.",
        render=lambda size: _render(size, rows, shown, reference, styles),
    )


def _ratio(verdict: Verdict, kind: str) -> Ratio | None:
    ratio: Ratio | None = getattr(verdict, _KINDS[kind])
    return ratio if ratio is not None and math.isfinite(ratio.value) else None


def _render(
    size: Size,
    rows: tuple[Verdict, ...],
    shown: list[str],
    reference: str,
    styles: Styles,
) -> Figure:
    columns = 1 if size.narrow else len(shown)
    figure, axes = panels(
        size, rows=len(shown) // columns, columns=columns, row_height=27.0 * len(rows) + 10,
        left=policy_margin(size), gap_x=30, gap_y=74, top=30, bottom=44, right=52,
    )  # fmt: skip
    figure.set_gid("cost")
    for index, kind in enumerate(shown):
        ax = axes[index]
        for position, verdict in enumerate(rows):
            _row(ax, _ratio(verdict, kind), position, styles[verdict.policy])
        ax.axvline(1.0, color=INK, lw=1.2)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        low, high = ax.get_xlim()
        ax.set_xlim(min(low, 0.9), max(high, 1.1))
        ax.set_title(kind)
        ax.set_xlabel(f"ratio to {reference}")
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
        ax.set_yticks(range(len(rows)), [policy_label(v.policy).replace("$", r"\$") for v in rows])
        if index % columns:
            ax.tick_params(labelleft=False)
    return figure


def _row(ax: Axes, ratio: Ratio | None, position: int, style: PolicyStyle) -> None:
    if ratio is None:
        ax.text(
            1.01, position, "n/a", transform=ax.get_yaxis_transform(), va="center", fontsize=10,
            color=MUTED,
        )  # fmt: skip
        return
    if ratio.ci_low is not None and ratio.ci_high is not None:
        ax.plot([ratio.ci_low, ratio.ci_high], [position] * 2, color=style.colour, lw=2)
    ax.plot([ratio.value], [position], marker=style.marker, ms=7, color=style.colour, ls="")
    ax.text(
        1.01, position, ratio_text(ratio), transform=ax.get_yaxis_transform(), va="center",
        fontsize=10, color=INK,
    )  # fmt: skip
