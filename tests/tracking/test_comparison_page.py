"""The page that the end of a sweep links to, in a real browser on a real MLflow server."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.runs.record import RunRecord
from harness.tracking.store import Store, comparison_links, log_record

pytestmark = [pytest.mark.slow, pytest.mark.browser]
POLICIES = ("fp32", "fp32_twin", "tf32", "fp16", "bf16", "bf16_fallback", "bf16_pure")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
# Without these it looks for its maker's hosts at every start.
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture
def server(store: Store) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    settings = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store.uri),
            *("--port", str(port), "--workers", "1"),
        ],
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for(base)
        yield base
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # the server's own workers as well
        process.wait(timeout=30)


def _wait_for(base: str) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{base}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
        else:
            return
    raise TimeoutError(base)


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_every_policy_has_its_curve(
    store: Store, server: str, stored: Callable[..., tuple[RunRecord, Path]], tmp_path: Path
) -> None:
    # 14 runs: MLflow's own choice would be the ten newest, without fp32.
    for seed in (0, 1):
        for policy in POLICIES:
            record, path = stored(policy, seed, workload="page")
            log_record(store, record, path, experiment="page", sweep_id="page")
    links = comparison_links(store, "page", "page")
    served = links["url"].replace("http://127.0.0.1:5000", server)
    wanted = {f"Group: {policy}" for policy in POLICIES}
    wanted |= {f"{policy} (loss/train)" for policy in POLICIES}  # in the legend of the chart
    for attempt in range(5):
        # The browser's virtual clock can run out before a fresh server has sent everything.
        missing = wanted - _texts(served, tmp_path / f"profile {attempt}")
        if not missing:
            return
    raise AssertionError(missing)


def _texts(address: str, profile: Path) -> set[str]:
    """Return the texts of a page's elements."""
    command = [
        *(str(BROWSER), *QUIET, f"--user-data-dir={profile}", "--window-size=1700,2400"),
        *("--virtual-time-budget=30000", "--dump-dom", address),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
    return {text.strip() for text in re.split(r"<[^>]*>", done.stdout)}
