"""A database that another MLflow release has changed is said to be so, not shown as a traceback."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from harness.tracking.location import Store, StoreUnreachable, opened, resolve_store


def test_a_database_of_a_newer_release(store: Store, tmp_path: Path) -> None:
    assert store.sqlite_path is not None
    shutil.copy(store.sqlite_path, tmp_path / "mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("update alembic_version set version_num = 'ffffffffffff'")
    database.close()
    newer = resolve_store(None, tmp_path)
    with pytest.raises(StoreUnreachable, match=r"mlflow\.db") as caught, opened(newer) as client:
        client.search_experiments()
    assert "\n" not in str(caught.value)
