"""Local rounding error by module, one drawing per candidate: worst module on top."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.analysis.findings import Verdict
from harness.analysis.probe_findings import ModuleFinding
from harness.numerics.formats import FORMATS
from harness.report.evidence import Evidence
from harness.report.figures.canvas import Drawing, Size, draw
from harness.report.figures.module_bars import BarColumn, how_many, module_bars
from harness.report.rounding_error import callout, rounding_name
from harness.report.style import Styles
from harness.report.text import candidates, percent_text, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Value = Callable[[ModuleFinding], float | None]


def rounding(evidence: Evidence, styles: Styles) -> tuple[Drawing, ...]:
    """Draw one picture for each candidate that was measured by module."""
    drawings = []
    for verdict in candidates(evidence.findings):
        columns = _columns(verdict, evidence)
        if columns:
            drawings.append(_drawing(verdict, columns, styles[verdict.policy].colour))
    return tuple(drawings)


def _drawing(verdict: Verdict, columns: tuple[BarColumn, ...], colour: str) -> Drawing:
    name = rounding_name(verdict.policy)
    modules = [m.module for m in verdict.modules]
    marked = [verdict.guilty_module] if verdict.guilty_module is not None else []

    def render(size: Size) -> Figure:
        return module_bars(
            size, gid=name, modules=modules, columns=columns, marked=marked, colour=colour
        )

    return draw(
        name,
        title=f"Rounding error by module under {verdict.policy}",
        caption=(
            f"{how_many(len(modules))} Forward error: each module is given FP32's own input, so an "
            "error is made in that module and not handed on from another; it should be near the "
            "format's unit roundoff (a container adds up the errors of its parts). Gradient error "
            "and noise ratio: of the module's own parameters, at the same weights "
            "and batches. Logarithmic: look for a bar that reaches further right than all others, "
            "and for a noise ratio beyond the dashed line. A bar in red is a module that the "
            "evidence names."
        ),
        alt=_alt(verdict),
        render=render,
    )


def _columns(verdict: Verdict, evidence: Evidence) -> tuple[BarColumn, ...]:
    modules = verdict.modules
    rule = evidence.findings.rule
    spec = FORMATS.get(str(verdict.policy_content.get("compute_format")))
    roundoff = spec.unit_roundoff if spec is not None else None
    threshold = rule.get("probe_noise_ratio")
    wanted: tuple[tuple[str, _Value, float | None, str], ...] = (
        ("forward error", lambda m: m.local_forward_error, roundoff, "unit roundoff"),
        ("gradient error", lambda m: m.gradient_error, None, ""),
        ("rounding / sampling noise", lambda m: m.noise_ratio, threshold, "threshold"),
    )
    columns = []
    for title, value, line, label in wanted:
        values = tuple(value(m) for m in modules)
        if any(v is not None for v in values):
            columns.append(
                BarColumn(
                    title=title,
                    values=values,
                    text=_text,
                    line=line if isinstance(line, (int, float)) else None,
                    line_label=label,
                )
            )
    return tuple(columns)


def _text(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else significant(value, 2)


def _alt(verdict: Verdict) -> str:
    parts = [
        f"{m.module}: forward error {significant(m.local_forward_error, 2)}, rounding over "
        f"sampling noise {percent_text(m.noise_ratio)}"
        for m in verdict.modules[:5]
        if m.local_forward_error is None or not math.isnan(m.local_forward_error)
    ]
    lead = callout(verdict).replace("`", "")
    return f"{lead} The worst modules. ".strip() + " " + "; ".join(parts) + "."
