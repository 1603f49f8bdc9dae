"""A sweep's conclusion: one model's fault is told and costs the others nothing."""

from __future__ import annotations

import dataclasses

import pytest
from factories import make_grid

from harness.analysis.decision import DecisionRule
from harness.experiment import conclude as conclusions
from harness.experiment.conclude import conclude, show
from harness.experiment.manifest import Manifest, PlannedRun

RECORDS = [
    dataclasses.replace(record, run_key=f"{workload}-{record.run_key}")
    for workload in ("good", "bad")
    for record in make_grid(["fp32", "bf16"], workload=workload)
]


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        sweep_id="../outside",
        sweep="precision",
        command="python -m harness +sweep=precision",
        device="cpu",
        reference="fp32",
        runs=tuple(
            PlannedRun(run_key=r.run_key, workload=r.workload, policy=r.policy, seed=r.seed)
            for r in RECORDS
        ),
        descriptions={},
    )


def test_every_model_has_its_report_below_the_output_folder(manifest, tmp_path):
    done = conclude(manifest, RECORDS, rule=DecisionRule(), output_dir=tmp_path)
    assert done.exit_code == 0
    assert set(done.reports) == {"good", "bad"}
    for folder in (*done.reports.values(), done.index):
        assert (tmp_path / "reports").resolve() in folder.resolve().parents


def test_a_model_that_cannot_be_analyzed_leaves_the_others(manifest, tmp_path, monkeypatch, capsys):
    analyze = conclusions.analyze_model

    def fails_on_bad(records, **kwargs):
        if records[0].workload == "bad":
            raise RuntimeError("planted")
        return analyze(records, **kwargs)

    monkeypatch.setattr(conclusions, "analyze_model", fails_on_bad)
    done = conclude(manifest, RECORDS, rule=DecisionRule(), output_dir=tmp_path)
    assert [f.workload for f in done.findings] == ["good"]
    assert done.failures == {"bad": "RuntimeError: planted"}
    assert done.exit_code == 1
    show(done, [])
    assert "bad could not be analyzed or reported: RuntimeError: planted" in capsys.readouterr().err
