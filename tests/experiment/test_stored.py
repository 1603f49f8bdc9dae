"""`action=report`: the sweep's own rule, what the command changes of it, and sweeps of a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories import make_grid

from harness.analysis.rule import DecisionRule
from harness.config import (
    LaunchConf,
    ProbesConf,
    RunConfig,
    ThroughputConf,
    TrackingConf,
    TrainConf,
)
from harness.experiment import manifest as manifests
from harness.experiment import stored
from harness.experiment.job import run_folder
from harness.experiment.manifest import Manifest, PlannedRun
from harness.runs.record import write_record


def config(folder: Path, **decision: Any) -> RunConfig:
    return RunConfig(
        action="report",
        device="cpu",
        output_dir=folder,
        sweep_id="kept",
        reference="fp32",
        seed=0,
        dry_run=False,
        workload={},
        policy={},
        train=TrainConf(),
        probes=ProbesConf(),
        decision={**DecisionRule().as_mapping(), **decision},
        throughput=ThroughputConf(),
        tracking=TrackingConf(enabled=False),
        launch=LaunchConf(),
    )


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return a folder with a sweep whose command had set a margin and a level of its own."""
    records = make_grid({"fp32": {}, "bf16": {"luck": 0.001}})
    for record in records:
        write_record(record, run_folder(tmp_path, record.run_key))
    manifest = Manifest(
        sweep_id="kept",
        sweep="precision",
        command="python -m harness +sweep=precision decision.margin_train=0.3",
        device="cpu",
        reference="fp32",
        runs=tuple(
            PlannedRun(run_key=r.run_key, workload=r.workload, policy=r.policy, seed=r.seed)
            for r in records
        ),
        descriptions={},
        decision=DecisionRule(margin_train=0.3, alpha=0.02).as_mapping(),
    )
    manifests.write(manifest, tmp_path)
    return tmp_path


def reported_rule(folder: Path, **decision: Any) -> dict[str, Any]:
    assert stored.report_stored(config(folder, **decision)) == 0
    path = folder / "reports" / "kept" / "toy" / "decision.json"
    rule = json.loads(path.read_text(encoding="utf-8"))["rule"]
    assert isinstance(rule, dict)
    return rule


def test_the_rule_of_the_sweep_is_kept_and_a_command_changes_it(kept: Path) -> None:
    rule = reported_rule(kept)
    assert (rule["margin_train"], rule["alpha"]) == (0.3, 0.02)
    rule = reported_rule(kept, margin_train=0.1)
    assert (rule["margin_train"], rule["alpha"]) == (0.1, 0.02)


def test_no_command_is_built_upon_one_that_is_not_known(tmp_path: Path) -> None:
    """Records that came from a store name no command, so none is printed with more seeds."""
    records = make_grid({"fp32": {}, "bf16": {"luck": 0.001}}, seeds=(0,))
    manifest = stored._manifest_of("kept", records, config(tmp_path))
    conclusion = stored.conclude(manifest, records, rule=DecisionRule(), output_dir=tmp_path)
    (verdict,) = conclusion.findings[0].verdicts
    assert (verdict.extra_seeds, verdict.settle_command) == (2, None)
    page = (conclusion.reports["toy"] / "report.md").read_text(encoding="utf-8")
    assert "To settle" not in page
