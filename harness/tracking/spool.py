"""Copies that could not be made: a marker per run, tried again later; training never notices.

A marker names a record that exists anyway, so losing the spool loses nothing but the copy.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.runs.record import RunRecord, read_record
from harness.runs.record_files import write_atomically
from harness.tracking.content import folder_name
from harness.tracking.store import Store, StoreUnreachable, log_record, prepare

FOLDER = Path("runs") / ".spool"


@dataclass(frozen=True, kw_only=True)
class PendingCopy:
    """One copy that is still owed.

    Attributes:
        record: Path of the record file, relative to the output folder where it lies below it, so
            that the folder can be moved.
        experiment: Model name.
        sweep_id: Sweep that the copy belongs to.
        reason: Why it was not made.
    """

    record: str
    experiment: str
    sweep_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What `replay` did.

    Attributes:
        copied: Copies that were made now.
        left: Copies that are still owed.
        reason: Why some are left, in one line; None when none is.
    """

    copied: int
    left: int
    reason: str | None = None


def log_or_spool(
    store: Store,
    record: RunRecord,
    record_path: Path,
    *,
    experiment: str,
    sweep_id: str,
    output_dir: Path,
) -> str | None:
    """Copy a run into MLflow; on failure leave a marker and return the reason in one line.

    Returns:
        None when the copy was made, else why not. Nothing is raised for the store's sake: not even
        a fault of the tracking code may end a training.
    """
    try:
        log_record(store, record, record_path, experiment=experiment, sweep_id=sweep_id)
    except Exception as error:  # noqa: BLE001 - a copy is never worth a run
        reason = _reason(error)
        spool(
            output_dir,
            record_path,
            experiment=experiment,
            sweep_id=sweep_id,
            run_key=record.run_key,
            reason=reason,
        )
        return reason
    _marker(output_dir, sweep_id, record.run_key).unlink(missing_ok=True)
    return None


def spool(
    output_dir: Path,
    record_path: Path,
    *,
    experiment: str,
    sweep_id: str,
    run_key: str,
    reason: str,
) -> Path:
    """Note that the run's copy is owed and return the marker's path; an older marker is replaced.

    Use it directly when the store is known to be away, to spare every run the wait for it.
    """
    path = record_path.resolve()
    root = output_dir.resolve()
    shown = path.relative_to(root) if path.is_relative_to(root) else path
    copy = PendingCopy(
        record=shown.as_posix(), experiment=experiment, sweep_id=sweep_id, reason=reason
    )
    marker = _marker(output_dir, sweep_id, run_key)
    marker.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(marker, json.dumps(asdict(copy), indent=1))
    return marker


def pending(output_dir: Path) -> dict[Path, PendingCopy]:
    """Return the copies that are owed, by marker; a marker that cannot be read is left out."""
    found = {}
    for path in sorted((output_dir / FOLDER).glob("*.json")):
        try:
            found[path] = PendingCopy(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
    return found


def replay(store: Store, output_dir: Path) -> Replay:
    """Try again to make every copy that is owed; stop at the first that shows the store is away.

    A marker whose record is gone or unreadable is dropped: there is nothing left to copy. Like
    `log_or_spool`, it raises nothing for the store's sake.
    """
    owed = pending(output_dir)
    if not owed:
        return Replay(copied=0, left=0)
    copied = done = 0
    reason = None
    try:
        prepare(store, sorted({copy.experiment for copy in owed.values()}))
        for marker, copy in owed.items():
            try:
                _copy(store, output_dir, copy)
                copied += 1
            except StoreUnreachable:
                raise
            except (OSError, ValueError):
                pass  # the record is gone or unreadable
            marker.unlink(missing_ok=True)
            done += 1
    except Exception as error:  # noqa: BLE001 - a copy is never worth a run
        reason = _reason(error)
    return Replay(copied=copied, left=len(owed) - done, reason=reason)


def _copy(store: Store, output_dir: Path, copy: PendingCopy) -> None:
    path = output_dir / copy.record  # an absolute `copy.record` replaces `output_dir`
    log_record(
        store,
        read_record(path.parent),
        path,
        experiment=copy.experiment,
        sweep_id=copy.sweep_id,
    )


def _marker(output_dir: Path, sweep_id: str, run_key: str) -> Path:
    return output_dir / FOLDER / f"{folder_name(sweep_id)}--{folder_name(run_key)}.json"


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
