"""How far a bank is: a bar in a terminal, a line every half minute anywhere else."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import IO, TYPE_CHECKING

from harness.calibration.jobs import Plan
from harness.calibration.workers import Done

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LINE_EVERY_S = 30.0


def duration(seconds: float) -> str:
    """Return a duration in the unit that a reader would choose: `40 s`, `12 min`, `1 h 05 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class Watch:
    """Context manager that draws the progress of a plan.

    Args:
        plan: What is to be done.
        num_workers: Among whom the time is shared.
        stream: Where to draw.

    Attributes:
        num_wanted: Runs and probes of the plan.
        num_done: Of them, those that are done; what failed is not.
    """

    def __init__(self, plan: Plan, *, num_workers: int, stream: IO[str]) -> None:
        self._plan, self._num_workers, self._stream = plan, num_workers, stream
        self._began = self._drawn = time.monotonic()
        self._expected_done = self._really_done = 0.0
        self.num_wanted = sum(len(job.arms) for job in plan.jobs)
        self.num_done = self._num_failed = self._num_crashed = self._num_diverged = 0
        self._last = ""
        self._bar: Progress | None = None
        self._row: TaskID | None = None

    def __enter__(self) -> Watch:
        if self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", ""):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._bar = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                console=Console(file=self._stream),
                transient=True,
            )
            self._bar.start()
            self._row = self._bar.add_task("", total=self.num_wanted)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        print(f"{self._so_far()}, in {duration(self._elapsed())}", file=self._stream, flush=True)

    def note(self, done: Done) -> None:
        """Take in how a job ended; a failure is told at once."""
        num_units = len(done.job.arms)
        self.num_done += 0 if done.failure else num_units
        self._num_failed += num_units if done.failure else 0
        self._expected_done += self._plan.seconds[done.job]
        self._really_done += done.seconds
        self._num_crashed += done.outcome == "crashed"
        self._num_diverged += done.outcome == "diverged"
        self._last = done.job.label
        if done.failure:
            print(f"failed: {done.job.label}: {done.failure}", file=sys.stderr, flush=True)
        self.draw()

    def draw(self) -> None:
        """Draw, if it is time to."""
        text = f"{duration(self._rest_s())} left, {self._last}"
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, completed=self.num_done, description=text)
        elif time.monotonic() - self._drawn >= _LINE_EVERY_S:
            self._drawn = time.monotonic()
            print(f"{self._so_far()}, about {text}", file=self._stream, flush=True)

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _so_far(self) -> str:
        parts = [f"{self.num_done} of {self.num_wanted} done"]
        for count, what in (
            (self._num_diverged, "of them diverged"),
            (self._num_crashed, "of them crashed"),
            (self._num_failed, "failed"),
        ):
            parts += [f"{count} {what}"] if count else []
        return ", ".join(parts)

    def _rest_s(self) -> float:
        """Return the time that is left: what is expected of the rest, at the pace so far."""
        rest = sum(self._plan.seconds.values()) - self._expected_done
        pace = self._really_done / self._expected_done if self._expected_done else 1.0
        return rest * pace / self._num_workers
