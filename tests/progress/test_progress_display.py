"""The display: what a log and a terminal show, and the estimate of the rest."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
import pty
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.progress import (
    Beat,
    Heartbeat,
    ProgressDisplay,
    SweepState,
    estimate_rest,
    format_duration,
    read_beats,
)
from harness.progress.views import LineView, LiveView


def _beat(key: str, step: int, status: str = "running", *, started: float = 0.0) -> Beat:
    return Beat(
        run_key=key,
        label=f"toy {key}",
        step=step,
        steps=100,
        loss=1.23456,
        status=status,
        started=started,
        updated=started + 65.0,
    )


def _state(*beats: Beat, now: float = 0.0, total: int = 12, reused: int = 2) -> SweepState:
    return SweepState(total=total, reused=reused, beats=beats, elapsed_s=65.0, eta_s=200.0, now=now)


def test_durations() -> None:
    assert [format_duration(s) for s in (None, 0, 59.6, 200, 3600, 36061)] == [
        *("-:--", "0:00", "1:00", "3:20", "1:00:00", "10:01:01")
    ]


def test_rest_is_elapsed_time_over_share_done() -> None:
    beats = (_beat("a", 100, "completed"), _beat("b", 50))
    # 1.5 of 6 runs in 30 s: 4.5 left at 20 s each, whatever the number of workers.
    assert estimate_rest(beats, num_to_run=6, elapsed_s=30.0) == pytest.approx(90.0)
    assert estimate_rest((), num_to_run=6, elapsed_s=30.0) is None
    assert estimate_rest((_beat("a", 0),), num_to_run=6, elapsed_s=30.0) is None


def test_a_run_that_ended_early_is_done() -> None:
    assert estimate_rest((_beat("a", 3, "crashed"),), num_to_run=2, elapsed_s=8.0) == 8.0


def test_a_run_that_need_not_start_costs_nothing() -> None:
    done, spared = _beat("a", 100, "completed"), _beat("b", 0, "spared")
    assert estimate_rest((done, spared), num_to_run=3, elapsed_s=8.0) == pytest.approx(8.0)


def test_a_run_that_need_not_start_is_told_with_its_reason(tmp_path: Path) -> None:
    Heartbeat(tmp_path).spare("k", "toy fp16 seed 1", "seed 0 overflowed")
    state = dataclasses.replace(_state(total=3), beats=tuple(read_beats(tmp_path)))
    out = io.StringIO()
    view = LineView(out, every_s=15.0)
    view.open()
    view.close(state)
    line, closing = out.getvalue().splitlines()
    assert line == "[3/3] toy fp16 seed 1  not needed: seed 0 overflowed  ETA 3:20"
    assert closing == "3 of 3 runs done, 2 of them before, 1 of them not needed, in 1:05"


def test_expected_costs_weigh() -> None:
    beats = (_beat("cheap", 100, "completed"),)
    costs = {"cheap": 1.0, "dear": 9.0}
    assert estimate_rest(beats, num_to_run=2, elapsed_s=5.0, weights=costs) == pytest.approx(45.0)
    # A third run without a known cost counts as the mean, 5.
    assert estimate_rest(beats, num_to_run=3, elapsed_s=5.0, weights=costs) == pytest.approx(70.0)


def test_lines_in_a_log() -> None:
    stream = io.StringIO()
    view = LineView(stream, every_s=15.0)
    view.open()
    now = time.time()
    view.draw(_state(_beat("a", 40), now=now + 1))
    assert stream.getvalue() == ""  # not every poll is a line
    view.draw(_state(_beat("a", 50), _beat("b", 10, started=1.0), now=now + 16))
    view.draw(_state(_beat("a", 60), _beat("b", 20, started=1.0), now=now + 17))
    done = _state(_beat("a", 100, "completed"), _beat("b", 30, started=1.0), now=now + 18)
    view.draw(done)
    view.draw(done)
    view.close(_state(_beat("a", 100, "completed"), _beat("b", 31, "crashed", started=1.0)))
    assert stream.getvalue().splitlines() == [
        "[ 3/12] toy a  step 50/100  loss 1.235  ETA 3:20",
        "[ 4/12] toy b  step 10/100  loss 1.235  ETA 3:20",
        "[ 3/12] toy a  completed after 100 steps in 1:05  loss 1.235  ETA 3:20",
        "[ 4/12] toy b  crashed after 31 steps in 1:05  loss 1.235  ETA 3:20",
        "4 of 12 runs done, 2 of them before, 1 crashed, in 1:05",
    ]


def test_many_runs_at_once_do_not_flood_the_log() -> None:
    stream = io.StringIO()
    view = LineView(stream, every_s=0.0)
    view.open()
    view.draw(_state(*(_beat(str(k), k) for k in range(64)), now=time.time() + 1, total=99))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[-1] == "... and 60 more runs"


def _workers(folder: Path, keys: list[str]) -> None:
    beats = Heartbeat(folder)
    for key in keys:
        for step in range(3):
            beats.report(key, f"toy\u00e9 {key}", step, 3, 1.0)
            time.sleep(0.01)
        beats.finish(key, "completed")


def test_runs_of_several_processes_end_up_in_one_log(tmp_path: Path) -> None:
    stream = io.StringIO()
    context = multiprocessing.get_context("spawn")
    with ProgressDisplay(tmp_path / "beats", total=4, stream=stream):
        workers = [
            context.Process(target=_workers, args=(tmp_path / "beats", keys))
            for keys in (["a", "b"], ["c", "d"])
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=30)
            assert worker.exitcode == 0
    text = stream.getvalue()
    for key in "abcd":
        assert len(re.findall(rf"toy. {key}  completed", text)) == 1, text
    assert re.search(r"4 of 4 runs done, in \d:\d\d\n$", text)
    # No control codes, and nothing that a log's encoding could choke on.
    assert re.fullmatch(r"[ -~\n]*", text)
    assert not (tmp_path / "beats").exists()


def test_training_in_the_same_process(tmp_path: Path) -> None:
    stream = io.StringIO()
    folder = tmp_path / "beats"
    with ProgressDisplay(folder, total=3, reused=2, stream=stream, line_every_s=0.0) as display:
        beats = Heartbeat(folder)
        beats.report("a", "toy a", 1, 4, 2.0)
        deadline = time.monotonic() + 10
        while "step 1/4" not in stream.getvalue():  # the thread draws while we work
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert display.state().num_done == 2
        beats.finish("a", "completed")
    assert "[3/3] toy a  completed after 4 steps" in stream.getvalue()


def test_heartbeats_of_an_earlier_invocation_are_forgotten(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "beats").report("old", "old", 1, 4, 2.0)
    with ProgressDisplay(tmp_path / "beats", total=1, stream=io.StringIO()) as display:
        assert display.state().beats == ()


def test_the_display_lets_errors_through_and_stops_its_thread(tmp_path: Path) -> None:
    before = threading.active_count()

    def fail() -> None:
        with ProgressDisplay(tmp_path / "beats", total=1, stream=io.StringIO()):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert threading.active_count() == before


def test_a_closed_stream_ends_no_training(tmp_path: Path) -> None:
    stream = io.StringIO()
    with ProgressDisplay(tmp_path / "beats", total=1, stream=stream, line_every_s=0.0):
        stream.close()
        Heartbeat(tmp_path / "beats").report("a", "a", 1, 4, 2.0)
        time.sleep(0.6)  # one poll


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[io.TextIOBase], None]], str]:
    """Return a function that lets a drawer write to a terminal and returns what it wrote."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")

    def drawn(draw: Callable[[io.TextIOBase], None]) -> str:
        ours, theirs = pty.openpty()
        chunks: list[bytes] = []

        def read() -> None:
            while True:
                try:
                    chunk = os.read(ours, 4096)
                except OSError:  # Linux says so when the other end closes
                    return
                if not chunk:
                    return
                chunks.append(chunk)

        reader = threading.Thread(target=read)
        reader.start()
        with os.fdopen(theirs, "w", encoding="utf-8") as stream:
            draw(stream)
        reader.join(timeout=10)
        os.close(ours)
        return b"".join(chunks).decode("utf-8")

    return drawn


