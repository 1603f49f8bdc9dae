"""Where the tracking store is, and how it is opened: the only place that imports MLflow.

MLflow is imported inside functions, after its telemetry is switched off; resolving a URI touches
neither MLflow nor the network.
"""

from __future__ import annotations

import contextlib
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

URI_VARIABLE = "MLFLOW_TRACKING_URI"
SERVER_SCHEMES = ("http", "https")
DATABASE_SCHEMES = ("postgresql", "mysql", "mssql")
ALLOWED = "sqlite:///FILE.db, http(s)://HOST:PORT, or a postgresql, mysql or mssql URI"
# A dead server should cost a run seconds, not minutes; a user's own setting wins.
_MLFLOW_ENVIRONMENT = {
    # Read once, at MLflow's first import; later it no longer has an effect.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    # Otherwise every finished run prints two lines into the progress display.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
_PROBE_TIMEOUT_S = 5.0


class StoreUnreachable(Exception):
    """The store cannot be used now: one line saying which and why. Nothing local is lost."""


@dataclass(frozen=True, kw_only=True)
class Store:
    """A tracking store.

    Attributes:
        uri: MLflow tracking URI; for SQLite always with an absolute path.
        artifact_root: Absolute folder for the artifacts of experiments created here, or None when
            a server decides.
    """

    uri: str
    artifact_root: str | None

    @property
    def is_server(self) -> bool:
        """Whether an MLflow server answers for this store."""
        return urlsplit(self.uri).scheme in SERVER_SCHEMES

    @property
    def sqlite_path(self) -> Path | None:
        """The SQLite file, or None for any other store."""
        prefix = "sqlite:///"
        return Path(self.uri[len(prefix) :]) if self.uri.startswith(prefix) else None


def resolve_store(uri: str | None, output_dir: Path) -> Store:
    """Return the store that `uri`, the environment or the default names, without opening it.

    Args:
        uri: `tracking.uri`; None falls back to the variable `MLFLOW_TRACKING_URI`, and without
            that to `mlflow.db` in `output_dir`, artifacts in `output_dir/mlartifacts`. A relative
            SQLite path is taken from the current folder; its artifacts lie beside the file, so
            that they stay with the database when it is used from elsewhere.
        output_dir: Folder below which everything is written.

    Raises:
        ValueError: The URI is malformed, or names a kind of store that MLflow refuses (`file:`)
            or that cannot be shared by processes (SQLite in memory).
    """
    given, key = uri, "tracking.uri"
    if not given:
        given, key = os.environ.get(URI_VARIABLE), URI_VARIABLE
    root = output_dir.resolve()
    if not given:
        return Store(uri=f"sqlite:///{root / 'mlflow.db'}", artifact_root=str(root / "mlartifacts"))
    scheme, separator, rest = given.partition("://")
    if not separator or scheme != scheme.lower():
        raise _refused(key, given)
    if scheme == "sqlite":
        return _sqlite_store(key, given, rest)
    if scheme in SERVER_SCHEMES:
        _require_host(key, given)
        return Store(uri=given.rstrip("/"), artifact_root=None)
    if scheme.split("+")[0] in DATABASE_SCHEMES:
        _require_host(key, given)
        return Store(uri=given, artifact_root=str(root / "mlartifacts"))
    raise _refused(key, given)


def _sqlite_store(key: str, given: str, rest: str) -> Store:
    if not rest.startswith("/") or rest in ("/", "/:memory:") or rest.endswith("/"):
        raise _refused(key, given)
    path = Path(rest[1:]).absolute()
    return Store(uri=f"sqlite:///{path}", artifact_root=str(path.parent / "mlartifacts"))


def _require_host(key: str, given: str) -> None:
    try:
        parts = urlsplit(given)
        _ = parts.port  # raises on a port that is no number
    except ValueError:
        raise _refused(key, given) from None
    if not parts.hostname or any(character.isspace() for character in given):
        raise _refused(key, given)


def _refused(key: str, given: str) -> ValueError:
    return ValueError(f"{key}={given!r} is not a tracking URI that can be used; allowed: {ALLOWED}")


@contextlib.contextmanager
def opened(store: Store) -> Iterator[MlflowClient]:
    """Open the store, turning every failure of MLflow or its database into `StoreUnreachable`.

    Opening an SQLite store costs about 1.4 s in a process's first call (import and schema check).

    Raises:
        StoreUnreachable: The server does not answer, or the store refused something inside the
            block; a programming error in the block passes through.
    """
    for name, value in _MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _require_reachable(store)
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
    from sqlalchemy.exc import SQLAlchemyError

    # Alembic announces every migration step of a new database, 60 lines in all.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    try:
        yield MlflowClient(tracking_uri=store.uri)
    except (MlflowException, SQLAlchemyError, CommandError, OSError) as error:
        raise StoreUnreachable(f"tracking store {_shown(store.uri)}: {_one_line(error)}") from error


def _require_reachable(store: Store) -> None:
    """Ask a server for anything at all: MLflow's own retries would take minutes to give up."""
    if not store.is_server:
        return
    try:
        with urllib.request.urlopen(f"{store.uri}/health", timeout=_PROBE_TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
        # Any answer is an answer, but a gateway says with 502 to 504 that nothing is behind it.
        if error.code not in (502, 503, 504):
            return
        reason: object = f"HTTP status {error.code}"
    except urllib.error.URLError as error:
        reason = error.reason
    except OSError as error:
        reason = error
    raise StoreUnreachable(f"tracking server {_shown(store.uri)} does not answer: {reason}")


def _one_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _shown(uri: str) -> str:
    """Return the URI without a password."""
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    return uri.replace(f":{parts.password}@", ":***@")
