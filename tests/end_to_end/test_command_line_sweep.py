"""The program as a user runs it: a process in an empty folder, a real store, real exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import TIMEOUT_S, WORKLOADS, Done, command, environment

from harness.experiment.job import finished_record
from harness.report.decision_json import decision_schema
from harness.runs.record import read_record
from harness.tracking.location import opened, resolve_store

pytestmark = pytest.mark.slow

# Two workers; everything else as a user's first sweep has it. The timing stage has its own tests.
SWEEP = (
    *("+sweep=smoke", "workload=custom", "workload.file=tiny.py", "sweep_id=first"),
    *("policy=fp32,fp16,bf16", "train.steps=null", "hydra.launcher.n_jobs=2"),
    "throughput.phase=false",
)
# One process, nothing tracked, for tests that are about something else.
PLAIN = ("workload=custom", "throughput.phase=false", "tracking.enabled=false")


def with_files(folder: Path, *names: str) -> Path:
    for name in names:
        shutil.copy(WORKLOADS / name, folder)
    return folder


def decision(folder: Path, model: str, sweep: str | None = None) -> dict[str, Any]:
    """Return the one decision file of a model, checked against its schema."""
    (path,) = (folder / "reports").glob(f"{sweep or '*'}/{model}/decision.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(decision_schema()).validate(found)
    return found


def verdict(found: dict[str, Any], policy: str) -> dict[str, Any]:
    (one,) = [v for v in found["verdicts"] if v["policy"] == policy]
    return one


def written(folder: Path) -> dict[Path, int]:
    """Return every record of a folder with its time of writing: a trained run has a new one."""
    return {p: p.stat().st_mtime_ns for p in sorted((folder / "runs").glob("*/record.json"))}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A finished sweep with workers and a store; the tests below use it in order."""
    folder = with_files(tmp_path_factory.mktemp("a folder"), "tiny.py")
    return folder, command(folder, *SWEEP)


def test_sweep_ends_with_a_decision(first: tuple[Path, Done]) -> None:
    folder, done = first
    assert done.code == 0, done.err
    found = decision(folder, "tiny", "first")
    assert (found["sweep_id"], found["reference_policy"]) == ("first", "fp32")
    assert [v["policy"] for v in found["verdicts"]] == ["fp16", "bf16"]
    assert {v["outcome"] for v in found["verdicts"]} <= {"accept", "inconclusive"}
    assert found["seeds"] == [0, 1, 2]
    assert set(verdict(found, "bf16")["estimates"]) == {"train", "held_out"}
    assert len(written(folder)) == 9
    # Noted as copied, so that repeating the command does not ask the store once per run.
    assert len(list((folder / "runs").glob("*/tracked.json"))) == 9


def test_sweep_says_what_it_does_and_what_came_out(first: tuple[Path, Done]) -> None:
    folder, done = first
    before, _, after = done.out.partition("9 of 9 runs done")
    for words in ("sweep first", "tiny (40 steps)", "fp32 (reference), fp16, bf16", "0, 1, 2"):
        assert words in before
    assert "2 at a time on cpu" in before
    assert "[9/9]" in before
    report = folder / "reports" / "first" / "tiny" / "report.html"
    for words in ("verdict", "bf16", "Recommendation:", "mlflow ui --backend-store-uri"):
        assert words in after
    assert str(report) in after.replace("\n", "")
    assert "experiments/" in after


