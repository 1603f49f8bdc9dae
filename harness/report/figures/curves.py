"""A policy's curve over the steps, and the legend that names it: the same in every figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.report.evidence import Curve
from harness.report.figures.canvas import Size, legend_on_top
from harness.report.style import PolicyStyle, Styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STOP_MARKERS = {"diverged": "x", "crashed": "X"}
# Values that fall by more than two decades hide their end on a linear axis.
_LOG_DECADES = 2.0


def plot_curve(ax: Axes, curve: Curve, style: PolicyStyle, *, gid: str) -> None:
    """Draw band, line and stop marks of one policy.

    Where some seeds have stopped there is no mean; thin lines then bound the seeds that go on.
    """
    if curve.num_runs > 1:
        ax.fill_between(curve.steps, curve.low, curve.high, color=style.colour, alpha=0.09, lw=0)
        partial = np.isnan(curve.middle) & np.isfinite(curve.low)
        if partial.any():
            for edge in (curve.low, curve.high):
                ax.plot(
                    curve.steps, np.where(partial, edge, np.nan), color=style.colour, lw=0.7, ls=":"
                )
    ax.plot(curve.steps, curve.middle, color=style.colour, ls=style.line, lw=style.width, gid=gid)
    for stop in curve.stops:
        if np.isfinite(stop.value):
            ax.plot(
                [stop.step], [stop.value], marker=_STOP_MARKERS[stop.status], ms=9, mew=2,
                color=style.colour, ls="", zorder=5, gid=f"{gid}-stop",
            )  # fmt: skip


def scale_by_decades(ax: Axes, curves: list[Curve]) -> None:
    """Use a logarithmic axis when positive values span more than two decades."""
    values = np.concatenate([c.middle[np.isfinite(c.middle)] for c in curves])
    if len(values) and values.min() > 0:
        if np.log10(values.max() / values.min()) > _LOG_DECADES:
            ax.set_yscale("log")
            ax.minorticks_off()


def legend(figure: Figure, size: Size, policies: list[str], styles: Styles) -> None:
    """Put line samples with the policies' names on top of the figure."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=styles[p].colour, ls=styles[p].line, lw=styles[p].width)
        for p in policies
    ]
    legend_on_top(figure, size, handles, [p.replace("$", r"\$") for p in policies])
