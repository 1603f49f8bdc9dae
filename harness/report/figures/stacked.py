"""One bar per policy, divided into parts: what the memory holds, where the step's time goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from harness.report.evidence import Evidence
from harness.report.figures.canvas import (
    INK,
    MUTED,
    Drawing,
    Size,
    draw,
    legend_height,
    legend_on_top,
    panels,
    policy_label,
    policy_margin,
)
from harness.report.resources import memory_parts, time_parts
from harness.report.style import Styles, candidate_styles
from harness.report.text import bytes_text, percent_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Parts beyond these are drawn together: more cannot be told apart.
_MOST_PARTS = 8
_OTHER = "everything else"


def memory(evidence: Evidence, styles: Styles) -> Drawing | None:
    """Draw what each policy's memory holds; None when no run has the breakdown."""
    parts = memory_parts(evidence)
    if not parts:
        return None
    return draw(
        "memory",
        title="What the memory holds",
        caption=(
            "Bytes of the tensors alive in one training step, by what they are for. Look for the "
            "part that fills most of the bar: a format that shrinks another part saves little. "
            "Optimizer state and FP32 weights do not shrink under autocast; copies in fewer bits "
            "come on top."
        ),
        alt=_alt(parts, bytes_text),
        render=lambda size: _render(size, "memory", parts, bytes_text, axis="bytes"),
    )


def device_time(evidence: Evidence, styles: Styles) -> Drawing | None:
    """Draw the share of a step's time by op family; None when nothing was profiled."""
    parts = time_parts(evidence.findings)
    if not parts:
        return None
    return draw(
        "device-time",
        title="Where the time of a step goes",
        caption=(
            "Share of the time by op family, over a few steps under the profiler, which are not "
            "those that were timed. Only products (matrix products, convolutions, attention) run "
            "faster in fewer bits; where element-wise ops and casts fill the bar, a low-precision "
            "policy gains little."
        ),
        alt=_alt(parts, percent_text),
        render=lambda size: _render(size, "device-time", parts, percent_text, axis="share of time"),
    )


_Parts = Mapping[str, Mapping[str, float]]


def _alt(parts: _Parts, text: Callable[[float], str]) -> str:
    rows = []
    for policy, values in parts.items():
        largest = sorted(values.items(), key=lambda item: -item[1])[:3]
        rows.append(f"{policy}: " + ", ".join(f"{name} {text(v)}" for name, v in largest))
    return "The largest parts. " + "; ".join(rows) + "."


def _ordered(parts: _Parts) -> tuple[str, ...]:
    most: dict[str, float] = {}
    for values in parts.values():
        for name, value in values.items():
            most[name] = max(most.get(name, 0.0), value)
    return tuple(sorted((n for n in most if most[n] > 0), key=lambda name: -most[name]))


def _gathered(values: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return the values in the order of the names; those without a name of their own together."""
    rest = sum(value for name, value in values.items() if name not in names)
    shown = {name: values.get(name, 0.0) for name in names}
    return {**shown, _OTHER: shown.get(_OTHER, 0.0) + rest} if rest > 0 else shown


def _tick_step(largest: float, *, binary: bool) -> float:
    """Return the distance of ticks: a quarter of a share, or a power of two for bytes."""
    return float(2.0 ** math.floor(math.log2(largest / 2))) if binary else 0.25


def _render(
    size: Size, gid: str, parts: _Parts, text: Callable[[float], str], *, axis: str
) -> Figure:
    from matplotlib.patches import Patch
    from matplotlib.ticker import MultipleLocator

    names = _ordered(parts)[: _MOST_PARTS - 1]
    table = {policy: _gathered(values, names) for policy, values in parts.items()}
    legend_names = list(dict.fromkeys(n for values in table.values() for n in values))
    shades = dict(zip(legend_names, [s.colour for s in candidate_styles()], strict=False))
    top = 10 + legend_height(size, len(legend_names), per_row=2 if size.narrow else 4)
    figure, (ax,) = panels(
        size, rows=1, columns=1, row_height=30.0 * len(table) + 6,
        left=policy_margin(size), right=26, top=top, bottom=42,
    )  # fmt: skip
    figure.set_gid(gid)
    largest = max(sum(values.values()) for values in table.values())
    for row, values in enumerate(table.values()):
        left = 0.0
        for name, value in values.items():
            ax.barh(
                row, value, left=left, height=0.66, color=shades.get(name, MUTED), alpha=0.8,
                lw=0, gid=f"{gid}-{row}-{legend_names.index(name)}",
            )  # fmt: skip
            if value > (0.2 if size.narrow else 0.1) * largest:
                ax.text(
                    left + value / 2, row, text(value), ha="center", va="center", fontsize=9.5,
                    color=INK,
                )  # fmt: skip
            left += value
    ax.set_xlim(0, largest * 1.01)
    ax.set_ylim(len(table) - 0.5, -0.5)
    ax.set_yticks(range(len(table)), [policy_label(p).replace("$", r"\$") for p in table])
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MultipleLocator(_tick_step(largest, binary=axis == "bytes")))
    ax.xaxis.set_major_formatter(lambda x, _: text(x) if x else "0")
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(axis)
    legend_on_top(
        figure,
        size,
        [Patch(facecolor=shades.get(n, MUTED), alpha=0.8, lw=0) for n in legend_names],
        [n.replace("$", r"\$") for n in legend_names],
    )
    return figure