def test_report_files(first: tuple[Path, Done]) -> None:
    folder, _ = first
    reports = folder / "reports" / "first"
    page = (reports / "tiny" / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "bf16" in (reports / "tiny" / "report.md").read_text(encoding="utf-8")
    assert "tiny/report.html" in (reports / "index.html").read_text(encoding="utf-8")
    assert list((reports / "tiny" / "figures").glob("*.svg"))


def stored_runs(folder: Path, kind: str) -> list[Any]:
    with opened(resolve_store(None, folder)) as client:
        experiment = client.get_experiment_by_name("tiny")
        assert experiment is not None
        condition = f"tags.kind = '{kind}' and tags.sweep_id = 'first'"
        return list(client.search_runs([experiment.experiment_id], condition))


def test_store_holds_flat_finished_runs(first: tuple[Path, Done]) -> None:
    folder, _ = first
    runs = stored_runs(folder, "run")
    assert len(runs) == 9
    names = {(p, s) for p in ("fp32", "fp16", "bf16") for s in ("0", "1", "2")}
    assert {(r.data.tags["policy"], r.data.tags["seed"]) for r in runs} == names
    for run in runs:
        assert run.info.status == "FINISHED"
        tags = run.data.tags
        assert "mlflow.parentRunId" not in tags
        assert tags["workload"] == "tiny"
        assert tags["status"] == "completed"
        assert tags["execution"] in ("native", "emulated")
        assert (folder / "runs" / tags["run_key"] / "record.json").is_file()
        wanted = {"loss/train", "loss/held_out", "grad_norm/global", "underflow/grad_fp16",
                  "underflow/grad_bf16", "overflow/grad_fp16", "lost_update/bf16",
                  "throughput/samples_per_s", "throughput/step_time_ms"}  # fmt: skip
        assert wanted <= set(run.data.metrics)
        assert run.data.params["policy.name"] == tags["policy"]
    scaled = [r for r in runs if r.data.tags["policy"] == "fp16"]
    assert all({"loss_scale/value", "loss_scale/skipped"} <= set(r.data.metrics) for r in scaled)


def test_store_holds_the_record_and_all_steps(first: tuple[Path, Done]) -> None:
    folder, _ = first
    run = stored_runs(folder, "run")[0]
    record = read_record(folder / "runs" / run.data.tags["run_key"])
    with opened(resolve_store(None, folder)) as client:
        points = client.get_metric_history(run.info.run_id, "loss/train")
        artifacts = [a.path for a in client.list_artifacts(run.info.run_id)]
    assert artifacts == ["record.json"]
    by_step = {p.step: p.value for p in points}
    assert [by_step[k] for k in range(40)] == list(record.series["loss"])


def test_store_holds_the_report(first: tuple[Path, Done]) -> None:
    folder, _ = first
    (report,) = stored_runs(folder, "report")
    assert report.info.status == "FINISHED"
    with opened(resolve_store(None, folder)) as client:
        artifacts = {a.path for a in client.list_artifacts(report.info.run_id)}
    assert {"report.html", "report.md", "decision.json"} <= artifacts
    assert "bf16" in report.data.tags["mlflow.note.content"]


def test_same_command_again_trains_nothing(first: tuple[Path, Done]) -> None:
    folder, _ = first
    before = written(folder)
    old = decision(folder, "tiny", "first")
    again = command(folder, *SWEEP)
    assert again.code == 0, again.err
    assert written(folder) == before
    assert "9 are finished and reused" in again.out
    new = decision(folder, "tiny", "first")
    assert [v["outcome"] for v in new["verdicts"]] == [v["outcome"] for v in old["verdicts"]]
    assert (len(stored_runs(folder, "run")), len(stored_runs(folder, "report"))) == (9, 1)


def test_only_what_is_missing_or_broken_is_trained_again(first: tuple[Path, Done]) -> None:
    folder, _ = first
    before = written(folder)
    gone, broken, cut, *_ = before
    gone.unlink()
    broken.write_text("{}", encoding="utf-8")
    cut.write_text(cut.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    repaired = command(folder, *SWEEP)
    assert repaired.code == 0, repaired.err
    after = written(folder)
    assert {p for p in before if after[p] != before[p]} == {gone, broken, cut}
    for path in (gone, broken, cut):
        assert read_record(path.parent).status == "completed"
    assert len(stored_runs(folder, "run")) == 9


def test_report_of_the_latest_sweep(first: tuple[Path, Done]) -> None:
    folder, _ = first
    before = written(folder)
    shutil.rmtree(folder / "reports")
    done = command(folder, "action=report", "sweep_id=latest")
    assert done.code == 0, done.err
    assert written(folder) == before
    assert len(decision(folder, "tiny", "first")["verdicts"]) == 2


def test_report_from_the_store_alone(first: tuple[Path, Done]) -> None:
    folder, _ = first
    old = decision(folder, "tiny", "first")
    shutil.rmtree(folder / "reports")
    (folder / "runs").rename(folder / "moved away")
    done = command(folder, "action=report", "sweep_id=first")
    assert done.code == 0, done.err
    new = decision(folder, "tiny", "first")
    verdicts = {v["policy"]: v for v in new["verdicts"]}
    for v in old["verdicts"]:
        assert verdicts[v["policy"]]["outcome"] == v["outcome"]
        assert verdicts[v["policy"]]["estimates"] == v["estimates"]


def interrupt(process: subprocess.Popen[str], when: Callable[[], bool]) -> tuple[int, str]:
    """Send Ctrl-C to the whole group, as a terminal does, once `when` holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not when():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def assert_group_ends(group: int) -> None:
    """Fail if a worker outlives the sweep: it would write into the folder of the next one."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"processes of group {group} are still there")


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupted_sweep_goes_on_where_it_stopped(workers: int, tmp_path: Path) -> None:
    folder = with_files(tmp_path, "tiny.py")
    path = folder / "tiny.py"
    text = path.read_text(encoding="utf-8")
    slow = text.replace(
        "        yield x", "        __import__('time').sleep(0.02)\n        yield x"
    )
    path.write_text(slow.replace("held_out", "_held_out"), encoding="utf-8")
    launcher = ["+sweep=smoke", f"hydra.launcher.n_jobs={workers}"] if workers > 1 else []
    arguments = [*launcher, *PLAIN, "workload.file=tiny.py", "policy=fp32,bf16", "seed=0,1"]
    arguments.append("train.steps=40")
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    code, err = interrupt(process, lambda: len(written(folder)) >= 1)
    assert code == 130, err
    assert "same command goes on" in err
    assert_group_ends(process.pid)
    before = written(folder)
    assert 1 <= len(before) < 4
    assert not (folder / "reports").exists() or not list((folder / "reports").rglob("*.json"))
    done = command(folder, *arguments)
    assert done.code == 0, done.err
    after = written(folder)
    assert len(after) == 4
    assert {p: after[p] for p in before} == before
    decision(folder, "tiny")


def test_dry_run_trains_nothing(tmp_path: Path) -> None:
    folder = with_files(tmp_path, "tiny.py")
    done = command(folder, "workload=custom", "workload.file=tiny.py", "dry_run=true")
    assert done.code == 0, done.err
    for words in ("fp32 (reference), bf16", "runs      6", "estimate"):
        assert words in done.out
    assert {path.name for path in folder.iterdir()} <= {"tiny.py", "__pycache__"}


def test_candidate_that_crashes_is_a_verdict(tmp_path: Path) -> None:
    folder = with_files(tmp_path, "unaware_function.py")
    grid = ("policy=fp32,bf16", "seed=0,1,2", "train.steps=60")
    done = command(folder, *PLAIN, "workload.file=unaware_function.py", *grid)
    assert done.code == 0, done.err
    found = decision(folder, "unaware_function")
    bf16 = verdict(found, "bf16")
    assert (bf16["outcome"], bf16["reasons"][0]["code"]) == ("reject", "CRASHED")
    assert "mixing" in bf16["reasons"][0]["message"]
    assert found["chosen_policy"] == "fp32"
    for path in written(folder):
        record = read_record(path.parent)
        finished = finished_record(folder, record.run_key)
        # A crashed run is tried again by the next command, a completed one is not.
        assert (finished is None) == (record.policy == "bf16")


def test_reference_that_crashes_is_exit_code_1(tmp_path: Path) -> None:
    folder = with_files(tmp_path, "tiny.py")
    path = folder / "tiny.py"
    text = path.read_text(encoding="utf-8")
    marked = "        x = torch.randn(32, 4, generator=g)\n"
    loss = "    return F.mse_loss"
    assert (text.count(marked), text.count(loss)) == (1, 1)
    # Later than the steps that are tried before a sweep starts.
    faulty = text.replace(
        marked, f"{marked}        x[0, 0] = 1e6 if steps == 40 and _ == 20 else 0.0\n"
    )
    check = "    if batch[0][0, 0] > 1e5:\n        raise ArithmeticError('planted')\n"
    path.write_text(faulty.replace(loss, f"{check}{loss}"), encoding="utf-8")
    done = command(folder, *PLAIN, "workload.file=tiny.py", "seed=0")
    assert done.code == 1, done.err
    found = decision(folder, "tiny")
    assert found["verdicts"] == []
    assert found["chosen_policy"] is None
    assert "planted" in found["failed"]
    assert "planted" in done.out
    assert all(read_record(p.parent).crash.step == 20 for p in written(folder))


def test_one_pair_says_what_it_can_and_cannot_conclude(tmp_path: Path) -> None:
    small = ("train.steps=25", "workload.num_characters=60000", "workload.num_held_out=32")
    done = command(tmp_path, *small, "throughput.phase=false", "tracking.enabled=false")
    assert done.code == 0, done.err
    found = decision(tmp_path, "char_gpt")
    bf16 = verdict(found, "bf16")
    assert (bf16["outcome"], bf16["reasons"][0]["code"]) == ("inconclusive", "TOO_FEW_SEEDS")
    assert (found["seeds"], found["chosen_policy"]) == ([0], None)
    told = " ".join(done.out.split())
    assert "seed=0,1,2" in told
    assert "No recommendation" in told


def test_server_that_is_away_costs_a_warning(tmp_path: Path) -> None:
    folder = with_files(tmp_path, "tiny.py")
    away = ("workload=custom", "workload.file=tiny.py", "throughput.phase=false", "seed=0")
    done = command(folder, *away, "tracking.uri=http://127.0.0.1:9")
    assert done.code == 0, done.err
    assert "warning" in done.err + done.out
    assert "http://127.0.0.1:9" in done.err
    assert len(written(folder)) == 2
    decision(folder, "tiny")
    # What is owed is noted as such, for the next command that finds a store.
    owed = [path for path in (folder / "runs" / ".spool").rglob("*") if path.is_file()]
    assert len(owed) == 2
    assert not list((folder / "runs").glob("*/tracked.json"))


def test_policy_fields_on_the_command_line(tmp_path: Path) -> None:
    folder = with_files(tmp_path, "tiny.py")
    fields = ("policy=bf16", "policy.fp32_modules=[norm,head]", "policy.name=bf16_norm_head")
    done = command(folder, *PLAIN, "workload.file=tiny.py", *fields, "seed=0")
    assert done.code == 0, done.err
    found = decision(folder, "tiny")
    assert [v["policy"] for v in found["verdicts"]] == ["bf16_norm_head"]
    records = {r.policy: r for r in (read_record(p.parent) for p in written(folder))}
    assert set(records) == {"fp32", "bf16_norm_head"}
    content = records["bf16_norm_head"].policy_content
    assert (content["compute_format"], content["fp32_modules"]) == ("bf16", ["norm", "head"])
    # Of the two linear layers the first alone runs in BF16; the reference is as it was.
    assert records["bf16_norm_head"].audit["addmm"] == {"bf16": 1, "fp32": 1}
    assert records["fp32"].policy_content["fp32_modules"] == []


def test_policy_file_of_the_users_own(tmp_path: Path) -> None:
    folder = with_files(tmp_path, "tiny.py")
    own = folder / "mine" / "policy" / "bf16_head.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(
        "defaults: [bf16, _self_]\nname: bf16_head\nfp32_modules: [head]\n", encoding="utf-8"
    )
    grid = ("--config-dir", "mine", "policy=fp32,bf16,bf16_head", "seed=0")
    done = command(folder, *PLAIN, "workload.file=tiny.py", *grid)
    assert done.code == 0, done.err
    assert [v["policy"] for v in decision(folder, "tiny")["verdicts"]] == ["bf16", "bf16_head"]
    records = {r.policy: r for r in (read_record(p.parent) for p in written(folder))}
    assert records["bf16_head"].policy_content["fp32_modules"] == ["head"]
    assert records["bf16"].policy_content["fp32_modules"] == []
