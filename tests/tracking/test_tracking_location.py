"""Which store a URI names, and that one that is away is said to be so, fast."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.tracking.location import Store, StoreUnreachable, opened, resolve_store


def test_default_is_a_file_in_the_output_folder(tmp_path: Path) -> None:
    store = resolve_store(None, tmp_path)
    assert store.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert store.artifact_root == f"{tmp_path}/mlartifacts"
    assert store.sqlite_path == tmp_path / "mlflow.db"


def test_a_relative_output_folder_gives_an_absolute_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_store(None, Path("out")).uri == f"sqlite:///{tmp_path}/out/mlflow.db"


def test_argument_beats_environment_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-environment:5000")
    assert resolve_store("http://given:5000/", tmp_path).uri == "http://given:5000"
    assert resolve_store(None, tmp_path).uri == "http://from-environment:5000"
    assert resolve_store("", tmp_path).uri == "http://from-environment:5000"


def test_relative_sqlite_path_is_made_absolute_with_artifacts_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = resolve_store("sqlite:///all/ml.db", tmp_path / "elsewhere")
    assert store.uri == f"sqlite:///{tmp_path}/all/ml.db"
    assert store.artifact_root == f"{tmp_path}/all/mlartifacts"


@pytest.mark.parametrize(
    ("uri", "is_server", "has_root"),
    [
        ("https://user:secret@tracking.example.org", True, False),
        ("postgresql+psycopg2://user:secret@db/mlflow", False, True),
        ("mysql://db:3306/mlflow", False, True),
    ],
)
def test_other_stores(uri: str, *, is_server: bool, has_root: bool, tmp_path: Path) -> None:
    store = resolve_store(uri, tmp_path)
    assert (store.uri, store.is_server) == (uri, is_server)
    assert (store.artifact_root is not None) == has_root


@pytest.mark.parametrize(
    "uri",
    [
        *("htp://localhost:5000", "file:///tmp/mlruns", "./mlruns", "nonsense", "://", "http://"),
        *("http://host:port", "http://a b", "sqlite://", "sqlite:///", "sqlite:///:memory:"),
        *("sqlite:///folder/", "HTTP://x", "postgresql://", "databricks"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(uri: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tracking\.uri=.*allowed: ") as caught:
        resolve_store(uri, tmp_path)
    assert uri in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refused_environment_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "htp://x")
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_URI='htp://x'"):
        resolve_store(None, tmp_path)


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = resolve_store(f"http://me:secret@127.0.0.1:{port}", tmp_path)
    began = time.monotonic()
    with pytest.raises(StoreUnreachable, match="does not answer") as caught, opened(store):
        pass
    # MLflow's own retries take minutes; a refused connection is known at once.
    assert time.monotonic() - began < 5
    assert "secret" not in str(caught.value)


@pytest.fixture
def gateway() -> Iterator[str]:
    """A server that says that nothing is behind it."""

    class Nothing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(502)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Nothing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_gateway_without_a_server_behind_it(gateway: str) -> None:
    store = Store(uri=gateway, artifact_root=None)
    with pytest.raises(StoreUnreachable, match="502"), opened(store):
        pass


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database, but long enough to look like a file\n" * 9)
    store = resolve_store(None, tmp_path)
    with pytest.raises(StoreUnreachable, match="not a database") as caught, opened(store) as client:
        client.search_experiments()
    assert "\n" not in str(caught.value)


def test_a_programming_error_is_not_disguised(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), opened(store):
        _ = 1 / 0


def test_resolving_imports_no_mlflow_and_opening_turns_its_telemetry_off_first() -> None:
    program = """
import os, sys
from pathlib import Path
import harness.tracking.spool, harness.tracking.links
from harness.tracking.location import Store, opened, resolve_store
resolve_store(None, Path("."))
assert "mlflow" not in sys.modules, "imported too early"
os.environ.pop("MLFLOW_DISABLE_TELEMETRY", None)
seen = {}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "mlflow":
            seen["telemetry"] = os.environ.get("MLFLOW_DISABLE_TELEMETRY")
            raise KeyboardInterrupt  # enough: no need to load it
sys.meta_path.insert(0, Watch())
try:
    with opened(Store(uri="sqlite:////nowhere/x.db", artifact_root=None)):
        pass
except KeyboardInterrupt:
    pass
assert seen == {"telemetry": "true"}, seen
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
