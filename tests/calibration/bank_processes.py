"""Processes of a bank, as tests watch them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.calibration.bank import Bank, StoredArm


def wait_for(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def session_is_empty(pid: int) -> bool:
    """Return whether no process of a session is left (its leader's pid names it)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if session == str(pid) and state != "Z":
                return False
    return True


class SleepyBank(Bank):
    """One whose tasks take a minute to read, and say so: `judging-<task>` in its folder."""

    def stored_arms(self, task: str) -> Mapping[str, StoredArm]:
        return {
            "fp32": StoredArm(
                name="fp32", kind="reference", family="fp32", dose="", sentence="", key=""
            )
        }

    def digest(self, task: str) -> str:
        (self.folder / f"judging-{task}").touch()
        time.sleep(60)
        return ""