def test_a_terminal_gets_live_bars(terminal: Callable, tmp_path: Path) -> None:
    def draw(stream: io.TextIOBase) -> None:
        with ProgressDisplay(tmp_path / "beats", total=2, stream=stream):
            Heartbeat(tmp_path / "beats").report("a", "toy [bold]a", 1, 4, 2.0)
            time.sleep(0.7)  # one poll

    text = terminal(draw)
    assert "\x1b[" in text
    assert "0 of 2 runs done, 1 running" in text
    assert "toy [bold]a" in text  # a name is no markup
    assert "step 1/4  loss 2" in text
    assert re.search(r"0 of 2 runs done, in \d:\d\d\s*$", text)


def test_a_dumb_terminal_gets_lines(
    terminal: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")

    def draw(stream: io.TextIOBase) -> None:
        with ProgressDisplay(tmp_path / "beats", total=2, stream=stream):
            pass

    assert re.fullmatch(r"0 of 2 runs done, in \d:\d\d\r\n", terminal(draw))


def test_a_silent_run_is_marked(terminal: Callable) -> None:
    def draw(stream: io.TextIOBase) -> None:
        view = LiveView(stream)
        view.open()
        view.draw(_state(_beat("a", 40), now=200.0))
        view.draw(_state(_beat("a", 40, "completed"), _beat("b", 1, started=190.0), now=201.0))
        view.close(_state(total=2, reused=0))

    text = terminal(draw)
    assert "no news for 2:15" in text  # its last beat was at 65 s
    assert "toy b" in text
