"""Training and held-out loss of every policy, and their paired differences over the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.analysis.wording import counted
from harness.report.evidence import (
    Curve,
    Evidence,
    bin_width,
    difference_curve,
    series_curve,
)
from harness.report.figures.canvas import (
    ACCEPT,
    INK,
    MUTED,
    Drawing,
    Size,
    draw,
    legend_height,
    panels,
    step_axis,
)
from harness.report.figures.curves import legend, plot_curve, scale_by_decades
from harness.report.style import PolicyStyle, Styles
from harness.report.text import in_margins, margins_text, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARGINS_SHOWN = 4.0
_MARGINS_AT_MOST = 12.0


def loss_curves(evidence: Evidence, styles: Styles) -> Drawing | None:
    """Draw the training loss of all policies, whole and tail; None when no run has a loss."""
    curves = {p: c for p in evidence.policies if (c := series_curve(evidence, p, "loss"))}
    if not curves:
        return None
    width = bin_width(evidence.num_steps)
    return draw(
        "loss",
        title="Training loss",
        caption=(
            f"Mean over the seeds; the band runs from the lowest to the highest seed; each point "
            f"averages {counted(width, 'step')}. The second panel enlarges the tail, the part that "
            "the verdict is about. Harmless arithmetic follows the reference so closely that the "
            "lines cover each other; look for a line that leaves the bundle. A cross marks where a "
            "run stopped or stopped being finite; from there on thin dotted lines bound the seeds "
            "that are left."
        ),
        alt=_loss_alt(curves),
        render=lambda size: _render_losses(size, evidence, curves, styles),
    )


def _loss_alt(curves: dict[str, Curve]) -> str:
    parts = []
    for policy, curve in curves.items():
        finite = curve.middle[np.isfinite(curve.middle)]
        ends = f"{significant(finite[0])} to {significant(finite[-1])}" if len(finite) else "none"
        stopped = f", {counted(len(curve.stops), 'run')} stopped early" if curve.stops else ""
        parts.append(f"{policy}: {ends}{stopped}")
    return "Mean training loss at the start and at the end. " + "; ".join(parts) + "."


def _render_losses(
    size: Size, evidence: Evidence, curves: dict[str, Curve], styles: Styles
) -> Figure:
    top = 22 + legend_height(size, len(curves))
    figure, axes = panels(
        size, rows=2 // size.columns, columns=size.columns, row_height=250, top=top
    )
    figure.set_gid("loss")
    tail = evidence.findings.tail_start
    for index, ax in enumerate(axes):
        for policy, curve in curves.items():
            plot_curve(ax, curve, styles[policy], gid=f"loss-{index}-{policy}")
        ax.set_title("whole run" if index == 0 else "tail")
    step_axis(axes[0], 0, evidence.num_steps)
    axes[0].axvspan(tail, evidence.num_steps, color=MUTED, alpha=0.10, lw=0)
    scale_by_decades(axes[0], list(curves.values()))
    _zoom_to_tail(axes[1], evidence, curves)
    legend(figure, size, list(curves), styles)
    return figure


def _zoom_to_tail(ax: Axes, evidence: Evidence, curves: dict[str, Curve]) -> None:
    """Frame the tail around the reference: a policy far off must not flatten all the others."""
    tail, steps = evidence.findings.tail_start, evidence.num_steps
    step_axis(ax, tail, max(steps, tail + 1))
    reference = curves.get(evidence.findings.reference_policy)
    chosen = [reference] if reference is not None else list(curves.values())
    values = np.concatenate([ends[c.steps >= tail] for c in chosen for ends in (c.low, c.high)])
    values = values[np.isfinite(values)]
    if len(values):
        span = max(float(np.ptp(values)), 1e-3 * float(np.abs(values).max()), 1e-12)
        ax.set_ylim(values.min() - 0.35 * span, values.max() + 0.6 * span)


def loss_differences(evidence: Evidence, styles: Styles) -> Drawing | None:
    """Draw candidate minus reference over the steps, one panel a candidate; None without pairs."""
    findings = evidence.findings
    verdicts = {v.policy: v for v in findings.verdicts}
    shown = [v.policy for v in findings.verdicts if not v.is_control]
    curves = {p: c for p in shown if (c := difference_curve(evidence, p))}
    if not curves:
        return None
    margins = {p: e.margin for p in curves if (e := verdicts[p].estimates.get("train")) is not None}
    noise = [
        c for v in findings.verdicts if v.is_control and (c := difference_curve(evidence, v.policy))
    ]
    return draw(
        "difference",
        title="Paired training-loss difference over the steps",
        caption=(
            f"Candidate minus {findings.reference_policy} on the same batches: mean over the seeds "
            "with the range of the seeds. The green band is plus and minus one margin, the grey "
            "band is what the noise-matched control does, the shaded end is the tail that is "
            "tested. Look for a line that drifts out of both bands and stays out. Triangles at an "
            "edge mark where a line goes on beyond the panel."
        ),
        alt=_difference_alt(evidence, curves, margins),
        render=lambda size: _render_differences(size, evidence, curves, margins, noise, styles),
    )


def _difference_alt(evidence: Evidence, curves: dict[str, Curve], margins: dict[str, float]) -> str:
    parts = []
    for policy, curve in curves.items():
        tail = curve.middle[curve.steps >= evidence.findings.tail_start]
        tail = tail[np.isfinite(tail)]
        mean = float(tail.mean()) if len(tail) else None
        scaled = in_margins(mean, margins[policy]) if policy in margins else None
        parts.append(f"{policy}: {margins_text(scaled)}")
    return "Mean difference in the tail, in margins. " + "; ".join(parts) + "."


def _render_differences(
    size: Size,
    evidence: Evidence,
    curves: dict[str, Curve],
    margins: dict[str, float],
    noise: list[Curve],
    styles: Styles,
) -> Figure:
    columns = 1 if size.narrow else min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure, axes = panels(
        size, rows=rows, columns=columns, row_height=130, left=66, gap_x=34, gap_y=44, share_y=True
    )
    figure.set_gid("difference")
    limit = _difference_limit(evidence, curves, margins)
    for index, ax in enumerate(axes):
        if index >= len(curves):
            ax.set_visible(False)
            continue
        policy = list(curves)[index]
        _difference_panel(ax, evidence, policy, curves[policy], margins.get(policy), noise, styles)
        ax.set_ylim(-limit, limit)
        _mark_clipping(ax, curves[policy], limit, policy, styles[policy])
        if index % columns:
            ax.tick_params(labelleft=False)
        if index + columns < len(curves):
            ax.set_xlabel("")
    axes[0].set_ylabel("loss difference")
    return figure


def _difference_limit(
    evidence: Evidence, curves: dict[str, Curve], margins: dict[str, float]
) -> float:
    """Show every curve that stays within some margins; what goes further is clipped and marked."""
    peaks = sorted(peak for c in curves.values() if (peak := _peak(c)) > 0)
    usable = [m for m in margins.values() if np.isfinite(m) and m > 0]
    if not usable:
        return 1.2 * peaks[(len(peaks) - 1) // 2] if peaks else 1.0
    margin = max(usable)
    shown = [peak for peak in peaks if peak <= _MARGINS_AT_MOST * margin]
    return max(_MARGINS_SHOWN * margin, 1.08 * max(shown, default=0.0))


def _peak(curve: Curve) -> float:
    """Return the largest size of the curve with its band; 0 where nothing is finite."""
    values = np.concatenate([curve.low, curve.high])
    values = values[np.isfinite(values)]
    return float(np.abs(values).max()) if len(values) else 0.0


def _difference_panel(
    ax: Axes,
    evidence: Evidence,
    policy: str,
    curve: Curve,
    margin: float | None,
    noise: list[Curve],
    styles: Styles,
) -> None:
    step_axis(ax, 0, evidence.num_steps, labels=4)
    ax.axvspan(evidence.findings.tail_start, evidence.num_steps, color=MUTED, alpha=0.10, lw=0)
    if margin is not None and np.isfinite(margin):
        ax.axhspan(-margin, margin, color=ACCEPT, alpha=0.13, lw=0)
        ax.axhline(margin, color=ACCEPT, lw=0.9)
    for control in noise:
        ax.fill_between(control.steps, control.low, control.high, color=MUTED, alpha=0.30, lw=0)
    ax.axhline(0.0, color=INK, lw=0.8)
    plot_curve(ax, curve, styles[policy], gid=f"difference-{policy}")
    ax.set_title(policy, parse_math=False)


def _mark_clipping(ax: Axes, curve: Curve, limit: float, policy: str, style: PolicyStyle) -> None:
    """Mark where the mean leaves the panel, with how far it goes; say if there is no mean left."""
    finite = np.isfinite(curve.middle)
    if not finite[-1]:
        stopped = f"{len(curve.stops)} of {counted(curve.num_runs, 'run')} stopped"
        _corner_note(ax, stopped, top=False)
    for sign, marker, edge in ((1.0, "^", 0.985), (-1.0, "v", 0.015)):
        beyond = finite & (sign * curve.middle > limit)
        if not beyond.any():
            continue
        ax.plot(
            curve.steps[beyond], np.full(beyond.sum(), edge), marker=marker, ms=4, ls="",
            color=style.colour, transform=ax.get_xaxis_transform(), clip_on=False,
            markevery=max(1, int(beyond.sum()) // 12), gid=f"difference-{policy}-clipped",
        )  # fmt: skip
        furthest = sign * float((sign * curve.middle[beyond]).max())
        _corner_note(ax, f"clipped: goes on to {furthest:+.3g}", top=sign > 0)


def _corner_note(ax: Axes, text: str, *, top: bool) -> None:
    ax.text(
        0.97, 0.9 if top else 0.1, text, transform=ax.transAxes, ha="right",
        va="top" if top else "bottom", fontsize=9.5, color=INK,
    )  # fmt: skip
