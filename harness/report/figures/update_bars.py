"""Weight updates lost to rounding, by module: worst module on top."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.report.evidence import Evidence
from harness.report.figures.canvas import Drawing, Size, draw
from harness.report.figures.module_bars import BarColumn, how_many, module_bars
from harness.report.style import Styles
from harness.report.text import percent_text
from harness.report.update_losses import PolicyUpdates, lost_updates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PANELS = 3


def update_bars(evidence: Evidence, styles: Styles) -> Drawing | None:
    """Draw the share of lost updates by module; None when no run has it."""
    found = lost_updates(evidence)
    if not found:
        return None
    modules = _order(found)
    columns = _columns(found, modules)

    def render(size: Size) -> Figure:
        return module_bars(size, gid="lost-updates", modules=modules, columns=columns)

    return draw(
        "lost-updates",
        title="Weight updates lost to rounding, by module",
        caption=(
            f"{how_many(len(modules))} Share of the non-zero updates after which the weight is "
            'what it was, over all sampled steps and seeds. "Would lose" is worked out from FP32 '
            'weights and says what 16-bit weights would do; "lost" was observed in weights that '
            "really are in 16 bits. Look for modules near 100 %: they have stopped learning. FP32 "
            "weights avoid it, stochastic rounding keeps the updates on average."
        ),
        alt=_alt(columns, modules),
        render=render,
    )


def _order(found: tuple[PolicyUpdates, ...]) -> list[str]:
    """Return the modules by their largest share in any policy: observed losses weigh first."""
    worst: dict[str, tuple[float, float]] = {}
    for updates in found:
        for row in updates.modules:
            seen = worst.get(row.module, (0.0, 0.0))
            share = row.lost.get("bf16", row.worst)
            worst[row.module] = (
                max(seen[0], row.worst) if updates.observed else seen[0],
                max(seen[1], share),
            )
    return sorted(worst, key=lambda name: (-worst[name][0], -worst[name][1], name))


def _columns(found: tuple[PolicyUpdates, ...], modules: list[str]) -> tuple[BarColumn, ...]:
    columns = []
    for updates in sorted(found, key=lambda u: not u.observed):
        rows = {row.module: row for row in updates.modules}
        formats = dict.fromkeys(name for row in updates.modules for name in row.lost)
        for name in formats:
            # One panel for each policy that was observed; both formats for the what-if.
            title = f"{updates.policy} lost" if updates.observed else f"{name.upper()} would lose"
            columns.append(
                BarColumn(
                    title=title,
                    values=tuple(rows[m].lost.get(name) if m in rows else None for m in modules),
                    text=percent_text,
                    logarithmic=False,
                )
            )
            if updates.observed:
                break
    return tuple(columns[:_MOST_PANELS])


def _alt(columns: tuple[BarColumn, ...], modules: list[str]) -> str:
    parts = []
    for column in columns:
        worst = [
            f"{module} {percent_text(value)}"
            for module, value in zip(modules[:5], column.values, strict=False)
            if value is not None
        ]
        parts.append(f"{column.title}: {', '.join(worst) or 'not measured'}")
    return "Share of the weight updates. " + "; ".join(parts) + "."
