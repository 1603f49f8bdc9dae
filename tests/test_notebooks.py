"""Every notebook script runs on a stored sweep, and every script there is run by a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from factories import make_record

from harness.experiment import manifest as manifests
from harness.experiment.job import run_folder
from harness.experiment.manifest import Manifest, PlannedRun
from harness.runs.record import write_record

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
TESTED = {"explore_sweep.py"}


def test_every_notebook_is_run_here():
    assert {path.name for path in NOTEBOOKS.glob("*.py")} == TESTED


@pytest.mark.slow
def test_explore_sweep_judges_under_two_margins(tmp_path):
    runs = []
    for policy in ("fp32", "bf16"):
        for seed in (0, 1, 2):
            record = make_record(policy, seed)
            write_record(record, run_folder(tmp_path, record.run_key))
            runs.append(
                PlannedRun(
                    run_key=record.run_key, workload=record.workload, policy=policy, seed=seed
                )
            )
    manifest = Manifest(
        sweep_id="stored",
        sweep="precision",
        command="python -m harness +sweep=precision",
        device="cpu",
        reference="fp32",
        runs=tuple(runs),
        descriptions={},
    )
    manifests.write(manifest, tmp_path)
    done = subprocess.run(
        [sys.executable, str(NOTEBOOKS / "explore_sweep.py"), str(tmp_path), "stored"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "6 of 6 runs, 0 unreadable" in done.stdout
    assert "default" in done.stdout
    assert (tmp_path / "reports" / "stored.strict-margin" / "index.html").is_file()
