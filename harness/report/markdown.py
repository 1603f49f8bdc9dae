"""`report.md`: the report without figures, for a terminal, a review or a run's description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.report.templating import markdown_environment


def report_markdown(values: Mapping[str, Any]) -> str:
    """Return the report as Markdown with tables and no HTML.

    Args:
        values: What `view.context` returns.
    """
    template = markdown_environment().get_template("report.md.j2")
    return template.render(**values)
