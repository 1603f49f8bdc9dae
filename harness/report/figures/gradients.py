"""Gradient norms, what 16 bits would lose of the gradients, and where their exponents lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.report.evidence import (
    Curve,
    Evidence,
    Floats,
    exponent_shares,
    sampled_share_curve,
    series_curve,
)
from harness.report.figures.canvas import (
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
from harness.report.style import Styles
from harness.report.text import percent_text, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Shares below this are drawn on the axis' lowest line, labelled 0: a logarithm has no zero.
_SHARE_FLOOR = 1e-7
_LOSSES = {
    "gradients FP16 would flush": ("grad_flushed_fp16", "grad_nonzero"),
    "gradients BF16 would flush": ("grad_flushed_bf16", "grad_nonzero"),
    "updates BF16 would lose": ("lost_update_bf16", "update_total"),
}


def gradient_norms(evidence: Evidence, styles: Styles) -> Drawing | None:
    """Draw the global gradient norm of all policies; None when no run has it."""
    curves = {p: c for p in evidence.policies if (c := series_curve(evidence, p, "grad_norm"))}
    if not curves:
        return None
    return draw(
        "gradient-norm",
        title="Gradient norm",
        caption=(
            "Global L2 norm after unscaling and before clipping: mean over the seeds, band from "
            "the lowest to the highest. Steps whose gradients were not finite are left out. Look "
            "for a line that grows away from the reference (instability) or falls to nothing "
            "(gradients lost)."
        ),
        alt=_ends("Mean gradient norm at the start and at the end. ", curves),
        render=lambda size: _render_norms(size, evidence, curves, styles),
    )


def _render_norms(
    size: Size, evidence: Evidence, curves: dict[str, Curve], styles: Styles
) -> Figure:
    top = 6 + legend_height(size, len(curves))
    figure, (ax,) = panels(size, rows=1, columns=1, row_height=230, top=top)
    figure.set_gid("gradient-norm")
    for policy, curve in curves.items():
        plot_curve(ax, curve, styles[policy], gid=f"gradient-norm-{policy}")
    scale_by_decades(ax, list(curves.values()))
    step_axis(ax, 0, evidence.num_steps)
    ax.set_ylabel("norm")
    legend(figure, size, list(curves), styles)
    return figure


def underflow(evidence: Evidence, styles: Styles) -> Drawing | None:
    """Draw the shares of gradients and updates that 16 bits lose; None when nothing was sampled."""
    shares: dict[str, dict[str, Curve]] = {}
    for title, (counted, total) in _LOSSES.items():
        found = {
            p: c
            for p in evidence.policies
            if (c := sampled_share_curve(evidence, p, counted=counted, total=total))
        }
        if found:
            shares[title] = found
    if not shares:
        return None
    policies = [p for p in evidence.policies if any(p in found for found in shares.values())]
    return draw(
        "underflow",
        title="Underflow over the steps",
        caption=(
            "Share of the non-zero gradient elements that would become zero if the unscaled "
            "gradient were stored in the format, and share of the weight updates that a weight "
            "stored in BF16 would round away: a what-if for all policies but those whose weights "
            "are BF16. Logarithmic; the lowest line is exactly zero. A "
            "share that climbs while the learning rate decays is the sign of a run that will "
            "stall; loss scaling moves the first panel, FP32 weights avoid the last."
        ),
        alt=_share_alt(shares),
        render=lambda size: _render_shares(size, evidence, shares, policies, styles),
    )


def _share_alt(shares: dict[str, dict[str, Curve]]) -> str:
    parts = []
    for title, curves in shares.items():
        for policy, curve in curves.items():
            finite = curve.middle[np.isfinite(curve.middle)]
            mean = float(finite.mean()) if len(finite) else None
            parts.append(f"{title}, {policy}: {percent_text(mean)}")
    return "Mean share over the run. " + "; ".join(parts) + "."


def _render_shares(
    size: Size,
    evidence: Evidence,
    shares: dict[str, dict[str, Curve]],
    policies: list[str],
    styles: Styles,
) -> Figure:
    columns = 1 if size.narrow else len(shares)
    top = 22 + legend_height(size, len(policies))
    figure, axes = panels(
        size, rows=len(shares) // columns, columns=columns, row_height=190, top=top, left=70,
        gap_x=34, share_y=True,
    )  # fmt: skip
    figure.set_gid("underflow")
    for index, (title, curves) in enumerate(shares.items()):
        ax = axes[index]
        for policy, curve in curves.items():
            style = styles[policy]
            ax.plot(
                curve.steps, _floored(curve.middle), color=style.colour, ls=style.line,
                lw=style.width, gid=f"underflow-{index}-{policy}",
            )  # fmt: skip
        _share_axis(ax, evidence.num_steps)
        ax.set_title(title, fontsize=11)
        if index % columns:
            ax.tick_params(labelleft=False)
    legend(figure, size, policies, styles)
    return figure


def _floored(shares: Floats) -> Floats:
    # A gap stays a gap: maximum() hands NaN on.
    return np.maximum(shares, _SHARE_FLOOR)


def _share_axis(ax: Axes, num_steps: int) -> None:
    ax.set_yscale("log")
    ax.set_ylim(_SHARE_FLOOR * 0.6, 1.5)
    ticks = {_SHARE_FLOOR: "0", 1e-6: "0.0001 %", 1e-4: "0.01 %", 1e-2: "1 %", 1.0: "100 %"}
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.minorticks_off()
    step_axis(ax, 0, num_steps, labels=4)


def exponents(evidence: Evidence, styles: Styles) -> Drawing | None:
    """Draw the distribution of gradient exponents over the formats' ranges; None without counts."""
    tables = {
        p: shares
        for p in evidence.policies
        if (shares := exponent_shares(evidence, p, "grad/all")) is not None
    }
    if not tables:
        return None
    return draw(
        "exponents",
        title="Gradient exponents and the formats' ranges",
        caption=(
            "How the non-zero gradient elements of the whole run spread over powers of two. The "
            "bars below show what each format can hold: solid its normal numbers, faint its "
            "subnormal ones, which keep fewer and fewer digits. What lies left of a bar becomes "
            "zero in that format, what lies right of it overflows; FP16 needs loss scaling (a "
            "shift to the right) when much of the hill lies left of its solid bar."
        ),
        alt=_exponent_alt(tables),
        render=lambda size: _render_exponents(size, tables, styles),
    )


