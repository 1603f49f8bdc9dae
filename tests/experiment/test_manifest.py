"""Manifests: round trip, `latest`, foreign files, and the hash that names a sweep."""

from __future__ import annotations

import dataclasses

import pytest

from harness.config import ConfigError
from harness.experiment import manifest as manifests
from harness.experiment.manifest import Manifest, PlannedRun, grid_hash


def _manifest(sweep_id: str = "precision-0a1b2c3d", **changes: object) -> Manifest:
    values: dict[str, object] = {
        "sweep_id": sweep_id,
        "sweep": "precision",
        "command": "python -m harness +sweep=precision",
        "device": "cpu",
        "reference": "fp32",
        "runs": (
            PlannedRun(run_key="a" * 16, workload="m", choice="x", policy="fp32", seed=0),
            PlannedRun(run_key="b" * 16, workload="m", choice="x", policy="bf16", seed=0),
            PlannedRun(run_key="c" * 16, workload="m", choice="x", policy="fp32", seed=1),
        ),
        "descriptions": {"bf16": "BF16."},
        "skipped": ("m: bf16_fallback skipped",),
        "caveats": {"m": [{"code": "HELDOUT_SMALL", "message": "small"}]},
        "decision": {"alpha": 0.05},
        "created_at": "2026-01-01T00:00:00+00:00",
        "completed_at": "2026-01-02T00:00:00+00:00",
    }
    return Manifest(**{**values, **changes})


def test_round_trip_keeps_every_field(tmp_path):
    written = _manifest()
    manifests.write(written, tmp_path)
    assert manifests.read(tmp_path, written.sweep_id) == written


def test_latest_is_the_newest_completed_one(tmp_path):
    manifests.write(_manifest("first", completed_at="2026-01-05T00:00:00+00:00"), tmp_path)
    manifests.write(_manifest("second", completed_at="2026-01-04T00:00:00+00:00"), tmp_path)
    manifests.write(_manifest("unfinished", completed_at=None), tmp_path)
    assert manifests.read(tmp_path, "latest").sweep_id == "first"


def test_unknown_sweep_lists_the_known_ones(tmp_path):
    manifests.write(_manifest("known"), tmp_path)
    with pytest.raises(ConfigError, match=r"sweep_id=unknown: no such sweep .*known: known"):
        manifests.read(tmp_path, "unknown")


def test_latest_of_nothing_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no completed sweep"):
        manifests.read(tmp_path, "latest")


def test_foreign_files_are_not_sweeps(tmp_path):
    folder = manifests.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "notes.json").write_text("{")
    (folder / "other.json").write_text('{"schema_version": 99}')
    manifests.write(_manifest("known"), tmp_path)
    assert [m.sweep_id for m in manifests.read_all(tmp_path)] == ["known"]


def test_grid_hash_depends_on_members_not_on_order():
    assert grid_hash(["a", "b"]) == grid_hash(["b", "a"])
    assert grid_hash(["a", "b"]) != grid_hash(["a", "c"])
    assert len(grid_hash(["a"])) == 8


def test_axes_and_lookup_follow_the_runs():
    manifest = _manifest()
    assert manifest.models == ["m"]
    assert manifest.policies("m") == ["fp32", "bf16"]
    assert manifest.seeds("m") == [0, 1]
    assert manifest.find("x", "bf16", 0) == manifest.runs[1]
    assert manifest.find("x", "bf16", 1) is None


def test_completion_stamps_only_the_time():
    before = _manifest(completed_at=None)
    after = manifests.completed(before)
    assert after.completed_at is not None
    assert dataclasses.replace(after, completed_at=None) == before
