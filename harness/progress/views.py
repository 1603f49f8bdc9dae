"""How progress looks: live bars in a terminal, plain ASCII lines anywhere else."""

from __future__ import annotations

import os
import time
from typing import IO, TYPE_CHECKING, Protocol

from harness.progress.heartbeat import SPARED, Beat
from harness.progress.state import SweepState

if TYPE_CHECKING:
    from rich.progress import TaskID

_MAX_LINES = 4
_QUIET_AFTER_S = 60.0


def format_duration(seconds: float | None) -> str:
    """Return `m:ss` or `h:mm:ss`; `-:--` for None."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class View(Protocol):
    """Something that draws the state of a sweep; every method may raise OSError or ValueError."""

    def open(self) -> None:
        """Start drawing."""
        ...

    def draw(self, state: SweepState) -> None:
        """Draw `state`; called twice a second, from one thread at a time."""
        ...

    def close(self, state: SweepState) -> None:
        """Draw the last state, which stays, and stop."""
        ...


def is_terminal(stream: IO[str]) -> bool:
    """Whether `stream` is a terminal that understands control codes."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "")


def closing_line(state: SweepState) -> str:
    """Return the line that stays: how many runs are done, how many failed, and how long it took."""
    words = {"diverged": "diverged", "crashed": "crashed", SPARED: "of them not needed"}
    counts = {status: sum(b.status == status for b in state.beats) for status in words}
    parts = [f"{state.num_done} of {state.total} runs done"]
    if state.reused:
        parts.append(f"{state.reused} of them before")
    parts += [f"{count} {words[status]}" for status, count in counts.items() if count]
    return f"{', '.join(parts)}, in {format_duration(state.elapsed_s)}"


def _loss_text(beat: Beat) -> str:
    return "" if beat.loss is None else f"  loss {beat.loss:.4g}"


def ended_line(state: SweepState, beat: Beat) -> str:
    """Return the line that says how a run ended, with its last training loss, or was spared."""
    if beat.status == SPARED:
        return _line(state, beat, f"not needed: {beat.note}")
    took = format_duration(beat.updated - beat.started)
    return _line(state, beat, f"{beat.status} after {beat.step} steps in {took}")


def _line(state: SweepState, beat: Beat, what: str) -> str:
    width = len(str(state.total))
    return (
        f"[{state.ordinal(beat):{width}d}/{state.total}] {beat.label}  {what}"
        f"{_loss_text(beat)}  ETA {format_duration(state.eta_s)}"
    )


class LineView:
    """One line when a run ends, and now and then one for each that goes on.

    Args:
        stream: Anything with `write`; gets ASCII only, as a log may be read in any encoding.
        every_s: Least time between two rounds of lines for runs that go on.
    """

    def __init__(self, stream: IO[str], *, every_s: float) -> None:
        self._stream = stream
        self._every_s = every_s
        self._ended: set[str] = set()
        self._next_lines = 0.0

    def open(self) -> None:
        """Start the clock: the first line comes after `every_s`, or when a run ends."""
        self._next_lines = time.time() + self._every_s

    def draw(self, state: SweepState) -> None:
        """Print what is new."""
        for beat in state.beats:
            if beat.status != "running" and beat.run_key not in self._ended:
                self._ended.add(beat.run_key)
                self._write(ended_line(state, beat))
                self._next_lines = state.now + self._every_s
        if state.now < self._next_lines or not state.running:
            return
        self._next_lines = state.now + self._every_s
        for beat in state.running[:_MAX_LINES]:
            self._write(_line(state, beat, f"step {beat.step}/{beat.steps}"))
        if len(state.running) > _MAX_LINES:
            self._write(f"... and {len(state.running) - _MAX_LINES} more runs")

    def close(self, state: SweepState) -> None:
        """Print the closing line."""
        self.draw(state)
        self._write(closing_line(state))

    def _write(self, line: str) -> None:
        ascii_line = line.encode("ascii", "replace").decode("ascii")
        print(ascii_line, file=self._stream, flush=True)


class LiveView:
    """A bar over the sweep and one under it for each run that goes on.

    Args:
        stream: A terminal. What others print meanwhile appears above the bars.
    """

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(file=stream, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}", markup=False),
            console=self._console,
            auto_refresh=False,  # the polling thread draws; a second thread would only cost
            transient=True,
        )
        self._sweep: TaskID | None = None
        self._runs: dict[str, TaskID] = {}
        self._ended: set[str] = set()

    def open(self) -> None:
        """Show the empty bar of the sweep."""
        self._bars.start()
        self._sweep = self._bars.add_task("starting", total=None, detail="")
        self._bars.refresh()

    def draw(self, state: SweepState) -> None:
        """Bring all bars up to date."""
        assert self._sweep is not None
        ended = [beat for beat in state.beats if beat.status != "running"]
        partly = sum(beat.step / max(beat.steps, 1) for beat in state.running)
        failed = sum(beat.status not in ("completed", SPARED) for beat in ended)
        note = f"  {failed} not completed" if failed else ""
        running = f", {len(state.running)} running" if state.running else ""
        self._bars.update(
            self._sweep,
            description=f"{state.num_done} of {state.total} runs done{running}",
            total=float(state.total),
            completed=state.num_done + partly,
            detail=f"ETA {format_duration(state.eta_s)}{note}",
        )
        for beat in ended:
            if beat.run_key not in self._ended:
                self._ended.add(beat.run_key)
                self._console.print(ended_line(state, beat), markup=False, soft_wrap=True)
            if (task := self._runs.pop(beat.run_key, None)) is not None:
                self._bars.remove_task(task)
        for beat in state.running:
            self._draw_run(beat, state.now)
        self._bars.refresh()

    def close(self, state: SweepState) -> None:
        """Remove the bars and print the closing line."""
        self.draw(state)
        self._bars.stop()
        self._console.print(closing_line(state), markup=False)

    def _draw_run(self, beat: Beat, now: float) -> None:
        if beat.run_key not in self._runs:
            self._runs[beat.run_key] = self._bars.add_task(f"  {beat.label}", detail="")
        silence = now - beat.updated
        quiet = f"  no news for {format_duration(silence)}" if silence > _QUIET_AFTER_S else ""
        self._bars.update(
            self._runs[beat.run_key],
            total=float(max(beat.steps, 1)),
            completed=float(beat.step),
            detail=f"step {beat.step}/{beat.steps}{_loss_text(beat)}{quiet}",
        )