def _exponent_alt(tables: dict[str, Floats]) -> str:
    parts = []
    for policy, shares in tables.items():
        low, high = _quantile(shares, 0.01), _quantile(shares, 0.99)
        parts.append(f"{policy}: 98 % between 2^{low} and 2^{high + 1}")
    return "Range of the gradient elements' magnitudes. " + "; ".join(parts) + "."


def _quantile(shares: Floats, q: float) -> int:
    """Return the binary exponent below which a share `q` of the elements lies."""
    return int(np.searchsorted(np.cumsum(shares), q)) - 126


def _render_exponents(size: Size, tables: dict[str, Floats], styles: Styles) -> Figure:
    top = 6 + legend_height(size, len(tables))
    figure, (ax, bars) = panels(
        size, rows=2, columns=1, row_height=150, top=top, gap_y=12, left=70, bottom=42
    )
    figure.set_gid("exponents")
    grid = np.arange(254) - 126.0
    for policy, shares in tables.items():
        style = styles[policy]
        ax.plot(
            grid, shares, color=style.colour, ls=style.line, lw=style.width, drawstyle="steps-post",
            gid=f"exponents-{policy}",
        )  # fmt: skip
    low = min([_quantile(s, 1e-4) for s in tables.values()] + [-30])
    high = max([_quantile(s, 1 - 1e-6) for s in tables.values()] + [16])
    low, high = max(low - 4, -150), min(high + 3, 128)
    ax.set_xlim(low, high)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("share of elements")
    ax.tick_params(labelbottom=False)
    _format_bars(bars, low, high)
    legend(figure, size, list(tables), styles)
    return figure


def _format_bars(ax: Axes, low: float, high: float) -> None:
    from harness.numerics.formats import get_format

    names = ("fp16", "bf16", "fp32")
    for row, name in enumerate(names):
        spec = get_format(name)
        bottom, normal, top = (
            float(np.log2(v)) for v in (spec.min_subnormal, spec.min_normal, spec.max_finite)
        )
        ax.barh(row, top - normal, left=normal, height=0.36, color=MUTED, gid=f"format-{name}")
        ax.barh(row, normal - bottom, left=bottom, height=0.36, color=MUTED, alpha=0.35, lw=0)
        for edge, text in ((bottom, spec.min_subnormal), (top, spec.max_finite)):
            if low < edge < high:
                label = f"$2^{{{edge:.0f}}}$" if edge < 0 else significant(text, 3)
                side = "left" if edge < 0 else "right"
                ax.text(edge, row - 0.24, label, ha=side, va="bottom", fontsize=9.5, color=INK)
    ax.set_xlim(low, high)
    ax.set_ylim(len(names) - 0.5, -0.75)
    ax.set_yticks(range(len(names)), [n.upper() for n in names])
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("magnitude of a gradient element as a power of two")


def _ends(lead: str, curves: dict[str, Curve]) -> str:
    parts = []
    for policy, curve in curves.items():
        finite = curve.middle[np.isfinite(curve.middle)]
        ends = f"{significant(finite[0])} to {significant(finite[-1])}" if len(finite) else "none"
        parts.append(f"{policy}: {ends}")
    return lead + "; ".join(parts) + "."
