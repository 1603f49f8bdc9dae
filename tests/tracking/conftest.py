from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from factories import make_record

from harness.runs.record import RunRecord, write_record
from harness.tracking.store import Store, prepare, resolve_store


@pytest.fixture(autouse=True)
def _no_store_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One SQLite store for all tests, as its creation takes seconds; each uses its own sweep id."""
    # A space, as folders have them: the path goes through two kinds of URI.
    made = resolve_store(None, tmp_path_factory.mktemp("a store"))
    prepare(made, ["toy"])
    return made


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., tuple[RunRecord, Path]]:
    """Return a function that makes a record and writes it where a run would."""

    def make(policy: str = "bf16", seed: int = 1, **fields: object) -> tuple[RunRecord, Path]:
        record = dataclasses.replace(make_record(policy, seed, num_steps=20), **fields)
        return record, write_record(record, tmp_path / "runs" / record.run_key)

    return make
