"""The stage of the same-point probe: who is measured, what is kept, and who reads it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from harness.analysis.decision import DecisionRule
from harness.config import (
    LaunchConf,
    ProbesConf,
    RunConfig,
    ThroughputConf,
    TrackingConf,
    TrainConf,
    load_choice,
)
from harness.config_schema import GradientErrorConf
from harness.experiment import conclude as conclusions
from harness.experiment import manifest as manifests
from harness.experiment import same_point_stage
from harness.experiment.conclude import conclude
from harness.experiment.grid import Grid
from harness.experiment.manifest import Manifest, PlannedRun
from harness.experiment.same_point_records import record_key, record_path, same_point_records
from harness.experiment.same_point_stage import probe_models
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.settings import ProbeSettings, RunSettings
from harness.runs.trainer import train
from harness.workloads.registry import make_workload

STEPS = 8
POLICIES = ("fp32", "fp32_twin", "bf16", "fp16")
MODEL = '''
"""A line through noise."""
import torch
from torch import nn

def build_model(seed):
    torch.manual_seed(seed)
    return nn.Linear(3, 1)

def batches(seed, steps):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 3, generator=generator)
        yield x, x.sum(1, keepdim=True) + 0.1 * torch.randn(16, 1, generator=generator)

def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])

def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
'''


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep whose runs are done."""

    grid: Grid
    manifest: Manifest
    records: list[RunRecord]
    folder: Path


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    (tmp_path / "line.py").write_text(MODEL)
    choice = {**load_choice("workload", "custom"), "file": str(tmp_path / "line.py")}
    workload = make_workload(choice)
    runs, planned, records = [], [], []
    for name in POLICIES:
        for seed in (0, 1):
            policy = load_choice("policy", name)
            runs.append(_config(tmp_path, choice, policy, seed))
            key = f"{name}-{seed}"
            planned.append(PlannedRun(run_key=key, workload=workload.name, policy=name, seed=seed))
            records.append(
                train(
                    workload,
                    PrecisionPolicy.from_mapping(policy),
                    RunSettings(
                        steps=STEPS,
                        seed=seed,
                        device="cpu",
                        num_threads=1,
                        probes=ProbeSettings.off(),
                    ),
                    run_key=key,
                    environment={"device_kind": "cpu"},
                )
            )
    manifest = Manifest(
        sweep_id="probed",
        sweep="precision",
        command="python -m harness",
        device="cpu",
        reference="fp32",
        runs=tuple(planned),
        descriptions={},
    )
    return Sweep(Grid(runs=tuple(runs), arguments=()), manifest, records, tmp_path)


def _config(folder: Path, workload: dict, policy: dict, seed: int) -> RunConfig:
    return RunConfig(
        action="run",
        device="cpu",
        output_dir=folder,
        sweep_id=None,
        reference="fp32",
        seed=seed,
        dry_run=False,
        workload=workload,
        policy=policy,
        train=TrainConf(steps=STEPS),
        probes=ProbesConf(gradient_error=GradientErrorConf(batches=3, points=[0.5])),
        decision={},
        throughput=ThroughputConf(),
        tracking=TrackingConf(enabled=False),
        launch=LaunchConf(),
    )


def changed(sweep: Sweep, policy: str, **fields) -> list[RunRecord]:
    return [dataclasses.replace(r, **fields) if r.policy == policy else r for r in sweep.records]


def test_every_candidate_is_measured_on_the_first_stable_seed(sweep, capsys):
    keys = probe_models(sweep.grid, sweep.manifest, sweep.records)
    assert set(keys) == {"line"}
    assert set(keys["line"]) == {"bf16", "fp16"}  # neither the reference nor the control
    told = capsys.readouterr().out
    assert "same-point probe of line, about" in told
    assert "bf16, fp16" in told
    manifest = dataclasses.replace(sweep.manifest, same_point=keys)
    found = same_point_records(manifest, "line", sweep.folder)
    for name, record in found.items():
        assert record.policy == name
        assert record.failed is None
        assert (record.seed, record.num_batches) == (0, 3)
        assert record.same_trajectory is True
        assert [p.kind for p in record.points] == ["trajectory", "final_rate"]


