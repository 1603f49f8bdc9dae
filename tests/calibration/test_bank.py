"""The bank: what is stored is what was trained; a kill loses nothing, nothing stale is seen."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bank_processes import session_is_empty, wait_for

from harness.calibration import __main__ as command
from harness.calibration.bank import Bank, record_path, run_key, same_point_path
from harness.calibration.filling import Filled, fill
from harness.calibration.jobs import ARMS_PER_PROBE, Job, make_plan, record_arms
from harness.calibration.training import JobError, Workbench
from harness.calibration.wanted import Wanted, wanted_bank
from harness.runs.record import RunRecord

ARMS = ("fp32", "fp32_noise", "shrunk@a")
HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def _catalogues_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Workers are given this process's path.
    monkeypatch.syspath_prepend(str(HERE))


def wanted(*, num_seeds: int = 2, catalogue: str = "bank_arms", **values) -> Wanted:
    return Wanted(tasks=("apples", "pears"), num_seeds=num_seeds, catalogue=catalogue, **values)


def plan_of(folder: Path, what: Wanted, *, probes: bool = True):
    arms = record_arms(folder, what.tasks, catalogue=what.catalogue)
    return make_plan(wanted_bank(folder, what), arms, num_seeds=what.num_seeds, probes=probes)


def trained_here(folder: Path, what: Wanted) -> list[Job]:
    """Do in this process what is missing, and return it."""
    plan = plan_of(folder, what)
    bench = Workbench(folder, what.catalogue)
    for job in plan.jobs:
        bench.do(job)
    return list(plan.jobs)


def without_clocks(record: RunRecord) -> RunRecord:
    series = {k: v for k, v in record.series.items() if k != "step_time_s"}
    return dataclasses.replace(record, series=series, wall_time_s=0.0, peak_memory_bytes=None)


def everything(folder: Path) -> dict[tuple[str, ...], str]:
    """Return all that a bank holds, as text (NaN is unequal to itself), but for times."""
    bank, found = Bank(folder), {}
    for task in bank.tasks():
        for arm, seeds in bank.records(task).items():
            for seed, record in seeds.items():
                found[task, arm, str(seed)] = without_clocks(record).to_json()
        for arm, probe in bank.same_point(task).items():
            found[task, arm, "probe"] = dataclasses.replace(probe, seconds=0.0).to_json()
    return found


class TestWhatIsRead:
    def test_arms_seeds_and_probes_come_back(self, tmp_path: Path) -> None:
        trained_here(tmp_path, wanted())
        bank = Bank(tmp_path)
        assert bank.tasks() == ("apples", "pears")
        assert bank.arms("apples") == ARMS
        records = bank.records("apples")
        assert {arm: tuple(seeds) for arm, seeds in records.items()} == dict.fromkeys(ARMS, (0, 1))
        for arm, seeds in records.items():
            for seed, record in seeds.items():
                assert (record.workload, record.policy, record.seed) == ("apples", arm, seed)
                assert record.status == "completed"
                assert len(record.series["loss"]) == 30
        assert tuple(bank.same_point("apples")) == ARMS[1:]
        stored = bank.stored_arms("pears")["shrunk@a"]
        assert (stored.kind, stored.family, stored.sentence) == ("fault", "shrunk@a", "a test")
        assert records["fp32"][0].run_key == run_key(bank.stored_arms("apples")["fp32"].key, 0)

    def test_the_fault_is_in_the_run_and_in_its_probe(self, tmp_path: Path) -> None:
        trained_here(tmp_path, wanted(num_seeds=1))
        bank = Bank(tmp_path)
        runs = {arm: seeds[0] for arm, seeds in bank.records("apples").items()}
        # Half of the loss from the same weights and batch; a power of two is exact.
        assert runs["shrunk@a"].series["loss"][0] == 0.5 * runs["fp32"].series["loss"][0]
        prints = {(r.fingerprints.init_sha256, r.fingerprints.batches) for r in runs.values()}
        assert len(prints) == 1
        probe = bank.same_point("apples")["shrunk@a"]
        assert probe.same_trajectory is True
        # Every gradient is half of FP32's: |e|^2 is a quarter of |f|^2.
        for point in probe.points[:-1]:
            assert point.cross == pytest.approx(0.5 * point.self_cross, rel=1e-5)
        assert bank.same_point("apples")["fp32_noise"].points[0].error_sq == 0.0

    def test_only_what_is_selected_counts(self, tmp_path: Path) -> None:
        trained_here(tmp_path, wanted())
        quick = wanted_bank(tmp_path, wanted(num_seeds=1, quick=True))
        assert quick.arms("pears") == ARMS[:2]
        assert [tuple(seeds) for seeds in quick.records("pears").values()] == [(0,), (0,)]
        assert tuple(quick.stored_arms("pears")) == ARMS[:2]
        assert quick.digest("pears") != Bank(tmp_path).digest("pears")
        assert Bank(tmp_path / "nowhere").tasks() == ()

    def test_records_without_a_list_of_arms_are_read_by_folder(self, tmp_path: Path) -> None:
        trained_here(tmp_path, wanted(num_seeds=1))
        (tmp_path / "apples" / "arms.json").unlink()
        assert Bank(tmp_path).arms("apples") == ARMS
        assert Bank(tmp_path).stored_arms("apples") == {}

    def test_shared_series_keep_their_types(self, tmp_path: Path) -> None:
        trained_here(tmp_path, wanted(num_seeds=1))
        records = Bank(tmp_path).records("apples")
        again = RunRecord.from_json(
            record_path(tmp_path, task="apples", arm="fp32", seed=0).read_text(encoding="utf-8")
        )
        read = records["fp32"][0]
        assert read.to_json() == again.to_json()  # 0 and 0.0 differ as text
        other = records["shrunk@a"][0]
        assert other.fingerprints.batches is read.fingerprints.batches
        assert other.series["learning_rate"] is read.series["learning_rate"]


class TestWhatIsTrainedAgain:
    def test_nothing_that_is_stored(self, tmp_path: Path) -> None:
        assert trained_here(tmp_path, wanted())
        assert trained_here(tmp_path, wanted()) == []
        more = trained_here(tmp_path, wanted(num_seeds=3))
        assert {(job.kind, job.seed) for job in more} == {("run", 2)}

    def test_an_arm_that_has_changed(self, tmp_path: Path) -> None:
        trained_here(tmp_path, wanted(num_seeds=1))
        before = everything(tmp_path)
        plan = plan_of(tmp_path, wanted(num_seeds=1, catalogue="changed_bank_arms"))
        assert {(job.kind, job.task, job.arms) for job in plan.jobs} == {
            (kind, task, ("shrunk@a",)) for kind in ("run", "probe") for task in ("apples", "pears")
        }
        # Before it is trained again the old run is not seen.
        assert Bank(tmp_path).arms("apples") == ARMS[:2]
        assert tuple(Bank(tmp_path).same_point("apples")) == ARMS[1:2]
        bench = Workbench(tmp_path, "changed_bank_arms")
        for job in plan.jobs:
            if job.task == "apples":
                bench.do(job)
        record = Bank(tmp_path).records("apples")["shrunk@a"][0]
        reference = Bank(tmp_path).records("apples")["fp32"][0]
        assert record.series["loss"][0] == 0.25 * reference.series["loss"][0]
        after = everything(tmp_path)
        kept = {key for key in before if key[1] != "shrunk@a"}
        assert all(after[key] == before[key] for key in kept)

    def test_code_that_changed_under_way_is_not_stored_as_what_was_planned(
        self, tmp_path: Path
    ) -> None:
        job = plan_of(tmp_path, wanted()).jobs[0]
        with pytest.raises(JobError, match="apples fp32 has changed since the start"):
            Workbench(tmp_path, "bank_arms").do(dataclasses.replace(job, keys=("another",)))
        assert not record_path(tmp_path, task="apples", arm="fp32", seed=0).exists()

    @pytest.mark.parametrize("text", ["", '{"schema_version": 2, "run_key": "', "[]", "{}"])
    def test_what_is_no_record(self, tmp_path: Path, text: str) -> None:
        trained_here(tmp_path, wanted(num_seeds=1))
        before = everything(tmp_path)
        broken = record_path(tmp_path, task="pears", arm="fp32", seed=0)
        broken.write_text(text, encoding="utf-8")
        probe = same_point_path(tmp_path, task="pears", arm="shrunk@a")
        probe.write_text(text, encoding="utf-8")
        plan = plan_of(tmp_path, wanted(num_seeds=1))
        assert plan.num_unreadable == 2
        assert [(job.kind, job.arms) for job in plan.jobs] == [
            ("run", ("fp32",)),
            ("probe", ("shrunk@a",)),
        ]
        aside = broken.with_name("seed-0.json.unreadable")
        assert aside.read_text(encoding="utf-8") == text
        trained_here(tmp_path, wanted(num_seeds=1))
        assert everything(tmp_path) == before

    def test_the_record_of_another_run(self, tmp_path: Path) -> None:
        trained_here(tmp_path, wanted(num_seeds=2))
        zero, one = (record_path(tmp_path, task="pears", arm="fp32", seed=n) for n in (0, 1))
        one.write_bytes(zero.read_bytes())
        assert [job.seed for job in plan_of(tmp_path, wanted(num_seeds=2)).jobs] == [1]
        assert one.with_name("seed-1.json.unreadable").exists()

    def test_foreign_files_are_left_alone(self, tmp_path: Path) -> None:
        trained_here(tmp_path, wanted(num_seeds=1))
        notes = tmp_path / "pears" / "fp32" / "notes.txt"
        notes.write_text("mine", encoding="utf-8")
        (tmp_path / "README").write_text("mine", encoding="utf-8")
        assert plan_of(tmp_path, wanted(num_seeds=1)).jobs == ()
        assert notes.read_text(encoding="utf-8") == "mine"


class TestOrder:
    def test_seed_by_seed_and_references_first(self, tmp_path: Path) -> None:
        plan = plan_of(tmp_path, wanted(num_seeds=3), probes=False)
        seen = [(job.seed, job.task, job.arms[0]) for job in plan.jobs]
        of_a_seed = [
            ("apples", "fp32"),
            ("pears", "fp32"),
            ("apples", "fp32_noise"),
            ("apples", "shrunk@a"),
            ("pears", "fp32_noise"),
            ("pears", "shrunk@a"),
        ]
        assert seen == [(seed, *rest) for seed in range(3) for rest in of_a_seed]

    def test_probes_come_once_their_runs_must_be_there(self, tmp_path: Path) -> None:
        kinds = [(job.kind, job.seed) for job in plan_of(tmp_path, wanted(num_seeds=3)).jobs]
        runs_of_two_seeds = [("run", 0)] * 6 + [("run", 1)] * 6
        assert kinds == [*runs_of_two_seeds, ("probe", 0), ("probe", 0), *[("run", 2)] * 6]

    def test_probes_share_an_fp32_run(self, tmp_path: Path) -> None:
        arms = record_arms(tmp_path, ("apples",), catalogue="bank_arms")["apples"]
        many = {"fp32": arms["fp32"]}
        for n in range(ARMS_PER_PROBE + 1):
            many[f"a{n}"] = dataclasses.replace(arms["fp32_noise"], name=f"a{n}")
        plan = make_plan(Bank(tmp_path), {"apples": many}, num_seeds=1)
        probes = [job for job in plan.jobs if job.kind == "probe"]
        assert [len(job.arms) for job in probes] == [ARMS_PER_PROBE, 1]

    def test_expected_seconds_are_those_of_the_arm_or_of_its_task(self, tmp_path: Path) -> None:
        trained_here(tmp_path, wanted(num_seeds=1))
        for task, arm, seconds in (
            ("apples", "fp32", 2.0),
            ("apples", "fp32_noise", 2.0),
            ("apples", "shrunk@a", 5.0),
            ("pears", "fp32", 7.0),
        ):
            path = record_path(tmp_path, task=task, arm=arm, seed=0)
            fields = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps({**fields, "wall_time_s": seconds}), encoding="utf-8")
        for arm in ARMS[1:]:
            record_path(tmp_path, task="pears", arm=arm, seed=0).unlink()
        plan = plan_of(tmp_path, wanted(num_seeds=2))
        expected = {(j.task, j.arms, j.seed): s for j, s in plan.seconds.items()}
        assert expected["apples", ("shrunk@a",), 1] == 5.0
        assert expected["pears", ("shrunk@a",), 0] == 7.0


def command_line(folder: Path, *arguments: str) -> list[str]:
    code = (
        "import sys; from harness.calibration.__main__ import run; "
        "from harness.calibration.interrupts import answer_interrupts; answer_interrupts(); "
        "sys.exit(run(sys.argv[1:], catalogue='bank_arms'))"
    )
    return [sys.executable, "-c", code, "--bank", str(folder), "--train-only", *arguments]


def started(folder: Path, *arguments: str, pause_s: float = 0.0) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(HERE), str(HERE.parent / "runs")])
    return subprocess.Popen(
        command_line(folder, *arguments),
        env={**os.environ, "PYTHONPATH": path, "BANK_ARMS_PAUSE_S": str(pause_s)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def runs_stored(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/seed-*.json"))


@pytest.mark.slow
class TestWorkers:
    def test_a_kill_loses_what_is_in_hand_and_nothing_else(self, tmp_path: Path) -> None:
        killed, whole = tmp_path / "killed", tmp_path / "whole"
        process = started(killed, "--seeds", "2", "--workers", "2", pause_s=0.3)
        wait_for(lambda: len(runs_stored(killed)) >= 3)
        process.kill()
        process.communicate()
        # Nobody tells them: workers notice, and end after the run in hand.
        wait_for(lambda: session_is_empty(process.pid))
        kept = {path: path.stat().st_mtime_ns for path in runs_stored(killed)}
        assert 3 <= len(kept) < 12
        again = started(killed, "--seeds", "2", "--workers", "2")
        output, errors = again.communicate(timeout=120)
        assert (again.returncode, errors) == (0, "")
        assert f"{len(kept)} runs and probes are stored, {12 - len(kept)} runs" in output
        assert {path: path.stat().st_mtime_ns for path in kept} == kept
        trained_here(whole, wanted())
        # Here without workers: other processes, the same bits.
        assert everything(killed) == everything(whole)
        assert len(everything(whole)) == 12 + 4

    @pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
    def test_an_interruption(self, tmp_path: Path, name: str) -> None:
        process = started(tmp_path, "--seeds", "2", "--workers", "1", pause_s=0.3)
        wait_for(lambda: len(runs_stored(tmp_path)) >= 1)
        os.killpg(process.pid, getattr(signal, name))
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert errors.splitlines() == [
            "interrupted: finished runs are kept, the same command goes on from there"
        ]
        wait_for(lambda: session_is_empty(process.pid), seconds=10)

    def test_a_budget_in_minutes(self, tmp_path: Path) -> None:
        out = io.StringIO()
        none = fill(tmp_path, wanted(), num_workers=1, minutes=0.001, stream=out)
        assert none == Filled(num_done=0, num_left=16, failures=())
        assert runs_stored(tmp_path) == []
        # Time for some of them: each pauses for a second, and 0.8 s are expected of it.
        process = started(tmp_path, "--workers", "1", "--minutes", "0.15", pause_s=1.0)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert 1 <= len(runs_stored(tmp_path)) <= 8
        assert "are left; the same command goes on from there" in output
        rest = fill(tmp_path, wanted(), num_workers=1, minutes=None, stream=out)
        assert rest.num_left == 0
        assert len(runs_stored(tmp_path)) >= 12

    def test_a_job_that_kills_its_worker_costs_itself_only(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        what = wanted(num_seeds=1, catalogue="changed_bank_arms")
        done = fill(tmp_path, what, num_workers=1, minutes=None, stream=io.StringIO())
        assert done.failures == (
            "pears shrunk@a seed 0: its process ended with 7",
            "pears same-point probe of 2 arms: its process ended with 7",
        )
        # Six runs and four probes, but for a run and the two probes that share a process with it.
        assert (done.num_done, done.num_left) == (7, 3)
        assert len(runs_stored(tmp_path)) == 5
        assert "failed: pears shrunk@a seed 0" in capsys.readouterr().err
        assert command.run(
            ["--bank", str(tmp_path), "--train-only", "--seeds", "1", "--workers", "1"],
            catalogue="changed_bank_arms",
        ) == 1  # fmt: skip


class TestBadUsage:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--seeds", "0"], "--seeds: '0' is not allowed; allowed: a whole number >= 1"),
            (["--seeds", "many"], "--seeds: 'many' is not allowed"),
            (["--workers", "-1"], "--workers"),
            (["--minutes", "0"], "--minutes: '0' is not allowed; allowed: minutes > 0"),
            (["--minutes", "nan"], "--minutes: 'nan' is not allowed"),
            (["--tasks", "plums"], "there is no task 'plums'; there are apples, pears"),
            (["--tasks", ","], "--tasks names no task"),
            (["--quick", "--tasks", "pears"], "pears is not in the quick study"),
            (["--nonsense"], "unrecognized arguments: --nonsense"),
            (["--train-only", "--judge-only"], "not allowed with argument"),
            (["--judge-only", "--bank", "nowhere"], "nowhere: there is no such folder"),
            (["--judge-only"], "holds no runs of apples, pears"),
            (["--bank", "file"], "file is a file; it takes a folder"),
            (["--output", "file"], "--output file is a file; it takes a folder"),
        ],
    )
    def test_is_told_in_one_line(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        message: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").touch()
        (tmp_path / "calibration").mkdir()
        assert command.run(arguments, catalogue="bank_arms") == 2
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert line.startswith("error: ")
        assert message in line
        assert captured.out == ""

    def test_help_says_what_the_defaults_are(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            command.run(["--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert "seeds of every arm (default: 24; quick: 10)" in text

    def test_help_loads_no_torch(self) -> None:
        code = (
            "import sys, harness.calibration.__main__ as m\n"
            "try: m.run(['--help'])\nexcept SystemExit: pass\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
