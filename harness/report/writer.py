"""Writes a model's report folder and the index over the models of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.analysis.findings import ModelFindings
from harness.report.decision_json import decision_text
from harness.report.evidence import gather
from harness.report.figures.catalogue import draw_all
from harness.report.html import index_page, report_page
from harness.report.markdown import report_markdown
from harness.report.style import policy_styles
from harness.report.text import controls
from harness.report.view import context
from harness.runs.record import RunRecord
from harness.runs.record_files import write_atomically


@dataclass(frozen=True, kw_only=True)
class ReportPaths:
    """Where the parts of a report went.

    Attributes:
        figures: One SVG file per figure that had data.
    """

    html: Path
    markdown: Path
    decision: Path
    figures: tuple[Path, ...]


def write_report(
    findings: ModelFindings, records: Sequence[RunRecord], folder: Path
) -> ReportPaths:
    """Write `report.html`, `report.md`, `decision.json` and `figures/*.svg` into `folder`.

    The folder is created if needed; figures of an earlier report that this one does not have are
    removed. The decision is written last: where it exists, the report beside it is complete.

    Args:
        findings: Conclusions on one model.
        records: That model's runs; missing, crashed and diverged ones show as such.
        folder: The caller makes sure that a model's name cannot lead elsewhere (`safe_name`).

    Raises:
        OSError: The folder cannot be written.
    """
    evidence = gather(findings, records)
    styles = policy_styles(
        evidence.policies,
        reference=findings.reference_policy,
        controls=[v.policy for v in controls(findings)],
    )
    drawings = draw_all(evidence, styles)
    figure_folder = folder / "figures"
    figure_folder.mkdir(parents=True, exist_ok=True)
    figures = tuple(figure_folder / f"{name}.svg" for name in drawings)
    for stale in set(figure_folder.glob("*.svg")) - set(figures):
        stale.unlink()
    for path, drawing in zip(figures, drawings.values(), strict=True):
        write_atomically(path, drawing.svg["wide"])
    paths = ReportPaths(
        html=folder / "report.html",
        markdown=folder / "report.md",
        decision=folder / "decision.json",
        figures=figures,
    )
    values = context(evidence)
    write_atomically(paths.html, report_page(values, drawings, styles))
    write_atomically(paths.markdown, report_markdown(values))
    write_atomically(paths.decision, decision_text(findings))
    return paths


def write_index(all_findings: Sequence[ModelFindings], folder: Path) -> Path:
    """Write `index.html` over the models; each links to `<safe_name(workload)>/report.html`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    write_atomically(path, index_page(all_findings))
    return path
