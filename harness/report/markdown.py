"""`report.md`: the report without figures, for a terminal, a review or a run's description."""

from __future__ import annotations

from harness.report.evidence import Evidence
from harness.report.templating import markdown_environment
from harness.report.view import context


def report_markdown(evidence: Evidence) -> str:
    """Return the report as Markdown with tables and no HTML."""
    template = markdown_environment().get_template("report.md.j2")
    return template.render(**context(evidence))
