"""The loss scale of policies that have one, with the steps it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.analysis.wording import counted
from harness.report.evidence import Curve, Evidence, series_curve
from harness.report.figures.canvas import Drawing, Size, draw, legend_height, panels, step_axis
from harness.report.figures.curves import legend, plot_curve
from harness.report.style import Styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def loss_scale(evidence: Evidence, styles: Styles) -> Drawing | None:
    """Draw loss scale and skipped steps; None when no policy scales its loss."""
    curves: dict[str, Curve] = {}
    skips: dict[str, list[int]] = {}
    for verdict in evidence.findings.verdicts:
        kind = verdict.policy_content.get("loss_scale", {}).get("kind", "none")
        curve = series_curve(evidence, verdict.policy, "loss_scale")
        if kind != "none" and curve is not None:
            curves[verdict.policy] = curve
            skips[verdict.policy] = _skipped_steps(evidence, verdict.policy)
    if not curves:
        return None
    lost = "; ".join(f"{p}: {counted(len(s), 'skipped step')}" for p, s in skips.items())
    return draw(
        "loss-scale",
        title="Loss scale",
        caption=(
            "The factor on the loss before backward, mean over the seeds. Ticks at the bottom are "
            f"steps that were skipped because a gradient overflowed ({lost}). A few at the start "
            "are the scale finding its place; many later, or a scale that keeps falling, are not."
        ),
        alt=f"Loss scale over the steps. {lost}.",
        render=lambda size: _render(size, evidence, curves, skips, styles),
    )


def _skipped_steps(evidence: Evidence, policy: str) -> list[int]:
    return [
        int(step)
        for record in evidence.runs[policy]
        for step in np.flatnonzero(np.asarray(record.series.get("skipped", ()), float) > 0)
    ]


def _render(
    size: Size,
    evidence: Evidence,
    curves: dict[str, Curve],
    skips: dict[str, list[int]],
    styles: Styles,
) -> Figure:
    top = 6 + legend_height(size, len(curves))
    figure, (ax,) = panels(size, rows=1, columns=1, row_height=140, top=top)
    figure.set_gid("loss-scale")
    for policy, curve in curves.items():
        plot_curve(ax, curve, styles[policy], gid=f"loss-scale-{policy}")
        ax.plot(
            skips[policy], [0.04] * len(skips[policy]), marker="|", ms=9, mew=1.2, ls="",
            color=styles[policy].colour, transform=ax.get_xaxis_transform(),
        )  # fmt: skip
    if all(np.nanmin(c.low) > 0 for c in curves.values() if np.isfinite(c.low).any()):
        ax.set_yscale("log", base=2)
    ax.margins(y=0.25)
    step_axis(ax, 0, evidence.num_steps)
    ax.set_ylabel("scale")
    legend(figure, size, list(curves), styles)
    return figure
