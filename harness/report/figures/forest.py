"""The figure that decides: each policy's paired loss difference against the margin."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.analysis.findings import Endpoint, Estimate, Verdict
from harness.report.evidence import Evidence
from harness.report.figures.canvas import (
    ACCEPT,
    INK,
    MUTED,
    REJECT,
    Drawing,
    Size,
    draw,
    panels,
    policy_label,
    policy_margin,
)
from harness.report.style import PolicyStyle, Styles
from harness.report.templating import typeset
from harness.report.text import (
    ENDPOINTS,
    candidates,
    controls,
    difference_text,
    in_margins,
    margins_text,
    outcome_label,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Beyond these multiples of the margin a row is clipped: the reader needs the neighbourhood of 1.
_FURTHEST = (-3.0, 4.0)
_NEAREST = (-1.25, 2.0)
_OUTCOME_COLOURS = {"accept": ACCEPT, "reject": REJECT, "inconclusive": MUTED, "control": MUTED}
_TITLES: dict[Endpoint, str] = {"train": "Training loss", "held_out": "Held-out loss"}


def forest(evidence: Evidence, styles: Styles) -> Drawing | None:
    """Draw mean and interval per policy and endpoint in units of the margin; None without rows."""
    rows = (*candidates(evidence.findings), *controls(evidence.findings))
    shown = [e for e in ENDPOINTS if any(e in v.estimates for v in rows)]
    if not rows or not shown:
        return None
    reference = evidence.findings.reference_policy
    return draw(
        "decision",
        title="Paired loss difference, in units of the margin",
        caption=(
            f"Each row is one policy minus {reference}, averaged over the last steps and the seeds "
            "(filled mark), with its interval; small rings are single seeds, small arrow heads "
            "seeds beyond the panel. A policy is accepted when its interval ends left of the "
            "margin line in every panel, and rejected when one "
            "lies wholly to the right of it. The control is FP32 from slightly perturbed initial "
            "weights: its row shows how far harmless noise carries. An arrow means that the row "
            "goes on beyond the panel, to the numbers beside it."
        ),
        alt=_alt(rows, shown),
        render=lambda size: _render(size, rows, shown, reference, styles),
    )


def _alt(rows: tuple[Verdict, ...], shown: list[Endpoint]) -> str:
    parts = []
    for verdict in rows:
        numbers = "; ".join(
            f"{_TITLES[e].lower()} {difference_text(verdict.estimates.get(e))}" for e in shown
        )
        parts.append(f"{verdict.policy} ({outcome_label(verdict)}): {numbers}")
    return "In units of the margin, mean and interval. " + ". ".join(parts) + "."


def _render(
    size: Size,
    rows: tuple[Verdict, ...],
    shown: list[Endpoint],
    reference: str,
    styles: Styles,
) -> Figure:
    columns = 1 if size.narrow else len(shown)
    figure, axes = panels(
        size,
        rows=len(shown) // columns,
        columns=columns,
        row_height=38.0 * len(rows) + 24,
        left=policy_margin(size),
        right=18,
        top=30,
        bottom=56,
        gap_x=30,
        gap_y=92,
    )
    figure.set_gid("decision")
    for index, (endpoint, ax) in enumerate(zip(shown, axes, strict=True)):
        limits = _limits(rows, endpoint)
        _background(ax, limits, len(rows))
        ax.set_title(_TITLES[endpoint])
        ax.set_xlabel(f"difference to {reference} / margin")
        for position, verdict in enumerate(rows):
            _row(ax, verdict, endpoint, position, limits, styles[verdict.policy])
        if index % columns == 0:
            _labels(ax, rows)
    return figure


def _limits(rows: tuple[Verdict, ...], endpoint: Endpoint) -> tuple[float, float]:
    ends: list[float] = []
    for verdict in rows:
        estimate = verdict.estimates.get(endpoint)
        if estimate is not None:
            values = (estimate.mean_difference, estimate.ci_low, estimate.ci_high)
            scaled = (in_margins(value, estimate.margin) for value in values)
            ends += [s for s in scaled if s is not None and math.isfinite(s)]
    low, high = min([*ends, _NEAREST[0]]), max([*ends, _NEAREST[1]])
    pad = 0.12
    return max(low - pad, _FURTHEST[0]), min(high + pad, _FURTHEST[1])


def _background(ax: Axes, limits: tuple[float, float], num_rows: int) -> None:
    ax.set_xlim(*limits)
    ax.set_ylim(num_rows - 0.45, -0.95)
    ax.set_yticks([])
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.axvspan(limits[0], 1.0, color=ACCEPT, alpha=0.09, lw=0, gid="decision-margin-band")
    ax.axvspan(1.0, limits[1], color=REJECT, alpha=0.07, lw=0)
    ax.axvline(0.0, color=MUTED, lw=1.0)
    ax.axvline(1.0, color=INK, lw=1.4, gid="decision-margin")
    ax.text(0.95, -0.9, "within the margin", ha="right", va="top", fontsize=9.5, color=ACCEPT)
    ax.text(1.06, -0.9, "worse", ha="left", va="top", fontsize=9.5, color=REJECT)


def _labels(ax: Axes, rows: tuple[Verdict, ...]) -> None:
    transform = ax.get_yaxis_transform()
    for position, verdict in enumerate(rows):
        emulated = ", emulated" if verdict.execution == "emulated" else ""
        label = outcome_label(verdict)
        ax.text(
            -0.03, position - 0.02, policy_label(verdict.policy), transform=transform, ha="right",
            va="bottom", fontweight="bold", color=INK, parse_math=False,
        )  # fmt: skip
        ax.text(
            -0.03, position + 0.04, f"{label}{emulated}", transform=transform, ha="right",
            va="top", fontsize=9.5, color=_OUTCOME_COLOURS[label],
        )  # fmt: skip


def _row(
    ax: Axes,
    verdict: Verdict,
    endpoint: Endpoint,
    position: int,
    limits: tuple[float, float],
    style: PolicyStyle,
) -> None:
    estimate = verdict.estimates.get(endpoint)
    if estimate is None:
        _note(ax, position, "no estimate")
        return
    _seeds(ax, estimate, position, limits, style)
    mean = in_margins(estimate.mean_difference, estimate.margin)
    if mean is None or not math.isfinite(mean):
        _note(ax, position, "no margin" if mean is None else "no finite loss in some seed")
        return
    gid = f"decision-row-{position}-{endpoint}"
    _interval(ax, estimate, position, limits, style, gid)
    if limits[0] <= mean <= limits[1]:
        ax.plot(
            [mean], [position], marker=style.marker, ms=8, color=style.colour, ls="", gid=gid,
            zorder=4,
        )  # fmt: skip
        return
    side = 1 if mean > limits[1] else 0
    _arrow(ax, position, limits, side, difference_text(estimate), style, gid)


def _arrow(
    ax: Axes,
    position: int,
    limits: tuple[float, float],
    side: int,
    text: str,
    style: PolicyStyle,
    gid: str,
) -> None:
    """Draw an arrow at the left (0) or right (1) edge and what lies beyond it as numbers."""
    inwards = (0.035, -0.035)[side] * (limits[1] - limits[0])
    ax.plot(
        [limits[side]], [position], marker="<>"[side], ms=9, color=style.colour, ls="",
        clip_on=False, gid=gid, zorder=4,
    )  # fmt: skip
    ax.text(
        limits[side] + inwards, position - 0.16, typeset(text), ha=("left", "right")[side],
        va="bottom", fontsize=10, color=INK,
    )  # fmt: skip


def _interval(
    ax: Axes,
    estimate: Estimate,
    position: int,
    limits: tuple[float, float],
    style: PolicyStyle,
    gid: str,
) -> None:
    low = in_margins(estimate.ci_low, estimate.margin)
    high = in_margins(estimate.ci_high, estimate.margin)
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return
    left, right = max(low, limits[0]), min(high, limits[1])
    if left > limits[1] or right < limits[0]:
        return
    ax.plot(
        [left, right], [position] * 2, color=style.colour, lw=2.2, solid_capstyle="butt",
        gid=f"{gid}-interval", zorder=3,
    )  # fmt: skip
    for end, inside in ((low, low >= limits[0]), (high, high <= limits[1])):
        if inside:
            ax.plot([end] * 2, [position - 0.13, position + 0.13], color=style.colour, lw=2.2)
    mean = in_margins(estimate.mean_difference, estimate.margin)
    if mean is None or not limits[0] <= mean <= limits[1]:
        return  # the mean's own arrow carries the numbers
    if high > limits[1]:
        _arrow(ax, position, limits, 1, f"to {margins_text(high)}", style, f"{gid}-high")
    if low < limits[0]:
        _arrow(ax, position, limits, 0, f"to {margins_text(low)}", style, f"{gid}-low")


def _seeds(
    ax: Axes,
    estimate: Estimate,
    position: int,
    limits: tuple[float, float],
    style: PolicyStyle,
) -> None:
    scaled = [in_margins(d, estimate.margin) for d in estimate.differences]
    known = [s for s in scaled if s is not None and not math.isnan(s)]
    inside = [s for s in known if limits[0] <= s <= limits[1]]
    ax.plot(
        inside, [position + 0.27] * len(inside), marker="o", ms=4, mfc="none", mew=1.1,
        color=style.colour, ls="",
    )  # fmt: skip
    beyond = (sum(s < limits[0] for s in known), sum(s > limits[1] for s in known))
    for side, count in enumerate(beyond):
        if not count:
            continue
        # Side by side, so that the seeds beyond the edge can be counted.
        step = (0.016, -0.016)[side] * (limits[1] - limits[0])
        at = [limits[side] + k * step for k in range(count)]
        ax.plot(
            at, [position + 0.27] * count, marker="<>"[side], ms=4, mfc="none", mew=1.1,
            color=style.colour, ls="", clip_on=False, gid=f"decision-seeds-{position}-{side}",
        )  # fmt: skip


def _note(ax: Axes, position: int, text: str) -> None:
    ax.text(
        0.98, position, text, transform=ax.get_yaxis_transform(), ha="right", va="center",
        fontsize=10, color=REJECT, style="italic",
    )  # fmt: skip
