"""The figures of the document, as PNG: a page on a code host shows no inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.calibration.contenders import OURS, Contender
from harness.calibration.plans import ALWAYS_VALID, FIXED, LOOKS
from harness.calibration.rates import Half, Quantity, arms_of, half_of, mean_of, rate
from harness.calibration.results import ArmResult, ShiftCurve, TaskResult
from harness.calibration.tables import PLAN_NAMES, size_groups
from harness.report.figures.canvas import (
    ACCEPT,
    INK,
    MUTED,
    REJECT,
    RULE,
    WIDE,
    drawing_settings,
    legend_height,
    legend_on_top,
    panels,
)
from harness.report.style import candidate_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = "calibration"
# Sharp on screens of twice the density, and still below 120 kB a file.
_DPI = 132
_PLANS = ("3", "5", "8", LOOKS)
# A size beyond this is drawn at the edge; not finite, one step further.
_LARGEST_SIZE = 100.0
_NOT_FINITE_AT = 300.0


def write_figures(
    tasks: Sequence[TaskResult],
    rules: Sequence[Contender],
    *,
    half: Half | None,
    alpha: float,
    folder: Path,
) -> tuple[str, ...]:
    """Write every figure that there are results for, remove the others, and return their names.

    Args:
        tasks: The results.
        rules: What was judged.
        half: The half of the tasks that is reported; None for all.
        alpha: Of our rule, for a line where a verdict at the margin may err.
        folder: Where the files go; created if needed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shown = [task for task in tasks if half is None or half_of(task.task) == half]
    curves = [curve for task in shown for curve in task.shifts]
    drawn = []
    with drawing_settings():
        for name, figure in (
            ("operating", _operating(curves, alpha) if curves else None),
            ("rules", _rules(tasks, rules, half)),
            ("sizes", _sizes(tasks, half)),
            ("arms", _arms(tasks)),
            ("pairs", _pairs(tasks, half)),
        ):
            path = folder / f"{name}.png"
            if figure is None:
                # Of an earlier study; this page does not show it.
                path.unlink(missing_ok=True)
            else:
                # No date and no version in the file: the same results give the same bytes.
                figure.savefig(
                    path,
                    dpi=_DPI,
                    facecolor="white",
                    metadata={"Software": None},
                    pil_kwargs={"optimize": True},
                )
                drawn.append(name)
    return tuple(drawn)


def _operating(curves: Sequence[ShiftCurve], alpha: float) -> Figure:
    """Draw accept and reject by true difference: mean over noise sources, range shaded."""
    top = 26 + legend_height(WIDE, len(_PLANS))
    figure, axes = panels(WIDE, rows=1, columns=2, row_height=260, top=top, gap_x=50)
    styles = candidate_styles()
    handles = []
    for index, plan in enumerate(p for p in _PLANS if any(c.plan == p for c in curves)):
        own = [curve for curve in curves if curve.plan == plan]
        shifts = [point.shift for point in own[0].points]
        for ax, values in (
            (axes[0], [[p.accept for p in c.points] for c in own]),
            (axes[1], [[p.reject for p in c.points] for c in own]),
        ):
            columns = list(zip(*values, strict=True))
            means = [math.fsum(column) / len(column) for column in columns]
            style = styles[index]
            (line,) = ax.plot(
                shifts,
                means,
                color=style.colour,
                ls=style.line,
                marker=style.marker,
                ms=5,
                lw=2.6 if plan == LOOKS else 1.6,
                label=PLAN_NAMES[plan],
            )
            ax.fill_between(
                shifts, list(map(min, columns)), list(map(max, columns)),
                color=style.colour, alpha=0.09, lw=0,
            )  # fmt: skip
        handles.append(line)
    for ax, title in zip(axes, ("accepted", "rejected"), strict=True):
        ax.axvline(1.0, color=INK, lw=1.2)
        ax.axhline(alpha, color=MUTED, lw=1.0, ls=":")
        # On the side where the curves are not.
        side, offset = ("left", 0.05) if title == "accepted" else ("right", -0.05)
        ax.text(1.0 + offset, 0.97, "margin", color=INK, fontsize=9.5, va="top", ha=side)
        ax.text(
            4.0,
            alpha + 0.01,
            f"{100 * alpha:g} %",
            color=MUTED,
            fontsize=9.5,
            ha="right",
            va="bottom",
        )
        ax.set_ylim(-0.02, 1.02)
        ax.set_xlabel("true difference / margin")
        ax.set_title(f"share of verdicts: {title}")
    legend_on_top(figure, WIDE, handles, [str(handle.get_label()) for handle in handles])
    return figure


