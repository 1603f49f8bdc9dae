"""Which loss scales would have been safe at each step, and the ones really used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.report.evidence import Curve, Evidence, Floats, series_curve
from harness.report.exponent_ranges import Window, always_safe, window
from harness.report.figures.canvas import (
    ACCEPT,
    MUTED,
    REJECT,
    Drawing,
    Size,
    draw,
    legend_height,
    panels,
    step_axis,
)
from harness.report.figures.curves import legend
from harness.report.style import Styles
from harness.report.text import candidates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLES = {"fp16": "FP16", "fp8_e5m2": "FP8 E5M2"}


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """One format's window and the policies that compute in it, with the log2 of their scale."""

    format_name: str
    found: Window
    used: dict[str, Curve]


def loss_window(evidence: Evidence, styles: Styles) -> Drawing | None:
    """Draw the window of safe loss scales with the scales used; None without samples."""
    shown = [p for name in _TITLES if (p := _panel(evidence, name)) is not None]
    if len(shown) > 1:
        # A format that no policy computes in is of interest only where no other is.
        shown = [p for p in shown if p.used] or shown[:1]
    if not shown:
        return None
    return draw(
        "loss-window",
        title="Safe loss scales",
        caption=(
            f"Worked out from {evidence.findings.reference_policy}'s gradients of weights. Between "
            "the lines a loss scale is safe: below the lower one more than 0.1 % of the non-zero "
            "gradient elements become zero, above the upper one some overflow; where they cross no "
            "scale is safe. Upright bars are the same with the gradients of outputs, which are "
            f"looked at on fewer steps; red: no safe scale. {_safe_sentence(shown)} Coloured lines "
            "are the scales really used (2^0 without loss scaling), mean over the seeds: look for "
            "one that leaves the green band."
        ),
        alt=_safe_sentence(shown),
        render=lambda size: _render(size, evidence, shown, styles),
    )


def _panel(evidence: Evidence, format_name: str) -> _Panel | None:
    found = window(evidence.runs[evidence.findings.reference_policy], format_name)
    if found is None:
        return None
    used = {}
    for verdict in candidates(evidence.findings):
        content = verdict.policy_content
        formats = (content.get("compute_format"), content.get("gradient_format"))
        if content.get("operand_scaling") == "per_tensor":
            continue  # whose operands find their range tensor by tensor
        curve = series_curve(evidence, verdict.policy, "loss_scale")
        if format_name in formats and curve is not None:
            used[verdict.policy] = curve
    return _Panel(format_name=format_name, found=found, used=used)


def _safe_sentence(shown: list[_Panel]) -> str:
    parts = []
    for panel in shown:
        safe = always_safe(panel.found)
        name = _TITLES[panel.format_name]
        parts.append(
            f"{name}: no one scale was safe at every sampled step."
            if safe is None
            else f"{name}: 2^{safe[0]} to 2^{safe[1]} was safe at every sampled step."
        )
    return " ".join(parts)


def _render(size: Size, evidence: Evidence, shown: list[_Panel], styles: Styles) -> Figure:
    policies = list(dict.fromkeys(p for panel in shown for p in panel.used))
    top = 24 + (legend_height(size, len(policies)) if policies else 0)
    figure, axes = panels(size, rows=len(shown), columns=1, row_height=190, top=top, left=62)
    figure.set_gid("loss-window")
    for ax, panel in zip(axes, shown, strict=True):
        _draw_panel(ax, panel, styles)
        step_axis(ax, 0, evidence.num_steps)
        ax.set_title(_TITLES[panel.format_name], fontsize=11)
    if policies:
        legend(figure, size, policies, styles)
    return figure


def _draw_panel(ax: Axes, panel: _Panel, styles: Styles) -> None:
    from matplotlib.ticker import MaxNLocator

    found, name = panel.found, panel.format_name
    # Gradients of outputs, looked at on few steps, reach further down: a line through both kinds
    # of steps would show spikes that are not there.
    lone = ~found.with_outputs if not found.with_outputs.all() else found.with_outputs
    steps, low, high = found.steps[lone], found.low[lone], found.high[lone]
    usable = low <= high  # NaN compares false: no band where an end is unknown
    ax.fill_between(
        steps, low, high, where=usable, color=ACCEPT, alpha=0.16, lw=0,
        gid=f"loss-window-{name}-safe",
    )  # fmt: skip
    ax.fill_between(steps, high, low, where=~usable, color=REJECT, alpha=0.16, lw=0)
    ax.plot(steps, high, color=MUTED, lw=1.2, gid=f"loss-window-{name}-high")
    ax.plot(steps, low, color=MUTED, lw=1.2, ls=(0, (4, 2)))
    _name_lines(ax, steps, low, high)
    for step, bottom, top in zip(
        found.steps[~lone], found.low[~lone], found.high[~lone], strict=True
    ):
        shade = ACCEPT if bottom <= top else REJECT
        ax.plot([step] * 2, [bottom, top], color=shade, lw=2.2, marker="_", ms=8)
    for policy, curve in panel.used.items():
        style = styles[policy]
        scale = np.full_like(curve.middle, np.nan)
        np.log2(curve.middle, out=scale, where=curve.middle > 0)
        ax.plot(
            curve.steps, scale, color=style.colour, ls=style.line, lw=style.width + 0.6,
            gid=f"loss-window-{name}-{policy}",
        )  # fmt: skip
    ax.margins(y=0.12)
    ax.yaxis.set_major_formatter(lambda y, _: f"$2^{{{y:.0f}}}$")
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_ylabel("loss scale")


def _name_lines(ax: Axes, steps: Floats, low: Floats, high: Floats) -> None:
    lines = ((high, "overflow above", 3), (low, "underflow below", -3))
    for values, text, side in lines:
        known = np.flatnonzero(np.isfinite(values))
        if len(known):
            ax.annotate(
                text, (steps[known[-1]], values[known[-1]]), xytext=(-4, side),
                textcoords="offset points", ha="right", va="bottom" if side > 0 else "top",
                fontsize=9.5, color=MUTED,
            )  # fmt: skip
