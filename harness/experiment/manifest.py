"""The list of runs that one sweep consists of, stored so that workers and reports agree on it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.config import ConfigError
from harness.runs.record_files import write_atomically

SCHEMA_VERSION = 2
# The first had no plan of seeds: all its runs were judged at once.
READABLE_VERSIONS = (1, SCHEMA_VERSION)
LATEST = "latest"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of the sweep and where its record lies (`runs/<run_key>/`).

    Attributes:
        run_key: Hash of everything that can change its numbers.
        workload: Model name.
        choice: Hash of the composed `workload` settings, by which a worker finds its run without
            building the workload.
        policy: Policy name.
        seed: Its seed.
    """

    run_key: str
    workload: str
    choice: str = ""
    policy: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one sweep consists of.

    Attributes:
        command: The command line that asked for it.
        device: `cpu` or `cuda`.
        reference: Name of the reference policy.
        runs: Every run that there may be, in grid order; with looks not all of them are started.
        descriptions: Policy name -> its one-sentence description.
        skipped: Sentences on runs that were left out on purpose.
        caveats: Model name -> notes of the preflight.
        decision: The decision settings of the command.
        same_point: Model name -> policy name -> key of its same-point record.
        plan: How many seeds, and when they are judged: `kind`, `looks`, `alphas` as the sweep was
            run, and `seeds_given` (null where the looks were left to `decision`), from which
            `seed_plans.plan_of` makes it again. Empty in what earlier versions wrote.
        fallbacks: Model name -> policy that was added to the grid by itself -> the failed policy
            that it was tried for.
        completed_at: ISO time (UTC) of the last completion; None while unfinished.
    """

    schema_version: int = SCHEMA_VERSION
    sweep_id: str
    sweep: str
    command: str
    device: str
    reference: str
    runs: tuple[PlannedRun, ...]
    descriptions: dict[str, str]
    skipped: tuple[str, ...] = ()
    caveats: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    decision: dict[str, Any] = dataclasses.field(default_factory=dict)
    same_point: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)
    fallbacks: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    created_at: str = ""
    completed_at: str | None = None

    @property
    def models(self) -> list[str]:
        """Model names in grid order."""
        return list(dict.fromkeys(run.workload for run in self.runs))

    def policies(self, model: str) -> list[str]:
        """Policy names of one model in grid order."""
        return list(dict.fromkeys(r.policy for r in self.runs if r.workload == model))

    def seeds(self, model: str) -> list[int]:
        """Seeds of one model in grid order."""
        return list(dict.fromkeys(r.seed for r in self.runs if r.workload == model))

    def find(self, choice: str, policy: str, seed: int) -> PlannedRun | None:
        """Return the planned run, or None if the sweep left it out."""
        wanted = (choice, policy, seed)
        return next((r for r in self.runs if (r.choice, r.policy, r.seed) == wanted), None)


def workload_choice(settings: Mapping[str, Any]) -> str:
    """Return 8 hex digits of composed workload settings."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def grid_hash(run_keys: Sequence[str]) -> str:
    """Return 8 hex digits that depend on which runs a grid holds, not on their order."""
    return hashlib.sha256("\n".join(sorted(run_keys)).encode()).hexdigest()[:8]


def folder(output_dir: Path) -> Path:
    """Return where the manifests of an output folder lie."""
    return output_dir / "runs" / "sweeps"


def write(manifest: Manifest, output_dir: Path) -> Path:
    """Store the manifest atomically."""
    where = folder(output_dir)
    where.mkdir(parents=True, exist_ok=True)
    path = where / f"{manifest.sweep_id}.json"
    write_atomically(path, json.dumps(dataclasses.asdict(manifest), indent=1))
    return path


def completed(manifest: Manifest) -> Manifest:
    """Return the manifest stamped with the current time."""
    return dataclasses.replace(manifest, completed_at=now())


def now() -> str:
    """Return the current UTC time as ISO text."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def read(output_dir: Path, sweep_id: str) -> Manifest:
    """Read the manifest of a sweep; `latest` means the newest by completion.

    Raises:
        ConfigError: There is no such sweep; the message lists those that exist.
    """
    manifests = read_all(output_dir)
    if sweep_id == LATEST:
        done = [m for m in manifests if m.completed_at is not None]
        if not done:
            raise ConfigError(f"sweep_id=latest: no completed sweep in {folder(output_dir)}")
        return max(done, key=lambda m: m.completed_at or "")
    for manifest in manifests:
        if manifest.sweep_id == sweep_id:
            return manifest
    known = ", ".join(m.sweep_id for m in manifests) or "none"
    raise ConfigError(f"sweep_id={sweep_id}: no such sweep in {folder(output_dir)}; known: {known}")


def read_all(output_dir: Path) -> list[Manifest]:
    """Return every readable manifest, ordered by name."""
    return [
        manifest
        for path in sorted(folder(output_dir).glob("*.json"))
        if (manifest := _from_file(path)) is not None
    ]


def _from_file(path: Path) -> Manifest | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema_version"] not in READABLE_VERSIONS:
            return None
        data["schema_version"] = SCHEMA_VERSION
        data["runs"] = tuple(PlannedRun(**run) for run in data["runs"])
        data["skipped"] = tuple(data["skipped"])
        return Manifest(**data)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a foreign file in the folder is not a sweep
