"""The program as a user starts it: a process in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import harness

ROOT = Path(harness.__file__).resolve().parents[1]
WORKLOADS = ROOT / "tests" / "end_to_end" / "workloads"
TIMEOUT_S = 300


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    """Return the environment without what is set for this program or its store."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "MLFLOW_"))}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def command(folder: Path, *arguments: str) -> Done:
    """Run `python -m harness` in a folder, whatever its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    # Nobody looks at a terminal here: no colours, no cursor movements.
    assert "\x1b" not in done.stdout + done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


def succeeded(folder: Path, *arguments: str) -> Done:
    """Run the same, which must end with exit code 0."""
    done = command(folder, *arguments)
    assert done.code == 0, done.out + done.err
    return done