def _rules(
    tasks: Sequence[TaskResult], rules: Sequence[Contender], half: Half | None
) -> Figure | None:
    """Draw both errors of every rule: mean over arms by number of pairs, worst arm at n = 5."""
    harmless = [*arms_of(tasks, "null", half=half), *arms_of(tasks, "harmless", half=half)]
    harm = arms_of(tasks, "harm", half=half)
    if not harmless or not harm:
        return None
    top = 26 + legend_height(WIDE, 5, per_row=5)
    figure, axes = panels(
        WIDE, rows=1, columns=2, row_height=27.0 * len(rules) + 6, left=236, gap_x=24, top=top,
        right=22,
    )  # fmt: skip
    styles = candidate_styles()
    handles = {}
    errors: tuple[tuple[Axes, Sequence[ArmResult], Quantity], ...] = (
        (axes[0], harmless, "reject"),
        (axes[1], harm, "accept"),
    )
    for ax, arms, quantity in errors:
        for row, rule in enumerate(rules):
            worst = rate(arms, f"{rule.name}@5", quantity)
            if worst is not None:
                (handles["worst arm, n = 5"],) = ax.plot(
                    [worst.mean, worst.worst], [row, row], color=RULE, lw=6, solid_capstyle="butt"
                )
            for k, plan in enumerate((*map(str, FIXED[1:]), LOOKS)):
                found = rate(arms, f"{rule.name}@{plan}", quantity)
                if found is not None:
                    (handles[PLAN_NAMES[plan]],) = ax.plot(
                        [found.mean], [row], ls="", marker=styles[k].marker, ms=7, alpha=0.9,
                        color=styles[k].colour,
                    )  # fmt: skip
        ax.set_ylim(len(rules) - 0.5, -0.5)
        ax.set_xlim(-0.02, 1.02)
        ax.set_yticks(range(len(rules)), [rule.title for rule in rules])
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("share of draws")
    axes[1].tick_params(labelleft=False)
    axes[0].set_title("harmless rejected")
    axes[1].set_title("harm accepted")
    legend_on_top(figure, WIDE, list(handles.values()), list(handles), per_row=5)
    return figure


def _sizes(tasks: Sequence[TaskResult], half: Half | None) -> Figure | None:
    """Draw accepted / undecided / rejected by what an arm is, at n = 3 and with looks."""
    keys = [f"{OURS}@3", f"{OURS}@{LOOKS}"]
    groups = [
        (name, arms)
        for name, arms in size_groups(tasks, half)
        if all(key in arm.tallies for arm in arms for key in keys)
    ]
    if not groups:
        return None
    top = 26 + legend_height(WIDE, 3)
    figure, axes = panels(
        WIDE, rows=1, columns=2, row_height=30.0 * len(groups) + 4, left=150, gap_x=24, top=top
    )
    handles = []
    for ax, key, plan in zip(axes, keys, ("3", LOOKS), strict=True):
        handles = [_stack(ax, row, arms, key) for row, (_, arms) in enumerate(groups)]
        ax.set_ylim(len(groups) - 0.5, -0.5)
        ax.set_xlim(0, 1)
        names = [f"{name} ({len(arms)})" for name, arms in groups]
        ax.set_yticks(range(len(groups)), names)
        ax.grid(visible=False)
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("share of draws, mean over arms")
        ax.set_title(PLAN_NAMES[plan])
    axes[1].tick_params(labelleft=False)
    legend_on_top(figure, WIDE, handles[0], ["accepted", "undecided", "rejected"])
    return figure


def _stack(ax: Axes, row: int, arms: Sequence[ArmResult], key: str) -> list[object]:
    """Draw one bar of three parts; lightness tells them apart without colour, as does the order."""
    left = 0.0
    drawn: list[object] = []
    for value, colour, ink in (
        (mean_of(arms, key, lambda tally: tally.accept), ACCEPT, "white"),
        (mean_of(arms, key, lambda tally: tally.inconclusive), RULE, INK),
        (mean_of(arms, key, lambda tally: tally.reject), REJECT, "white"),
    ):
        width = value or 0.0
        drawn.append(ax.barh(row, width, left=left, height=0.72, color=colour))
        if width >= 0.06:
            ax.text(
                left + width / 2, row, f"{100 * width:.0f}", color=ink, ha="center", va="center",
                fontsize=10,
            )  # fmt: skip
        left += width
    return drawn