def test_a_seed_whose_reference_fell_is_passed_over(sweep):
    records = [
        dataclasses.replace(r, status="diverged") if r.run_key == "fp32-0" else r
        for r in sweep.records
    ]
    keys = probe_models(sweep.grid, sweep.manifest, records)
    found = same_point_records(
        dataclasses.replace(sweep.manifest, same_point=keys), "line", sweep.folder
    )
    assert {record.seed for record in found.values()} == {1}


def test_nothing_is_measured_without_a_reference_or_a_candidate(sweep):
    no_reference = changed(sweep, "fp32", status="diverged")
    assert probe_models(sweep.grid, sweep.manifest, no_reference) == {}
    crashed = changed(sweep, "bf16", status="crashed")
    assert set(probe_models(sweep.grid, sweep.manifest, crashed)["line"]) == {"fp16"}
    only_reference = [r for r in sweep.records if r.policy in ("fp32", "fp32_twin")]
    assert probe_models(sweep.grid, sweep.manifest, only_reference) == {}


def test_what_is_stored_is_not_measured_again(sweep, monkeypatch, capsys):
    keys = probe_models(sweep.grid, sweep.manifest, sweep.records)
    capsys.readouterr()

    def measures_again(workload, candidates, *args, **kwargs):
        raise RuntimeError(",".join(p.name for p in candidates))

    monkeypatch.setattr(same_point_stage, "measure_same_point", measures_again)
    assert probe_models(sweep.grid, sweep.manifest, sweep.records) == keys
    assert capsys.readouterr() == ("", "")
    record_path(sweep.folder, keys["line"]["fp16"]).write_text("{")
    # A failure of the stage costs a warning, never what was trained.
    assert probe_models(sweep.grid, sweep.manifest, sweep.records) == keys
    assert "RuntimeError('fp16')" in capsys.readouterr().err


def test_a_broken_record_is_set_aside(sweep, capsys):
    keys = probe_models(sweep.grid, sweep.manifest, sweep.records)
    record_path(sweep.folder, keys["line"]["fp16"]).write_text("{")
    manifest = dataclasses.replace(sweep.manifest, same_point=keys)
    assert set(same_point_records(manifest, "line", sweep.folder)) == {"bf16"}
    assert "set aside" in capsys.readouterr().err
    assert same_point_records(manifest, "another", sweep.folder) == {}
    assert same_point_records(sweep.manifest, "line", sweep.folder) == {}


def test_the_key_holds_what_changes_the_numbers():
    policy, settings = PrecisionPolicy(name="a", compute_format="bf16"), GradientErrorConf()
    key = record_key("run", policy, settings)
    assert key == record_key("run", dataclasses.replace(policy, name="b"), settings)
    assert key == record_key("run", policy, GradientErrorConf(enabled=False))
    others = {
        record_key("other", policy, settings),
        record_key("run", dataclasses.replace(policy, fp32_ops=("softmax",)), settings),
        record_key("run", policy, GradientErrorConf(batches=8)),
        record_key("run", policy, GradientErrorConf(points=[0.5])),
    }
    assert len(others | {key}) == 5


def test_the_conclusion_judges_by_it_and_keeps_a_copy(sweep, monkeypatch):
    keys = probe_models(sweep.grid, sweep.manifest, sweep.records)
    manifest = dataclasses.replace(sweep.manifest, same_point=keys)
    manifests.write(manifest, sweep.folder)
    stored = manifests.read(sweep.folder, "probed")
    assert stored.same_point == keys
    seen = {}
    analyze = conclusions.analyze_model

    def noting(records, **kwargs):
        seen.update(kwargs["same_point"])
        return analyze(records, **kwargs)

    monkeypatch.setattr(conclusions, "analyze_model", noting)
    done = conclude(stored, sweep.records, rule=DecisionRule(), output_dir=sweep.folder)
    assert done.failures == {}
    assert set(seen) == {"bf16", "fp16"}
    copies = {path.stem for path in (done.reports["line"] / "same_point").iterdir()}
    assert copies == {"bf16", "fp16"}
