"""One run of a sweep, in whatever process the launcher put it: reuse or train, record, track."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from harness.config import RunConfig
from harness.experiment import manifest as manifests
from harness.experiment.ending import in_run_gate, still_counts
from harness.experiment.manifest import Manifest, PlannedRun
from harness.runs.record import RECORD_FILE, RunRecord, read_record, write_record
from harness.runs.record_files import write_atomically

TRACKED_FILE = "tracked.json"


def run_folder(output_dir: Path, run_key: str) -> Path:
    """Return the folder of one run's record."""
    return output_dir / "runs" / run_key


def finished_record(output_dir: Path, run_key: str) -> RunRecord | None:
    """Return the record of a finished run; None if it is absent, unreadable or of a crash."""
    try:
        record = read_record(run_folder(output_dir, run_key))
    except (FileNotFoundError, ValueError):
        return None
    return None if record.status == "crashed" else record


def run_job(config: RunConfig) -> None:
    """Do one run of the sweep `config.sweep_id`, unless its record is there already.

    What goes wrong in training ends up in the record. Nothing is raised for it, so that the
    other runs of the sweep go on.
    """
    assert config.sweep_id is not None
    manifest = manifests.read(config.output_dir, config.sweep_id)
    choice = manifests.workload_choice(config.workload)
    planned = manifest.find(choice, config.policy["name"], config.seed)
    if planned is None:
        return  # left out on purpose; the plan has said why
    record = finished_record(config.output_dir, planned.run_key)
    reference = _reference_record(config, manifest, choice)
    if record is None or not still_counts(record, in_run_gate(config, reference)):
        folder = progress_folder(config.output_dir, manifest.sweep_id)
        if _is_spared(config, manifest, planned, folder):
            return
        record = _train(config, planned, folder, reference)
    if config.tracking.enabled:
        _track(config, record, manifest.sweep_id)


def _reference_record(config: RunConfig, manifest: Manifest, choice: str) -> RunRecord | None:
    """Return the finished reference run of the same seed, if it is there already."""
    planned = manifest.find(choice, config.reference, config.seed)
    return None if planned is None else finished_record(config.output_dir, planned.run_key)


def _is_spared(config: RunConfig, manifest: Manifest, planned: PlannedRun, progress: Path) -> bool:
    """Return whether a gate has settled the policy, and if so say that this run need not start."""
    from harness.experiment.sparing import reason_to_spare
    from harness.progress import Heartbeat

    why = reason_to_spare(config, manifest, planned)
    if why is not None:
        Heartbeat(progress).spare(planned.run_key, _label(planned), why)
    return why is not None


def _label(planned: PlannedRun) -> str:
    return f"{planned.workload} {planned.policy} seed {planned.seed}"


def progress_folder(output_dir: Path, sweep_id: str) -> Path:
    """Return where workers leave their heartbeats."""
    return output_dir / "runs" / ".progress" / sweep_id


def _train(
    config: RunConfig, planned: PlannedRun, progress: Path, reference: RunRecord | None
) -> RunRecord:
    from harness.experiment.plan import num_steps, num_threads, probe_settings, resolve_device
    from harness.precision.policy import PrecisionPolicy
    from harness.progress import Heartbeat
    from harness.runs.environment import describe_environment
    from harness.runs.trainer import Progress, RunSettings, train
    from harness.runs.triage.finished_run import triaged
    from harness.workloads.registry import make_workload

    workload = make_workload(config.workload)
    device = resolve_device(config.device)
    settings = RunSettings(
        steps=num_steps(config, workload),
        seed=config.seed,
        device=str(device),
        num_threads=num_threads(config, device),
        backend=config.train.backend,
        probes=probe_settings(config.probes),
        tail_evaluations=config.train.tail_evaluations,
        mark_phases=config.probes.profile.nvtx,
    )
    policy = PrecisionPolicy.from_mapping(config.policy)
    heartbeat = Heartbeat(progress)
    label = _label(planned)
    heartbeat.report(planned.run_key, label, 0, settings.steps, None)

    def beat(progress: Progress) -> None:
        heartbeat.report(planned.run_key, label, progress.step, progress.steps, progress.loss)

    def once() -> RunRecord:
        return train(
            workload,
            policy,
            settings,
            run_key=planned.run_key,
            environment=describe_environment(device, num_threads=settings.num_threads),
            on_progress=beat,
            ended_by=in_run_gate(config, reference),
        )

    record = once()
    if record.status == "diverged" and device.type == "cuda":
        record = with_second_try(record, once())
    if config.probes.triage.enabled:
        label = f"{label}, replayed to find what went wrong"
        record = triaged(record, workload, policy, settings, on_progress=beat)
    write_record(record, run_folder(config.output_dir, planned.run_key))
    losses = record.series.get("loss", ())
    heartbeat.finish(planned.run_key, record.status, loss=losses[-1] if losses else None)
    return record


def with_second_try(first: RunRecord, second: RunRecord) -> RunRecord:
    """Return the record of a run that diverged, with a note if a second try did not.

    The first try counts: a policy that fails sometimes fails. Only a GPU is asked twice; on a CPU
    the same run gives the same numbers.
    """
    if second.status != "completed":
        return first
    event = {
        "step": len(first.series.get("loss", ())),
        "kind": "intermittent",
        "message": "the same run, tried once more, finished with finite numbers",
    }
    return dataclasses.replace(first, events=(*first.events, event))


def _track(config: RunConfig, record: RunRecord, sweep_id: str) -> None:
    """Copy the record to the tracking store, once per store and sweep."""
    from harness.tracking.location import resolve_store

    store = resolve_store(config.tracking.uri, config.output_dir)
    folder = run_folder(config.output_dir, record.run_key)
    note = folder / TRACKED_FILE
    copied = json.loads(note.read_text(encoding="utf-8")) if note.exists() else {}
    database = store.sqlite_path
    # A database that was deleted and made anew owes all its copies again.
    made = database.stat().st_ino if database is not None and database.exists() else 0
    key = f"{store.uri} {made} {sweep_id}"
    if record_stamp(folder) == copied.get(key):
        return
    from harness.tracking import spool

    why_not = spool.log_or_spool(
        store,
        record,
        folder / RECORD_FILE,
        experiment=record.workload,
        sweep_id=sweep_id,
        output_dir=config.output_dir,
    )
    if why_not is None:
        write_atomically(note, json.dumps({**copied, key: record_stamp(folder)}))


def record_stamp(folder: Path) -> int:
    """Return the record file's time of writing in nanoseconds: a repeated run has a new one."""
    return (folder / RECORD_FILE).stat().st_mtime_ns