def _arms(tasks: Sequence[TaskResult]) -> Figure | None:
    """Draw every arm: how it was judged against the size of its harm."""
    arms = [arm for arm in arms_of(tasks) if not math.isnan(arm.truth.size) and arm.group != "void"]
    key = f"{OURS}@{LOOKS}"
    arms = [arm for arm in arms if key in arm.tallies]
    if not arms:
        return None
    top = 26 + legend_height(WIDE, 4)
    figure, axes = panels(WIDE, rows=1, columns=2, row_height=240, top=top, gap_x=50, bottom=60)
    styles = candidate_styles()
    handles = {}
    for ax, title in zip(axes, ("accepted", "rejected"), strict=True):
        for k, (name, own) in enumerate(
            (
                ("null or harmless format", [a for a in arms if a.kind != "fault"]),
                ("planted fault", [a for a in arms if a.kind == "fault"]),
            )
        ):
            shares = [
                a.tallies[key].accept if title == "accepted" else a.tallies[key].reject for a in own
            ]
            (handles[name],) = ax.plot(
                [_size(a) for a in own], shares, ls="", marker=styles[k].marker, ms=5,
                color=styles[k].colour, alpha=0.55, mew=0,
            )  # fmt: skip
        ax.set_xscale("symlog", linthresh=0.5, linscale=0.7)
        ax.axvline(1.0, color=INK, lw=1.2)
        ax.set_xlim(-2.2, 420)
        ticks = [-1.0, 0.0, 0.5, 1.0, 2.0, 6.0, 20.0, _LARGEST_SIZE, _NOT_FINITE_AT]
        names = ["-1", "0", "0.5", "1", "2", "6", "20", ">100", "not\nfinite"]
        ax.set_xticks(ticks, names, fontsize=9.5)
        ax.set_xticks([], minor=True)
        ax.set_ylim(-0.03, 1.03)
        ax.set_xlabel("size of the arm, margins (from all seeds)")
        ax.set_title(f"{title}, looks 3-5-8")
    legend_on_top(figure, WIDE, list(handles.values()), list(handles))
    return figure


def _size(arm: ArmResult) -> float:
    """Return where an arm lies on the axis of sizes."""
    size = arm.truth.size
    return _NOT_FINITE_AT if math.isinf(size) else max(-2.0, min(size, _LARGEST_SIZE))


def _pairs(tasks: Sequence[TaskResult], half: Half | None) -> Figure | None:
    """Draw the pairs that looks and the always-valid plan take, by what an arm is."""
    groups = size_groups(tasks, half)
    keys = [p for p in (LOOKS, ALWAYS_VALID) if mean_of(arms_of(tasks), f"{OURS}@{p}", _one)]
    if not groups or not keys:
        return None
    top = 10 + legend_height(WIDE, 2)
    figure, (ax,) = panels(
        WIDE, rows=1, columns=1, row_height=32.0 * len(groups), left=150, top=top, right=40
    )
    styles = candidate_styles()
    handles = []
    for k, plan in enumerate(keys):
        values = [mean_of(arms, f"{OURS}@{plan}", lambda t: t.seeds) or 0.0 for _, arms in groups]
        rows = [row + 0.36 * (k - 0.5 * (len(keys) - 1)) for row in range(len(groups))]
        bars = ax.barh(rows, values, height=0.34, color=styles[k].colour, alpha=0.9 - 0.3 * k)
        handles.append(bars)
        for row, value in zip(rows, values, strict=True):
            ax.text(value + 0.06, row, f"{value:.1f}", va="center", fontsize=9.5, color=INK)
    ax.axvline(FIXED[-1], color=INK, lw=1.2)
    ax.set_ylim(len(groups) - 0.5, -0.5)
    ax.set_xlim(0, FIXED[-1] + 0.4)
    ax.set_yticks(range(len(groups)), [f"{name} ({len(arms)})" for name, arms in groups])
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("pairs of runs until settled, at most 8; mean over arms and draws")
    legend_on_top(figure, WIDE, handles, [PLAN_NAMES[plan] for plan in keys])
    return figure


def _one(tally: object) -> float:
    return 1.0
