"""Round trips through a real SQLite store: what was logged is what is there, once."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from harness.runs.record import CrashReport, RunRecord
from harness.tracking import content
from harness.tracking import store as store_module
from harness.tracking.location import Store, StoreUnreachable, opened, resolve_store
from harness.tracking.store import (
    comparison_links,
    fetch_decision,
    fetch_records,
    known_sweeps,
    log_record,
    log_report,
    prepare,
)

Make = Callable[..., tuple[RunRecord, Path]]


def _runs(store: Store, sweep_id: str) -> list:
    with opened(store) as client:
        ids = [e.experiment_id for e in client.search_experiments()]
        return list(client.search_runs(ids, f"tags.sweep_id = '{sweep_id}'"))


def test_a_logged_run_is_there_with_everything(store: Store, stored: Make) -> None:
    record, path = stored("fp16", 3)
    run_id = log_record(store, record, path, experiment="toy", sweep_id="whole")
    (run,) = _runs(store, "whole")
    assert run.info.run_id == run_id
    assert run.info.run_name == "fp16 seed 3"
    assert run.info.status == "FINISHED"
    assert run.data.params == content.params(record)
    assert content.tags(record, sweep_id="whole").items() <= run.data.tags.items()
    with opened(store) as client:
        for name in {name for name, _, _ in content.points(record)}:
            expected = [(s, v) for n, s, v in content.points(record) if n == name]
            history = client.get_metric_history(run_id, name)
            assert sorted((m.step, m.value) for m in history) == expected
    (back,) = fetch_records(store, sweep_id="whole")
    assert back == record


def test_the_run_has_its_own_times(store: Store, stored: Make) -> None:
    record, path = stored(wall_time_s=30.0)
    log_record(store, record, path, experiment="toy", sweep_id="times")
    (run,) = _runs(store, "times")
    assert run.info.end_time - run.info.start_time == pytest.approx(30_000, abs=1)
    assert run.info.end_time == pytest.approx(1000 * path.stat().st_mtime, abs=1)


def test_logging_again_leaves_the_complete_copy(store: Store, stored: Make) -> None:
    record, path = stored()
    first = log_record(store, record, path, experiment="toy", sweep_id="again")
    assert log_record(store, record, path, experiment="toy", sweep_id="again") == first
    assert len(_runs(store, "again")) == 1


def test_a_run_shared_by_two_sweeps_is_in_both(store: Store, stored: Make) -> None:
    record, path = stored()
    one = log_record(store, record, path, experiment="toy", sweep_id="shared-1")
    two = log_record(store, record, path, experiment="toy", sweep_id="shared-2")
    assert one != two


def test_a_changed_record_replaces_its_copy(store: Store, stored: Make) -> None:
    record, path = stored()
    old = log_record(store, record, path, experiment="toy", sweep_id="changed")
    record, path = stored(wall_time_s=9.0)
    new = log_record(store, record, path, experiment="toy", sweep_id="changed")
    assert [run.info.run_id for run in _runs(store, "changed")] == [new]
    assert new != old


@pytest.mark.parametrize("stop_at", ["log_batch", "log_artifact", "set_tag"])
def test_a_copy_cut_short_anywhere_is_replaced(
    store: Store, stored: Make, monkeypatch: pytest.MonkeyPatch, stop_at: str
) -> None:
    from mlflow.tracking import MlflowClient

    record, path = stored()
    sweep_id = f"cut-{stop_at}"

    def stop(*_: object, **__: object) -> None:
        raise ConnectionResetError("the server went away\nlong explanation")

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, stop_at, stop)
        with pytest.raises(StoreUnreachable, match=r"the server went away$"):
            log_record(store, record, path, experiment="toy", sweep_id=sweep_id)
    assert fetch_records(store, sweep_id=sweep_id) == []  # half a copy is none
    new = log_record(store, record, path, experiment="toy", sweep_id=sweep_id)
    assert [run.info.run_id for run in _runs(store, sweep_id)] == [new]
    assert fetch_records(store, sweep_id=sweep_id) == [record]


def test_crashed_and_diverged_runs(store: Store, stored: Make) -> None:
    crash = CrashReport(
        kind="RuntimeError",
        message="boom",
        sentence="boom in blocks.0",
        step=3,
        module="blocks.0",
        traceback="...",
    )
    crashed, path = stored("bf16", 1, status="crashed", crash=crash, series={}, sampled={})
    log_record(store, crashed, path, experiment="toy", sweep_id="bad")
    loss = (2.0, math.nan, math.inf)
    diverged, path = stored("fp16", 2, status="diverged", series={"loss": loss})
    log_record(store, diverged, path, experiment="toy", sweep_id="bad")
    runs = {run.data.tags["policy"]: run for run in _runs(store, "bad")}
    assert runs["bf16"].info.status == "FAILED"
    assert runs["bf16"].data.tags["status"] == "crashed"
    assert runs["bf16"].data.tags["crash"] == "boom in blocks.0"
    assert runs["fp16"].info.status == "FINISHED"
    assert runs["fp16"].data.tags["status"] == "diverged"
    assert runs["fp16"].data.metrics["first_nonfinite_step"] == 1.0
    assert runs["fp16"].data.metrics["loss/train"] == 2.0  # no 1.8e308 of an infinity
    back = fetch_records(store, sweep_id="bad")
    assert [r.policy for r in back] == ["bf16", "fp16"]  # both are read back, crash and all
    assert back[0] == crashed
    assert math.isnan(back[1].series["loss"][1])


def test_fetching_can_be_limited_to_a_model(store: Store, stored: Make) -> None:
    record, path = stored()
    log_record(store, record, path, experiment="toy", sweep_id="two-models")
    other, path = stored("fp16", workload="other")
    log_record(store, other, path, experiment="other", sweep_id="two-models")
    assert len(fetch_records(store, sweep_id="two-models")) == 2
    assert fetch_records(store, sweep_id="two-models", experiment="other") == [other]
    assert fetch_records(store, sweep_id="two-models", experiment="unknown") == []
    assert fetch_records(store, sweep_id="unknown") == []


def test_an_unreadable_artifact_names_its_run(store: Store, stored: Make) -> None:
    record, path = stored()
    path.write_text("{}")
    run_id = log_record(store, record, path, experiment="toy", sweep_id="unreadable")
    with pytest.raises(ValueError, match=run_id):
        fetch_records(store, sweep_id="unreadable")


def test_known_sweeps_newest_first(store: Store, stored: Make) -> None:
    import os

    record, path = stored()
    for sweep_id, when in (("newer", 4_000_000_001), ("older", 4_000_000_000)):
        os.utime(path, (when, when))
        log_record(store, record, path, experiment="toy", sweep_id=sweep_id)
    assert known_sweeps(store)[:2] == ["newer", "older"]


def test_an_experiment_deleted_in_the_ui_comes_back(store: Store, stored: Make) -> None:
    record, path = stored(workload="deleted")
    prepare(store, ["deleted"])
    with opened(store) as client:
        client.delete_experiment(client.get_experiment_by_name("deleted").experiment_id)
    log_record(store, record, path, experiment="deleted", sweep_id="deleted")
    assert fetch_records(store, sweep_id="deleted") == [record]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    folder = tmp_path / "report"
    (folder / "figures").mkdir(parents=True)
    (folder / "report.html").write_text("<p>report</p>")
    (folder / "decision.json").write_text("{}")
    (folder / "figures" / "loss.svg").write_text("<svg/>")
    return folder


def test_the_report_is_a_run_of_its_own_and_is_replaced(store: Store, report: Path) -> None:
    old = log_report(store, experiment="toy", sweep_id="rep", folder=report, markdown="# Old")
    new = log_report(store, experiment="toy", sweep_id="rep", folder=report, markdown="# New")
    (run,) = _runs(store, "rep")
    assert run.info.run_id == new != old
    assert run.data.tags["kind"] == "report"
    assert run.data.tags["mlflow.note.content"] == "# New"
    assert fetch_records(store, sweep_id="rep") == []  # a report is not a run to analyze
    assert "rep" not in known_sweeps(store)
    with opened(store) as client:
        names = {artifact.path for artifact in client.list_artifacts(new)}
        figures = [artifact.path for artifact in client.list_artifacts(new, "figures")]
    assert names == {"report.html", "decision.json", "figures"}
    assert figures == ["figures/loss.svg"]


def test_the_decision_of_a_sweep_is_that_of_its_report(store: Store, report: Path) -> None:
    assert fetch_decision(store, sweep_id="decided") == {}
    for looks in ([3], [3, 5]):
        (report / "decision.json").write_text(json.dumps({"plan": {"looks": looks}}))
        log_report(store, experiment="toy", sweep_id="decided", folder=report, markdown="#")
    assert fetch_decision(store, sweep_id="decided") == {"plan": {"looks": [3, 5]}}


def test_links(store: Store, stored: Make) -> None:
    record, path = stored()
    log_record(store, record, path, experiment="toy", sweep_id="it's")
    links = comparison_links(store, "toy", "it's")
    assert links["ui_command"].endswith(f"ui --backend-store-uri '{store.uri}'")  # it has a space
    page = urlsplit(links["url"])
    assert f"{page.scheme}://{page.netloc}" == "http://127.0.0.1:5000"
    route, _, query = page.fragment.partition("?")
    with opened(store) as client:
        experiment = client.get_experiment_by_name("toy")
    assert route == f"/experiments/{experiment.experiment_id}/runs"
    values = parse_qs(query)
    assert values["compareRunsMode"] == ["CHART"]
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{values['viewStateShareKey'][0]}"])
    assert view["runsHiddenMode"] == "SHOW_ALL"
    with opened(store) as client:  # the filter of the page finds the run
        found = client.search_runs([experiment.experiment_id], view["searchFilter"])
    assert [run.data.tags["run_key"] for run in found] == [record.run_key]


def test_links_of_an_unknown_experiment_still_say_how_to_look(store: Store) -> None:
    assert comparison_links(store, "never run", "s")["url"] == "http://127.0.0.1:5000"


def _log(store: Store, record: RunRecord, path: Path) -> None:
    log_record(store, record, path, experiment="toy", sweep_id="parallel")


@pytest.mark.slow
def test_several_processes_log_at_once(store: Store, stored: Make) -> None:
    context = multiprocessing.get_context("spawn")
    made = [stored("bf16", seed) for seed in range(3)]
    workers = [context.Process(target=_log, args=(store, *one)) for one in made]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
        assert worker.exitcode == 0
    assert fetch_records(store, sweep_id="parallel") == [record for record, _ in made]


@pytest.mark.slow
def test_several_processes_may_prepare_one_new_database(tmp_path: Path) -> None:
    # Without the lock all of them fail and the file is beyond repair.
    store = resolve_store(None, tmp_path)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=prepare, args=(store, ["a", "b"])) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
        assert worker.exitcode == 0
    with opened(store) as client:
        assert {"a", "b"} <= {e.name for e in client.search_experiments()}


def test_an_unwritable_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnreachable, match="file"):
        prepare(resolve_store(None, tmp_path / "file" / "below"), ["toy"])


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count what goes into each request."""
    from mlflow.tracking import MlflowClient

    sizes: list[int] = []
    real = MlflowClient.log_batch

    def counted(self: MlflowClient, run_id: str, metrics=(), params=(), **more: object) -> None:
        sizes.append(len(metrics) + len(params))
        real(self, run_id, metrics=metrics, params=params, **more)

    monkeypatch.setattr(MlflowClient, "log_batch", counted)
    return sizes


def test_points_go_in_batches(store: Store, stored: Make, watched: list[int]) -> None:
    series = {"loss": tuple(float(k) for k in range(2500))}
    record, path = stored(series=series, sampled={}, held_out=None, peak_memory_bytes=None)
    record = dataclasses.replace(record, num_steps=2500)
    log_record(store, record, path, experiment="toy", sweep_id="batches")
    assert max(watched) == store_module._POINTS_PER_BATCH
    num_batches = math.ceil(len(content.params(record)) / store_module._PARAMS_PER_BATCH) + 3
    assert len(watched) == num_batches
    with opened(store) as client:
        (run,) = _runs(store, "batches")
        assert len(client.get_metric_history(run.info.run_id, "loss/train")) == 2500
