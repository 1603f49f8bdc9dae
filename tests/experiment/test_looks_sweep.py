"""Sweeps in looks, run as a user runs them: which runs exist, what is said, and resuming."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import TIMEOUT_S, WORKLOADS, Done, environment, succeeded

from harness.experiment import manifest as manifests
from harness.runs.record import read_record

pytestmark = pytest.mark.slow

WORKLOAD = WORKLOADS / "wide_product.py"
# FP16 overflows in the first product, BF16 is harmless, three mantissa bits are near the margin.
GRID = (
    *("+sweep=precision", "workload=custom", "workload.file=wide_product.py"),
    *("--config-dir", "mine", "policy=fp32,bf16,e8m3,fp16_unscaled", "probes=none"),
    *("throughput.phase=false", "tracking.enabled=false", "hydra.launcher.n_jobs=1"),
)


def prepared(folder: Path) -> Path:
    shutil.copy(WORKLOAD, folder)
    own = folder / "mine" / "policy" / "e8m3.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("defaults: [bf16, _self_]\nname: e8m3\ncompute_format: e8m3\n")
    return folder


def trained(folder: Path) -> dict[tuple[str, int], int]:
    """Return (policy, seed) -> time of writing of every record of a folder."""
    found = {}
    for path in (folder / "runs").glob("*/record.json"):
        record = read_record(path.parent)
        found[record.policy, record.seed] = path.stat().st_mtime_ns
    return found


def decision(folder: Path) -> dict[str, Any]:
    """Return the newest decision file, without what differs from call to call."""
    manifest = manifests.read(folder, "latest")
    path = folder / "reports" / manifest.sweep_id / "wide_product" / "decision.json"
    return json.loads(path.read_text(encoding="utf-8"))


def without_times(value: Any) -> Any:
    """Return a decision without what two runs of the same numbers need not share."""
    timed = ("memory", "seconds", "_at", "time", "command", "sweep_id", "savings", "diagnostics")
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not any(t in k for t in timed)}
    if isinstance(value, str):  # "which saved about 0.07 s"
        return re.sub(r"about [\d.]+ (s|min|h)\b", "about so long", value)
    return [without_times(v) for v in value] if isinstance(value, list) else value


def seeds_of(folder: Path, policy: str) -> list[int]:
    return sorted(seed for name, seed in trained(folder) if name == policy)


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    folder = prepared(tmp_path_factory.mktemp("adaptive"))
    return folder, succeeded(folder, *GRID)


def test_seeds_are_spent_only_where_they_decide(adaptive):
    folder, done = adaptive
    assert seeds_of(folder, "bf16") == [0, 1, 2]
    assert seeds_of(folder, "e8m3") == list(range(8))
    assert seeds_of(folder, "fp32") == list(range(8))
    verdicts = {v["policy"]: v for v in decision(folder)["verdicts"]}
    assert verdicts["bf16"]["outcome"] == "accept"
    assert verdicts["bf16"]["look"]["stop"] == "accepted"
    assert verdicts["e8m3"]["look"]["index"] == 3
    assert "12 now (look 1 of 3), up to 32 if nobody is settled" in done.out


def test_a_gate_ends_a_policy_after_its_first_seed(adaptive):
    folder, done = adaptive
    assert seeds_of(folder, "fp16_unscaled") == [0]
    (verdict,) = [v for v in decision(folder)["verdicts"] if v["policy"] == "fp16_unscaled"]
    assert (verdict["outcome"], verdict["reasons"][0]["code"]) == ("reject", "NONFINITE")
    assert verdict["look"]["stop"] == "gate"
    assert "fp16_unscaled seed 1  not needed: The loss is not finite at step 0" in done.out


def test_what_each_look_settled_is_said(adaptive):
    _, done = adaptive
    assert "wide_product: bf16 accepted after 3 seeds\n" in done.out
    assert "wide_product: fp16_unscaled rejected after 1 seed: The loss" in done.out
    assert "(2 runs of this look not started)" in done.out
    assert "look 2 of 3, 4 runs: wide_product: e8m3 on seeds 3 and 4" in done.out
    assert "look 3 of 3, 6 runs: wide_product: e8m3 on seeds 5, 6 and 7" in done.out
    # 12 of the first look (2 of them spared), 4, 6.
    assert "22 of 22 runs done, 16 of them before" in done.out


def test_a_repeated_command_replays_its_looks_without_training(adaptive):
    folder, _ = adaptive
    before, old = trained(folder), decision(folder)
    again = succeeded(folder, *GRID)
    assert trained(folder) == before
    assert without_times(decision(folder)) == without_times(old)
    assert "of which 20 are finished and reused" in again.out


def test_a_report_is_the_same_decision(adaptive):
    folder, _ = adaptive
    old = decision(folder)
    shutil.rmtree(folder / "reports")
    succeeded(folder, "action=report", "sweep_id=latest")
    assert without_times(decision(folder)) == without_times(old)
    assert decision(folder)["savings"] == old["savings"]


def test_a_sweep_killed_after_its_first_look_goes_on_from_there(adaptive, tmp_path):
    folder = prepared(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", *GRID],
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + TIMEOUT_S
    while ("fp32", 3) not in trained(folder):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    before = trained(folder)
    assert ("bf16", 3) not in before
    succeeded(folder, *GRID)
    after = trained(folder)
    assert {run: after[run] for run in before} == before
    assert after.keys() == trained(adaptive[0]).keys()
    assert without_times(decision(folder)) == without_times(decision(adaptive[0]))


def test_seeds_by_number_and_by_name_are_one_fixed_plan(adaptive, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(adaptive[0], folder)
    before, found = trained(folder), []
    for seeds in ("decision.seeds=3", "seed=0,1,2"):
        done = succeeded(folder, *GRID, seeds)
        assert "not needed" not in done.out
        assert "look" not in done.out.split("estimate")[0]
        found.append(decision(folder))
    assert without_times(found[0]["verdicts"]) == without_times(found[1]["verdicts"])
    assert found[0]["sweep_id"] == found[1]["sweep_id"]
    assert found[0]["plan"] == found[1]["plan"] == {"kind": "fixed", "looks": [3], "alphas": [0.05]}
    # A fixed plan does all its runs, those too that looks had spared.
    assert seeds_of(folder, "fp16_unscaled") == [0, 1, 2]
    after = trained(folder)
    assert {run: after[run] for run in before} == before
    assert after.keys() - before.keys() == {("fp16_unscaled", 1), ("fp16_unscaled", 2)}


def test_always_valid_looks_after_every_seed(tmp_path):
    folder = prepared(tmp_path)
    grid = [a.replace("e8m3,", "") for a in GRID]
    done = succeeded(folder, *grid, "decision.always_valid=true", "decision.looks=[3,5]",
                   "decision.look_alphas=[0.03,0.02]")  # fmt: skip
    assert "3 to 5: a look after every one" in done.out
    plan = decision(folder)["plan"]
    assert (plan["kind"], plan["looks"]) == ("always_valid", [3, 4, 5])
    num_seeds = len(seeds_of(folder, "bf16"))
    (verdict,) = [v for v in decision(folder)["verdicts"] if v["policy"] == "bf16"]
    assert verdict["look"]["pairs"] == num_seeds == len(seeds_of(folder, "fp32"))
