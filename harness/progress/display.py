"""The display of a running sweep: a thread that looks at the heartbeats and draws them."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from harness.progress.heartbeat import read_beats
from harness.progress.state import SweepState, estimate_rest
from harness.progress.views import LineView, LiveView, View, is_terminal

_POLL_EVERY_S = 0.5
_LINE_EVERY_S = 15.0


class ProgressDisplay:
    """Context manager in the parent: draws the heartbeats of `folder` while its block runs.

    A daemon thread looks at the folder twice a second, so it does not matter whether the block
    trains itself or waits for workers. Heartbeats of an earlier invocation are removed at the
    start. The display never raises into the block.

    Args:
        folder: Where the workers' `Heartbeat` writes.
        total: Runs of the sweep, reused ones included.
        reused: Runs that are finished already; they count as done.
        weights: Run key -> expected cost, for the ETA (see `estimate_rest`).
        stream: Where to draw; standard output, by default as it is when the block starts.
        line_every_s: Without a terminal: at most one progress line per run in this time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total: int,
        reused: int = 0,
        weights: Mapping[str, float] | None = None,
        stream: IO[str] | None = None,
        line_every_s: float = _LINE_EVERY_S,
    ) -> None:
        self._folder = folder
        self._total = total
        self._reused = reused
        self._weights = weights
        self._stream = stream
        self._line_every_s = line_every_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._started = 0.0
        self._view: View | None = None

    def __enter__(self) -> ProgressDisplay:
        """Start to draw."""
        shutil.rmtree(self._folder, ignore_errors=True)
        stream = self._stream or sys.stdout
        self._view = (
            LiveView(stream)
            if is_terminal(stream)
            else LineView(stream, every_s=self._line_every_s)
        )
        self._started = time.time()
        self._view.open()
        self._thread = threading.Thread(target=self._poll, name="progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Draw the last state and stop."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        if self._view is not None:
            with contextlib.suppress(OSError, ValueError):
                self._view.close(self.state())
        shutil.rmtree(self._folder, ignore_errors=True)

    def state(self) -> SweepState:
        """Return what the heartbeats say now."""
        now = time.time()
        beats = tuple(read_beats(self._folder))
        elapsed = now - self._started
        return SweepState(
            total=self._total,
            reused=self._reused,
            beats=beats,
            elapsed_s=elapsed,
            eta_s=estimate_rest(
                beats,
                num_to_run=self._total - self._reused,
                elapsed_s=elapsed,
                weights=self._weights,
            ),
            now=now,
        )

    def _poll(self) -> None:
        while not self._stop.wait(_POLL_EVERY_S):
            self._draw()

    def _draw(self) -> None:
        assert self._view is not None
        # A closed pipe (`| head`) ends the display, not the training.
        with contextlib.suppress(OSError, ValueError):
            self._view.draw(self.state())
