"""Copies of runs and reports in MLflow, and the way back; local records stay the truth.

A copy is complete when its tag `record_sha256`, written last, equals the hash of the local record;
anything else under the same key (a run cut short by a kill or a dead server) is replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.runs.record import RECORD_FILE, RunRecord
from harness.tracking import content
from harness.tracking.links import ComparisonLinks, comparison_links, quoted
from harness.tracking.location import Store, StoreUnreachable, opened, resolve_store

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

__all__ = [
    "ComparisonLinks",
    "Store",
    "StoreUnreachable",
    "comparison_links",
    "fetch_decision",
    "fetch_records",
    "known_sweeps",
    "log_record",
    "log_report",
    "prepare",
    "resolve_store",
]

# MLflow's limits for one request; larger batches are split by the client anyway.
_POINTS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_COMPLETE_TAG = "record_sha256"
_DESCRIPTION_TAG = "mlflow.note.content"
_SEARCH_PAGE = 1000
# What a report's folder holds for machines.
DECISION_FILE = "decision.json"


def prepare(store: Store, experiments: Sequence[str]) -> None:
    """Create the database and one experiment per model, if they do not exist.

    Call it in the parent before any worker starts: processes that create one SQLite database at
    the same time destroy it. The lock also keeps two sweeps of one folder apart.

    Raises:
        StoreUnreachable: The server does not answer or the database cannot be opened.
    """
    with _creation_lock(store), opened(store) as client:
        for name in experiments:
            _ensure_experiment(client, store, name)


@contextlib.contextmanager
def _creation_lock(store: Store) -> Iterator[None]:
    path = store.sqlite_path
    if path is None:
        # A server creates its own tables; experiments that appear meanwhile are taken as they are.
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock").open("a", encoding="utf-8")
    except OSError as error:
        raise StoreUnreachable(f"tracking store {store.uri}: {error}") from error
    with lock:
        _lock_exclusively(lock.fileno())  # let go when the file closes, also when killed
        yield


def _lock_exclusively(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two sweeps must not create one database at the same time
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _ensure_experiment(client: MlflowClient, store: Store, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        location = None
        if store.artifact_root is not None:
            location = (Path(store.artifact_root) / content.folder_name(name)).as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException:
            # Another process may have been faster; if not, the error stands.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def log_record(
    store: Store, record: RunRecord, record_path: Path, *, experiment: str, sweep_id: str
) -> str:
    """Copy a run into MLflow and return its MLflow run id; a complete copy is left as it is.

    Metrics are written in batches after the run, so training never waits for the store. A crashed
    run gets MLflow's status FAILED, any other FINISHED; the tag `status` says which of
    `completed`, `diverged` and `crashed` it was.

    Args:
        store: From `resolve_store`.
        record: The run.
        record_path: Its stored file, kept as the artifact that the analyzer can read back.
        experiment: Model name; created when missing.
        sweep_id: A run that several sweeps share gets one copy in each.

    Raises:
        StoreUnreachable: The copy could not be completed; calling again replaces what is there.
    """
    if (path := store.sqlite_path) is not None and not path.exists():
        prepare(store, [experiment])  # under the lock: the database must not be created twice
    digest = hashlib.sha256(record_path.read_bytes()).hexdigest()
    with opened(store) as client:
        experiment_id = _ensure_experiment(client, store, experiment)
        old = _search(
            client,
            [experiment_id],
            f"tags.sweep_id = {quoted(sweep_id)} and tags.run_key = {quoted(record.run_key)}",
        )
        for run in old:
            if run.data.tags.get(_COMPLETE_TAG) == digest:
                return str(run.info.run_id)
        run_id = _write_run(client, record, record_path, experiment_id, sweep_id)
        client.set_tag(run_id, _COMPLETE_TAG, digest)
        for run in old:
            client.delete_run(run.info.run_id)
        return run_id


def _write_run(
    client: MlflowClient, record: RunRecord, record_path: Path, experiment_id: str, sweep_id: str
) -> str:
    from mlflow.entities import Metric, Param

    end = record_path.stat().st_mtime
    start = end - record.wall_time_s
    run = client.create_run(
        experiment_id,
        start_time=round(1000 * start),
        tags=content.tags(record, sweep_id=sweep_id),
        run_name=content.run_name(record),
    )
    run_id = str(run.info.run_id)
    try:
        params = iter([Param(key, value) for key, value in content.params(record).items()])
        while batch := list(islice(params, _PARAMS_PER_BATCH)):
            client.log_batch(run_id, params=batch)
        # Step times are known, clock times are not: spread the steps evenly over the run.
        pace = 1000 * record.wall_time_s / max(record.num_steps, 1)
        metrics = (
            Metric(name, value, round(1000 * start + pace * step), step)
            for name, step, value in content.points(record)
        )
        while points := list(islice(metrics, _POINTS_PER_BATCH)):
            client.log_batch(run_id, metrics=points)
        client.log_artifact(run_id, str(record_path))
    except BaseException:
        # Best effort: it may be the store itself that failed.
        with contextlib.suppress(Exception):
            client.set_terminated(run_id, status="FAILED")
        raise
    status = "FAILED" if record.status == "crashed" else "FINISHED"
    client.set_terminated(run_id, status=status, end_time=round(1000 * end))
    return run_id


def log_report(store: Store, *, experiment: str, sweep_id: str, folder: Path, markdown: str) -> str:
    """Store a report as a run of its own and return its MLflow run id.

    The run is tagged `kind=report`; all of `folder` becomes its artifacts and `markdown` its
    description, cut at a line when it is longer than MLflow allows. An earlier report of the same
    sweep is replaced, once the new one is complete.

    Raises:
        StoreUnreachable: The report could not be stored.
    """
    prepare(store, [experiment])
    with opened(store) as client:
        experiment_id = _ensure_experiment(client, store, experiment)
        old = _search(
            client,
            [experiment_id],
            f"tags.sweep_id = {quoted(sweep_id)} and tags.kind = 'report'",
        )
        run = client.create_run(
            experiment_id,
            run_name=f"report {sweep_id}",
            tags={
                "kind": "report",
                "sweep_id": sweep_id,
                "workload": experiment,
                "mlflow.source.name": "harness",
                "mlflow.source.type": "LOCAL",
                _DESCRIPTION_TAG: content.description(markdown),
            },
        )
        run_id = str(run.info.run_id)
        try:
            client.log_artifacts(run_id, str(folder))
        except BaseException:
            with contextlib.suppress(Exception):
                client.set_terminated(run_id, status="FAILED")
            raise
        client.set_terminated(run_id, status="FINISHED")
        for earlier in old:
            client.delete_run(earlier.info.run_id)
        return run_id


def fetch_records(store: Store, *, sweep_id: str, experiment: str | None = None) -> list[RunRecord]:
    """Return the records of a sweep from the artifacts, in the order of workload, policy, seed.

    Args:
        store: From `resolve_store`.
        sweep_id: An unknown one gives an empty list.
        experiment: Only this model; None for all.

    Raises:
        StoreUnreachable: The store does not answer or an artifact is gone.
        ValueError: An artifact is not a record of this release; the message names the run.
    """
    condition = f"tags.sweep_id = {quoted(sweep_id)} and tags.kind = 'run'"
    records = []
    with opened(store) as client, tempfile.TemporaryDirectory() as folder:
        for run in _search(client, _experiment_ids(client, experiment), condition):
            if _COMPLETE_TAG not in run.data.tags:
                continue
            place = Path(folder) / run.info.run_id
            place.mkdir()
            path = Path(client.download_artifacts(run.info.run_id, RECORD_FILE, str(place)))
            try:
                records.append(RunRecord.from_json(path.read_text(encoding="utf-8")))
            except ValueError as error:
                raise ValueError(f"MLflow run {run.info.run_id}: {error}") from None
    return sorted(records, key=lambda r: (r.workload, r.policy, r.seed))


def fetch_decision(store: Store, *, sweep_id: str) -> dict[str, Any]:
    """Return a decision file of the sweep's newest report; empty without one.

    Of a sweep over several models any one: rule, plan and seeds are the same in all.

    Raises:
        StoreUnreachable: The store does not answer or the artifact is gone.
    """
    condition = f"tags.sweep_id = {quoted(sweep_id)} and tags.kind = 'report'"
    with opened(store) as client, tempfile.TemporaryDirectory() as folder:
        found = _search(client, _experiment_ids(client, None), condition)
        if not found:
            return {}
        newest = max(found, key=lambda run: run.info.end_time or 0)
        path = Path(client.download_artifacts(newest.info.run_id, DECISION_FILE, folder))
        data = json.loads(path.read_text(encoding="utf-8"))
    return data if isinstance(data, dict) else {}


def known_sweeps(store: Store) -> list[str]:
    """Return the ids of all sweeps in the store, the one with the newest finished run first.

    Raises:
        StoreUnreachable: The store does not answer.
    """
    with opened(store) as client:
        runs = _search(client, _experiment_ids(client, None), "tags.kind = 'run'")
    newest: dict[str, int] = {}
    for run in runs:
        name = run.data.tags.get("sweep_id", "")
        newest[name] = max(newest.get(name, 0), run.info.end_time or 0)
    return sorted(newest, key=lambda name: newest[name], reverse=True)


def _experiment_ids(client: MlflowClient, experiment: str | None) -> list[str]:
    if experiment is None:
        return [str(e.experiment_id) for e in client.search_experiments()]
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else [str(found.experiment_id)]


def _search(client: MlflowClient, experiment_ids: list[str], condition: str) -> list[Run]:
    if not experiment_ids:
        return []
    found: list[Run] = []
    token = None
    while True:
        page = client.search_runs(
            experiment_ids, condition, max_results=_SEARCH_PAGE, page_token=token
        )
        found.extend(page)
        token = page.token
        if not token:
            return found
