"""A worker leaves out a run that can change nothing, and only such a run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from factories import POLICIES, crashed, diverged, make_record

from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan
from harness.config import (
    LaunchConf,
    ProbesConf,
    RunConfig,
    ThroughputConf,
    TrackingConf,
    TrainConf,
)
from harness.experiment import job
from harness.experiment import manifest as manifests
from harness.experiment.job import progress_folder, run_folder, run_job
from harness.experiment.manifest import Manifest, PlannedRun, workload_choice
from harness.experiment.seed_plans import plan_mapping
from harness.experiment.sparing import reason_to_spare
from harness.progress import read_beats
from harness.runs.record import RECORD_FILE, RunRecord, write_record

RULE = DecisionRule()
WORKLOAD = {"kind": "toy"}


def config(folder: Path, policy: str, seed: int) -> RunConfig:
    return RunConfig(
        action="run",
        device="cpu",
        output_dir=folder,
        sweep_id="s",
        reference="fp32",
        seed=seed,
        dry_run=False,
        workload=WORKLOAD,
        policy={**POLICIES[policy].content(), "name": policy, "description": ""},
        train=TrainConf(),
        probes=ProbesConf(),
        decision=RULE.as_mapping(),
        throughput=ThroughputConf(),
        tracking=TrackingConf(enabled=False),
        launch=LaunchConf(),
    )


def sweep(folder: Path, seeds_given: int | None = None) -> Manifest:
    plan = SeedPlan.of(RULE, seeds_given=seeds_given)
    manifest = Manifest(
        sweep_id="s",
        sweep="precision",
        command="python -m harness",
        device="cpu",
        reference="fp32",
        runs=tuple(
            PlannedRun(
                run_key=f"{policy}-{seed}",
                workload="toy",
                choice=workload_choice(WORKLOAD),
                policy=policy,
                seed=seed,
            )
            for policy in ("fp32", "fp32_twin", "bf16")
            for seed in range(plan.max_pairs)
        ),
        descriptions={},
        decision=RULE.as_mapping(),
        plan=plan_mapping(plan, seeds_given=seeds_given),
        created_at=manifests.now(),
    )
    manifests.write(manifest, folder)
    return manifest


def store(folder: Path, record: RunRecord) -> Path:
    where = run_folder(folder, f"{record.policy}-{record.seed}")
    write_record(record, where)
    return where / RECORD_FILE


def spared(folder: Path, manifest: Manifest, policy: str, seed: int) -> str | None:
    planned = manifest.find(workload_choice(WORKLOAD), policy, seed)
    assert planned is not None
    return reason_to_spare(config(folder, policy, seed), manifest, planned)


@pytest.fixture
def overflowed(tmp_path: Path) -> Path:
    """Return a folder in which bf16 failed on seed 0, and so did nobody else."""
    store(tmp_path, make_record("fp32", 0))
    store(tmp_path, diverged(make_record("bf16", 0)))
    return tmp_path


def test_after_a_failure_no_further_seed_is_started(overflowed: Path) -> None:
    manifest = sweep(overflowed)
    for seed in (1, 2, 7):
        assert "not finite" in (spared(overflowed, manifest, "bf16", seed) or "")


def test_a_fixed_plan_does_all_its_runs(overflowed: Path) -> None:
    assert spared(overflowed, sweep(overflowed, 3), "bf16", 1) is None


def test_reference_and_control_are_always_done(tmp_path: Path) -> None:
    store(tmp_path, make_record("fp32", 0))
    store(tmp_path, diverged(make_record("fp32_twin", 0)))
    manifest = sweep(tmp_path)
    assert spared(tmp_path, manifest, "fp32_twin", 1) is None
    store(tmp_path, diverged(make_record("fp32", 0)))
    assert spared(tmp_path, manifest, "fp32", 1) is None


def test_a_sound_policy_goes_on(tmp_path: Path) -> None:
    for policy in ("fp32", "bf16"):
        store(tmp_path, make_record(policy, 0))
    assert spared(tmp_path, sweep(tmp_path), "bf16", 1) is None


def test_a_crash_counts_in_the_command_that_saw_it_only(tmp_path: Path) -> None:
    store(tmp_path, make_record("fp32", 0))
    manifest = sweep(tmp_path)
    path = store(tmp_path, crashed(make_record("bf16", 0)))
    assert spared(tmp_path, manifest, "bf16", 1) is not None
    # Seed 0 itself is tried again, and until it has been nothing is left out for it.
    assert spared(tmp_path, manifest, "bf16", 0) is None
    long_ago = time.time() - 1000
    os.utime(path, (long_ago, long_ago))
    assert spared(tmp_path, manifest, "bf16", 1) is None


def test_gross_degradation_spares_nothing_before_every_seed_of_the_look_has_run(
    tmp_path: Path,
) -> None:
    manifest = sweep(tmp_path)
    for seed in (0, 1, 2):
        store(tmp_path, make_record("fp32", seed))
    for seed in (0, 1):
        store(tmp_path, make_record("bf16", seed, offset=1.0))
    assert spared(tmp_path, manifest, "bf16", 2) is None


def test_the_worker_says_so_and_trains_nothing(
    overflowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_training(*args: Any) -> None:
        raise AssertionError("this run can change nothing")

    sweep(overflowed)
    monkeypatch.setattr(job, "_train", no_training)
    run_job(config(overflowed, "bf16", 1))
    (beat,) = read_beats(progress_folder(overflowed, "s"))
    assert (beat.status, beat.label) == ("spared", "toy bf16 seed 1")
    assert "seed 0" in beat.note
    assert not run_folder(overflowed, "bf16-1").exists()
