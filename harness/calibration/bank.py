"""The bank: what was trained for the calibration, on disk and read back; needs no torch.

    <folder>/<task>/arms.json              what the arms were when training last began
    <folder>/<task>/<arm>/seed-<n>.json    a run record, `policy` being the arm's name
    <folder>/<task>/same_point/<arm>.json  its same-point probe

Records are truth and are written atomically. One whose run key is not that of its arm in
`arms.json` is of an arm that has changed since, and is not seen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness.runs.record import RunRecord
from harness.runs.record_files import read_if_there, strict_json, versioned_fields, write_atomically
from harness.runs.same_point.record import SamePointRecord

ARMS_FILE = "arms.json"
SAME_POINT_FOLDER = "same_point"
UNREADABLE_SUFFIX = ".unreadable"
_SCHEMA_VERSION = 1
_NAME = re.compile(r"[a-z0-9_@.-]+")
_SEED_FILE = re.compile(r"seed-(0|[1-9][0-9]*)\.json")

Stored = TypeVar("Stored")


@dataclass(frozen=True, kw_only=True)
class StoredArm:
    """What an arm was when it was trained.

    Attributes:
        name: Of the arm; the `policy` of its records.
        kind: `reference`, `null`, `harmless` or `fault`: what it was planted as.
        family: Of the fault, or of the arm without its dose.
        dose: Empty where there is one dose.
        sentence: What is wrong with it.
        key: Hash of what can change its numbers but the seed: see `jobs.arm_key`.
    """

    name: str
    kind: str
    family: str
    dose: str
    sentence: str
    key: str


def run_key(arm_key: str, seed: int) -> str:
    """Return 16 hex digits for one seed of an arm."""
    return hashlib.sha256(f"{arm_key} {seed}".encode()).hexdigest()[:16]


def record_path(folder: Path, *, task: str, arm: str, seed: int) -> Path:
    """Return where the record of one run lies."""
    return folder / task / arm / f"seed-{seed}.json"


def same_point_path(folder: Path, *, task: str, arm: str) -> Path:
    """Return where the same-point probe of an arm lies."""
    return folder / task / SAME_POINT_FOLDER / f"{arm}.json"


def write_run(folder: Path, record: RunRecord) -> Path:
    """Write a record to its place (folders are created), atomically.

    Without waiting for the disk, which takes 20 ms, thousands of times; what a power failure cuts
    short is found unreadable and trained again.
    """
    path = record_path(folder, task=record.workload, arm=record.policy, seed=record.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, record.to_json(), synced=False)
    return path


def write_probe(folder: Path, record: SamePointRecord, *, key: str) -> Path:
    """Write a same-point probe with the key of the arm that it measured, atomically."""
    path = same_point_path(folder, task=record.workload, arm=record.policy)
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = dataclasses.asdict(record)
    envelope = {"schema_version": _SCHEMA_VERSION, "key": key, "record": fields}
    write_atomically(path, strict_json(envelope))
    return path


def write_arms(folder: Path, task: str, arms: Collection[StoredArm]) -> None:
    """Write what the arms of a task are now, unless the file says so already.

    Raises:
        ValueError: Two arms share a name, or a name is no name for a folder.
    """
    names = [arm.name for arm in arms]
    for name in names:
        if not _NAME.fullmatch(name) or name == SAME_POINT_FOLDER or names.count(name) > 1:
            raise ValueError(f"{task}: {name!r} is no name for an arm, or names two")
    path = folder / task / ARMS_FILE
    text = strict_json(
        {"schema_version": _SCHEMA_VERSION, "arms": [dataclasses.asdict(arm) for arm in arms]},
        indent=1,
    )
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def read_arms(folder: Path, task: str) -> dict[str, StoredArm]:
    """Return the arms of a task by name, the reference first; empty where none are stored.

    Raises:
        ValueError: The file is not one of this release; the message names it.
    """
    found = read_if_there(folder / task / ARMS_FILE, _arms_from)
    return found or {}


def _arms_from(text: str) -> dict[str, StoredArm]:
    fields = versioned_fields(text, kind="list of arms", readable=(_SCHEMA_VERSION,))
    try:
        arms = [StoredArm(**values) for values in fields["arms"]]
    except (TypeError, KeyError) as error:
        raise ValueError(f"list of arms is incomplete: {error}") from None
    return {arm.name: arm for arm in arms}


class Bank:
    """What is stored below a folder; each task is read once, when it is asked for.

    Args:
        folder: Of the bank; it need not exist.
        selection: Task -> arms that count; all by default.
        num_seeds: Only seeds 0 to `num_seeds` - 1 count; all by default.
    """

    def __init__(
        self,
        folder: Path,
        *,
        selection: Mapping[str, Collection[str]] | None = None,
        num_seeds: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._selection, self._num_seeds = selection, num_seeds
        self._records: dict[str, dict[str, dict[int, RunRecord]]] = {}
        # Task -> arm -> (key, probe)
        self._probes: dict[str, dict[str, tuple[str, SamePointRecord]]] = {}
        # Task -> names of files that could not be read.
        self.set_aside: dict[str, list[str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Another process reads the tasks that it needs itself: records are larger than their files.
        return {**vars(self), "_records": {}, "_probes": {}}

    def tasks(self) -> tuple[str, ...]:
        """Return the tasks with a folder that counts, in the selection's order or by name."""
        if self._selection is not None:
            return tuple(task for task in self._selection if (self.folder / task).is_dir())
        if not self.folder.is_dir():
            return ()
        return tuple(sorted(p.name for p in self.folder.iterdir() if _is_named(p)))

    def stored_arms(self, task: str) -> Mapping[str, StoredArm]:
        """Return what the arms that count are; empty for a bank without `arms.json`."""
        arms = read_arms(self.folder, task)
        return {name: arm for name, arm in arms.items() if self._counts(task, name)}

    def arms(self, task: str) -> tuple[str, ...]:
        """Return the arms with at least one record, in the order in which they are defined."""
        return tuple(self.records(task))

    def records(self, task: str) -> Mapping[str, Mapping[int, RunRecord]]:
        """Return arm -> seed -> record, seeds ascending; records of changed arms are not seen.

        A file that is no record of its place is renamed (`.unreadable`) and not seen either.
        """
        if task not in self._records:
            self._records[task] = self._read_records(task)
        return self._records[task]

    def same_point(self, task: str) -> Mapping[str, SamePointRecord]:
        """Return arm -> same-point probe, of the arms that have one."""
        return {name: record for name, (_, record) in self._keyed_probes(task).items()}

    def digest(self, task: str) -> str:
        """Return 16 hex digits over what counts of a task: run keys of records and probes."""
        parts = [
            f"{name} {seed} {record.run_key} {record.status}"
            for name, seeds in self.records(task).items()
            for seed, record in seeds.items()
        ]
        parts += [f"{name} {key}" for name, (key, _) in self._keyed_probes(task).items()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def _counts(self, task: str, arm: str) -> bool:
        return self._selection is None or arm in self._selection.get(task, ())

    def _names(self, task: str) -> tuple[str, ...]:
        names = tuple(read_arms(self.folder, task))
        if not names and (self.folder / task).is_dir():
            folders = (p for p in (self.folder / task).iterdir() if _is_named(p))
            names = tuple(sorted(p.name for p in folders if p.name != SAME_POINT_FOLDER))
        return tuple(name for name in names if self._counts(task, name))

    def _read_records(self, task: str) -> dict[str, dict[int, RunRecord]]:
        known, shared = read_arms(self.folder, task), _Shared()
        found: dict[str, dict[int, RunRecord]] = {}
        for name in self._names(task):
            records = {}
            for seed, path in self._seed_files(task, name):
                record = self._read(path, _record_of(task=task, arm=name, seed=seed))
                if record is None or (known and record.run_key != run_key(known[name].key, seed)):
                    continue
                records[seed] = shared.with_shared_series(record)
            if records:
                found[name] = records
        return found

    def _seed_files(self, task: str, arm: str) -> list[tuple[int, Path]]:
        folder = self.folder / task / arm
        if not folder.is_dir():
            return []
        numbered = [(_SEED_FILE.fullmatch(path.name), path) for path in folder.iterdir()]
        seeds = [(int(match[1]), path) for match, path in numbered if match]
        limit = self._num_seeds
        return sorted((seed, path) for seed, path in seeds if limit is None or seed < limit)

    def _keyed_probes(self, task: str) -> Mapping[str, tuple[str, SamePointRecord]]:
        if task not in self._probes:
            known = read_arms(self.folder, task)
            found = {}
            for name in self._names(task):
                path = same_point_path(self.folder, task=task, arm=name)
                stored = self._read(path, _probe_from)
                if stored is not None and (not known or stored[0] == known[name].key):
                    found[name] = stored
            self._probes[task] = found
        return self._probes[task]

    def _read(self, path: Path, parse: Callable[[str], Stored]) -> Stored | None:
        """Return what a file holds; one that cannot be read is renamed, and None."""
        try:
            return read_if_there(path, parse)
        except ValueError:
            path.replace(path.with_name(path.name + UNREADABLE_SUFFIX))
            task = path.relative_to(self.folder).parts[0]
            self.set_aside.setdefault(task, []).append(str(path.relative_to(self.folder)))
            return None


def _is_named(path: Path) -> bool:
    return path.is_dir() and _NAME.fullmatch(path.name) is not None and path.name[0] != "."


def _record_of(*, task: str, arm: str, seed: int) -> Callable[[str], RunRecord]:
    """Return a parser that refuses the record of another run."""

    def parse(text: str) -> RunRecord:
        record = RunRecord.from_json(text)
        if (record.workload, record.policy, record.seed) != (task, arm, seed):
            raise ValueError("it is the record of another run")
        return record

    return parse


def _probe_from(text: str) -> tuple[str, SamePointRecord]:
    fields = versioned_fields(text, kind="stored probe", readable=(_SCHEMA_VERSION,))
    try:
        return str(fields["key"]), SamePointRecord.from_json(json.dumps(fields["record"]))
    except KeyError as error:
        raise ValueError(f"stored probe is incomplete: {error}") from None


class _Shared:
    """Lets equal series of different records be one tuple: arms share batches and rates.

    Halves the memory of a task with thirty arms.
    """

    def __init__(self) -> None:
        # By type too: 0 equals 0.0, and a checksum is to stay an integer.
        self._known: dict[tuple[type, tuple[Any, ...]], tuple[Any, ...]] = {}

    def with_shared_series(self, record: RunRecord) -> RunRecord:
        prints = dataclasses.replace(
            record.fingerprints,
            batches=self._one(record.fingerprints.batches),
            dropout=self._one(record.fingerprints.dropout),
        )
        series = {
            name: values if name in ("loss", "grad_norm", "step_time_s") else self._one(values)
            for name, values in record.series.items()
        }
        return dataclasses.replace(record, fingerprints=prints, series=series)

    def _one(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._known.setdefault((type(values[0]) if values else int, values), values)
