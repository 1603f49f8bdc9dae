"""The fallback of a failed policy, as a user runs it: fixed plan, looks, and resuming."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import WORKLOADS, succeeded

from harness.experiment import manifest as manifests

pytestmark = pytest.mark.slow

MODEL = "wide_feedforward"  # a product of it overflows in FP16, and is harmless in BF16
GRID = (
    *("+sweep=precision", "workload=custom", f"workload.file={MODEL}.py", "train.steps=60"),
    *("policy=fp32,fp16", "decision.try_fallback=true", "throughput.phase=false"),
    *("tracking.enabled=false", "hydra.launcher.n_jobs=1"),
)


def decision(folder: Path) -> dict[str, Any]:
    """Return the only sweep's verdicts by policy."""
    (path,) = folder.glob(f"reports/*/{MODEL}/decision.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    return {v["policy"]: v for v in data["verdicts"]}


def written(folder: Path) -> dict[str, int]:
    """Return when each record was written, by run key."""
    return {p.parent.name: p.stat().st_mtime_ns for p in folder.glob("runs/*/record.json")}


@pytest.mark.parametrize("plan", ["looks", "fixed"])
def test_the_fallback_is_trained_judged_and_found_again(plan: str, tmp_path: Path) -> None:
    shutil.copy(WORKLOADS / f"{MODEL}.py", tmp_path)
    grid = GRID if plan == "looks" else (*GRID, "decision.seeds=3")
    out = succeeded(tmp_path, *grid).out
    assert "fp16_in_bf16 is tried automatically for fp16" in out
    verdicts = decision(tmp_path)
    assert {name: v["outcome"] for name, v in verdicts.items()} == {
        "fp16": "reject",
        "fp16_in_bf16": "accept",
    }
    assert [v["fallback_of"] for v in verdicts.values()] == [None, "fp16"]
    assert "ended the run after 25 of 60 steps" in verdicts["fp16"]["reasons"][0]["message"]
    assert verdicts["fp16_in_bf16"]["seeds_used"] == [0, 1, 2]
    (manifest,) = manifests.read_all(tmp_path)
    # FP32 and the fallback on three seeds; FP16 once where a gate spares the others.
    expected = {"looks": {"fp32": 3, "fp16": 1, "fp16_in_bf16": 3}}
    expected["fixed"] = {**expected["looks"], "fp16": 3}
    before = written(tmp_path)
    exist = [r.policy for r in manifest.runs if r.run_key in before]
    assert {name: exist.count(name) for name in exist} == expected[plan]

    # As after a kill in the middle of the fallback: its one lost run is trained, nothing else.
    lost = next(r for r in manifest.runs if (r.policy, r.seed) == ("fp16_in_bf16", 1))
    shutil.rmtree(tmp_path / "runs" / lost.run_key)
    succeeded(tmp_path, *grid)
    after = written(tmp_path)
    assert {key for key in after if after[key] != before[key]} == {lost.run_key}
    again = decision(tmp_path)
    assert {name: v["estimates"] for name, v in again.items()} == {
        name: v["estimates"] for name, v in verdicts.items()
    }
    succeeded(tmp_path, "action=report", "sweep_id=latest", "tracking.enabled=false")
    assert decision(tmp_path) == again
