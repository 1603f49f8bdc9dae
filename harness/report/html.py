"""`report.html` and `index.html`: pages that need nothing beside themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.analysis.findings import ModelFindings
from harness.analysis.wording import counted
from harness.report.figures.canvas import Drawing, page_svg
from harness.report.style import PolicyStyle, candidate_styles
from harness.report.templating import html_environment
from harness.report.text import outcome_label, safe_name


def report_page(
    values: Mapping[str, Any],
    drawings: Mapping[str, Drawing],
    styles: Mapping[str, PolicyStyle],
) -> str:
    """Return the report of one model as one HTML document, without scripts or outside links.

    Args:
        values: What `view.context` returns.
        drawings: Name -> figure; the page says so in words where one is missing.
        styles: Policy -> look.
    """
    from markupsafe import Markup

    colours = {style.colour: style.variable for style in candidate_styles()}
    figures = {
        # Markup: our own drawing, in which names went through XML escaping.
        name: {s: Markup(page_svg(svg, colours)) for s, svg in drawing.svg.items()}
        for name, drawing in drawings.items()
    }
    template = html_environment().get_template("report.html.j2")
    return template.render(
        **values,
        drawings=drawings,
        figures=figures,
        styles=styles,
        candidate_styles=candidate_styles(),
        counted=counted,
    )


def index_page(all_findings: Sequence[ModelFindings]) -> str:
    """Return the page over all models of a sweep, linking to each report."""
    template = html_environment().get_template("index.html.j2")
    models = [
        {
            "findings": findings,
            "link": f"{safe_name(findings.workload)}/report.html",
            "verdicts": [(v.policy, outcome_label(v)) for v in findings.verdicts],
        }
        for findings in all_findings
    ]
    sweeps = list(dict.fromkeys(findings.sweep_id for findings in all_findings))
    return template.render(
        models=models, sweeps=sweeps, candidate_styles=candidate_styles(), counted=counted
    )
