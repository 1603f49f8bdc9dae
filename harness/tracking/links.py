"""How a user gets to the comparison page: the command that starts MLflow's UI, and the address."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict
from urllib.parse import quote

from harness.tracking.location import Store, StoreUnreachable, opened

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

LOCAL_UI = "http://127.0.0.1:5000"


class ComparisonLinks(TypedDict):
    """What the end of a sweep prints.

    Attributes:
        ui_command: The exact shell command that serves the store on `LOCAL_UI`; empty when a server
            is running already.
        url: The chart page of the sweep's runs.
    """

    ui_command: str
    url: str


def comparison_links(store: Store, experiment: str, sweep_id: str) -> ComparisonLinks:
    """Return the command and address that show a sweep's curves in charts, one per metric.

    The page shows every policy as one curve, the mean over seeds with the range around it. For
    that the experiment gets a shared view (a tag of its own, replaced when called again): without
    one, MLflow's page draws the ten newest runs and hides the others. The view holds a filter, not
    a list of runs, so it stays right when runs are added.

    Raises:
        StoreUnreachable: The experiment's number could not be asked for.
    """
    base = store.uri if store.is_server else LOCAL_UI
    links = ComparisonLinks(ui_command=_ui_command(store), url=base)
    with opened(store) as client:
        found = client.get_experiment_by_name(experiment)
    if found is None:
        return links
    condition = f"tags.sweep_id = {quoted(sweep_id)} and tags.kind = 'run'"
    try:
        with opened(store) as client:
            query = f"viewStateShareKey={_share_view(client, found.experiment_id, condition)}"
    except StoreUnreachable:
        # A server may let us read but not tag experiments: the filter alone still finds the runs.
        # The UI routes by what follows the hash; it needs every special character encoded.
        query = f"searchFilter={quote(condition, safe='')}"
    links["url"] = f"{base}/#/experiments/{found.experiment_id}/runs?{query}&compareRunsMode=CHART"
    return links


def _share_view(client: MlflowClient, experiment_id: str, condition: str) -> str:
    """Store the view as MLflow's "Share" button does, and return its key (read: MLflow 3.17.2)."""
    view = {
        "searchFilter": condition,
        "runsHiddenMode": "SHOW_ALL",
        "groupBy": {
            "aggregateFunction": "average",
            "groupByKeys": [{"mode": "tag", "groupByData": "policy"}],
        },
    }
    key = hashlib.sha256(condition.encode()).hexdigest()[:16]
    client.set_experiment_tag(experiment_id, f"mlflow.sharedViewState.{key}", json.dumps(view))
    return key


def quoted(value: str) -> str:
    """Return a string literal of MLflow's filter language, which has no escapes.

    Raises:
        ValueError: The value contains both kinds of quotes.
    """
    for mark in ("'", '"'):
        if mark not in value:
            return f"{mark}{value}{mark}"
    raise ValueError(f"{value!r} contains both kinds of quotes; MLflow cannot search for it")


def _ui_command(store: Store) -> str:
    if store.is_server:
        return ""
    return f"{_mlflow_program()} ui --backend-store-uri {shlex.quote(store.uri)}"


def _mlflow_program() -> str:
    """Return `mlflow`, if that starts the one of this Python, else a way that surely does."""
    # normpath and not resolve: a virtual environment's python is a link to the system's.
    python = Path(os.path.normpath(sys.executable))
    beside = python.parent / "mlflow"
    on_path = shutil.which("mlflow")
    if on_path is not None and Path(on_path) == beside:
        return "mlflow"
    if beside.exists():
        return shlex.quote(str(beside))
    return f"{shlex.quote(str(python))} -m mlflow"
