from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from report_samples import realistic_findings, realistic_records

from harness.analysis.findings import ModelFindings
from harness.report.writer import ReportPaths, write_report
from harness.runs.record import RunRecord


@dataclass(frozen=True)
class Written:
    findings: ModelFindings
    records: Sequence[RunRecord]
    paths: ReportPaths
    html: str


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of a whole realistic sweep, written once for all tests that only read it."""
    records = realistic_records()
    findings = realistic_findings(records)
    paths = write_report(findings, records, tmp_path_factory.mktemp("report") / "char_gpt")
    return Written(findings, records, paths, paths.html.read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "reports" / "model"
