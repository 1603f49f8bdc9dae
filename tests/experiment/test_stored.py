"""`action=report`: the sweep's own rule, what the command changes of it, and sweeps of a store."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from factories import make_grid, make_record

from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan
from harness.config import (
    ConfigError,
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
        command="python -m harness +sweep=precision decision.margin=0.3",
        device="cpu",
        reference="fp32",
        runs=tuple(
            PlannedRun(run_key=r.run_key, workload=r.workload, policy=r.policy, seed=r.seed)
            for r in records
        ),
        descriptions={},
        decision=DecisionRule(margin=0.3, alpha=0.02).as_mapping(),
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
    assert (rule["margin"], rule["alpha"]) == (0.3, 0.02)
    rule = reported_rule(kept, margin=0.1)
    assert (rule["margin"], rule["alpha"]) == (0.1, 0.02)


def test_a_default_that_is_asked_for_changes_the_rule(kept: Path) -> None:
    asked = ["decision.margin=null", "++decision.alpha=0.05"]
    assert stored.report_stored(config(kept), arguments=asked) == 0
    path = kept / "reports" / "kept" / "toy" / "decision.json"
    decision = json.loads(path.read_text(encoding="utf-8"))
    assert (decision["rule"]["margin"], decision["rule"]["alpha"]) == (None, 0.05)
    # The sweep's own decision.margin=0.3 gives way in the command that the report builds upon.
    expected = "python -m harness +sweep=precision decision.alpha=0.05 decision.margin=null"
    assert decision["command"] == expected


def test_what_a_report_advises_is_judged_by_its_own_rule(tmp_path: Path) -> None:
    """Its command has the looks and levels that the report was asked for, not the sweep's."""
    records = [
        make_record(policy, seed, seed_sd=0.0, offset=offset * (-1) ** seed)
        for policy, offset in (("fp32", 0.0), ("bf16", 0.001))
        for seed in range(6)
    ]
    for record in records:
        write_record(record, run_folder(tmp_path, record.run_key))
    rule = DecisionRule(margin="3 %")
    manifest = dataclasses.replace(
        stored._manifest_of("kept", records, {}, config(tmp_path)),
        command="python -m harness +sweep=precision 'decision.margin=3 %'",
        decision=rule.as_mapping(),
        plan={"seeds_given": None},
    )
    manifests.write(manifest, tmp_path)
    asked = {"margin": "0.001", "looks": [3, 6], "look_alphas": [0.02, 0.03]}
    assert stored.report_stored(config(tmp_path, **asked)) == 0
    path = tmp_path / "reports" / "kept" / "toy" / "decision.json"
    (verdict,) = json.loads(path.read_text(encoding="utf-8"))["verdicts"]
    command = verdict["settle_command"]
    assert shlex.split(command)[3:-1] == [
        "+sweep=precision",
        "decision.look_alphas=[0.02,0.03]",
        "decision.margin=0.001",
    ]
    assert shlex.split(command)[-1] == f"decision.looks=[3,{6 + verdict['extra_seeds']}]"


@pytest.mark.parametrize("asked", [{"seeds": 12}, {"looks": [12, 14, 16], "alpha": 0.06}])
def test_more_seeds_than_the_sweep_has_are_refused(kept: Path, asked: dict[str, Any]) -> None:
    manifest = dataclasses.replace(manifests.read(kept, "kept"), plan={"seeds_given": None})
    manifests.write(manifest, kept)
    with pytest.raises(ConfigError, match=r"of 3 seeds, .* toy at 12; train them first: python"):
        stored.report_stored(config(kept, **asked))


@pytest.mark.parametrize("old", [{"margin_train": None}, {"margin_train": 0.2}])
def test_a_sweep_that_had_a_margin_per_endpoint_can_still_be_reported(
    kept: Path, old: dict[str, Any]
) -> None:
    manifest = manifests.read(kept, "kept")
    decision = {**DecisionRule(alpha=0.02).as_mapping(), **old}
    manifests.write(dataclasses.replace(manifest, decision=decision), kept)
    if old["margin_train"] is not None:
        with pytest.raises(ConfigError, match=r"margin_train=0\.2.*set decision\.margin"):
            reported_rule(kept)
    rule = reported_rule(kept, margin=0.1)
    assert (rule["margin"], rule["alpha"]) == (0.1, 0.02)


def test_no_command_is_built_upon_one_that_is_not_known(tmp_path: Path) -> None:
    """Records that came from a store name no command, so none is printed with more seeds."""
    records = make_grid({"fp32": {}, "bf16": {"luck": 0.001}}, seeds=(0,))
    manifest = stored._manifest_of("kept", records, {}, config(tmp_path))
    conclusion = stored.conclude(manifest, records, rule=DecisionRule(), output_dir=tmp_path)
    (verdict,) = conclusion.findings[0].verdicts
    assert (verdict.extra_seeds, verdict.settle_command) == (2, None)
    page = (conclusion.reports["toy"] / "report.md").read_text(encoding="utf-8")
    assert "To settle" not in page


def from_store(folder: Path, records: list[Any], decision: dict[str, Any]) -> Any:
    manifest = stored._manifest_of("kept", records, decision, config(folder))
    rule = stored._rule_of(manifest, {})
    return stored.conclude(manifest, records, rule=rule, output_dir=folder).findings[0]


def test_records_of_a_store_are_judged_by_the_plan_of_the_last_report(tmp_path: Path) -> None:
    records = make_grid({"fp32": {}, "bf16": {"luck": 0.0001}})
    rule = DecisionRule(look_alphas=(0.01, 0.02, 0.02))
    decision = {
        "rule": rule.as_mapping(),
        "plan": SeedPlan.of(rule, seeds_given=None).as_mapping(),
    }
    findings = from_store(tmp_path, records, decision)
    assert (findings.plan.kind, findings.plan.alphas) == ("looks", (0.01, 0.02, 0.02))
    (verdict,) = findings.verdicts
    assert (verdict.outcome, verdict.look.index, verdict.look.alpha) == ("accept", 1, 0.01)
    # Five seeds of two policies were never run.
    assert findings.savings.runs == 10
    fixed = {"rule": rule.as_mapping(), "plan": SeedPlan.fixed(3, rule).as_mapping()}
    assert from_store(tmp_path, records, fixed).plan.looks == (3,)


def test_without_a_report_policies_of_unequal_seeds_tell_of_looks(tmp_path: Path) -> None:
    grid = {"fp32": {}, "bf16": {"luck": 0.0001}, "tf32": {"luck": 0.0001}}
    records = make_grid(grid, seeds=range(5))
    assert from_store(tmp_path, records, {}).plan.kind == "fixed"
    ragged = [r for r in records if r.policy != "bf16" or r.seed < 3]
    findings = from_store(tmp_path, ragged, {})
    assert findings.plan.kind == "looks"
    assert {v.policy: v.outcome for v in findings.verdicts} == {"bf16": "accept", "tf32": "accept"}
