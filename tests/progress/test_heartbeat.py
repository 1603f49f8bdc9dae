"""Heartbeats: what is written is read back, seldom enough, and never at a run's cost."""

from __future__ import annotations

import json
import math
from pathlib import Path

from harness.progress import Beat, Heartbeat, read_beats


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_round_trip(tmp_path: Path) -> None:
    clock = Clock()
    beats = Heartbeat(tmp_path / "beats", clock=clock)
    beats.report("k1", "toy bf16 seed 1", 3, 30, 1.25)
    assert read_beats(tmp_path / "beats") == [
        Beat(
            run_key="k1",
            label="toy bf16 seed 1",
            step=3,
            steps=30,
            loss=1.25,
            status="running",
            started=1000.0,
            updated=1000.0,
        )
    ]


def test_written_at_most_every_half_second(tmp_path: Path) -> None:
    clock = Clock()
    beats = Heartbeat(tmp_path, clock=clock)
    steps = []
    for step in range(100):
        due = beats.due()
        beats.report("k", "run", step, 100, 1.0)
        (beat,) = read_beats(tmp_path)
        assert (beat.step == step) == due  # `due` says beforehand what `report` does
        steps.append(beat.step)
        clock.now += 0.125  # exact in binary, unlike 0.1
    assert len(set(steps)) == 25  # 12.5 s
    assert read_beats(tmp_path)[0].started == 1000.0


def test_the_first_beat_of_each_run_and_its_end_are_always_written(tmp_path: Path) -> None:
    clock = Clock()
    beats = Heartbeat(tmp_path, clock=clock)
    for key in ("a", "b"):
        beats.report(key, key, 0, 10, None)
        clock.now += 0.01
        beats.report(key, key, 4, 10, 2.0)
        beats.finish(key, "diverged" if key == "b" else "completed")
    a, b = read_beats(tmp_path)
    assert (a.status, a.step, a.loss) == ("completed", 10, None)
    assert (b.status, b.step) == ("diverged", 0)  # the last step that was known


def test_the_end_may_bring_a_last_loss(tmp_path: Path) -> None:
    beats = Heartbeat(tmp_path)
    beats.report("a", "a", 0, 10, 3.0)
    beats.finish("a", "completed", loss=1.5)
    assert read_beats(tmp_path)[0].loss == 1.5


def test_finishing_what_never_began_does_nothing(tmp_path: Path) -> None:
    Heartbeat(tmp_path).finish("never", "crashed")
    assert read_beats(tmp_path) == []


def test_nan_and_infinity_are_strict_json(tmp_path: Path) -> None:
    beats = Heartbeat(tmp_path)
    beats.report("a", "a", 0, 10, math.nan)
    beats.report("b", "b", 0, 10, -math.inf)

    def refuse(constant: str) -> float:
        raise ValueError(constant)

    for path in tmp_path.glob("*.json"):
        json.loads(path.read_text(), parse_constant=refuse)
    losses = {beat.run_key: beat.loss for beat in read_beats(tmp_path)}
    assert math.isnan(losses["a"] or 0.0)
    assert losses["b"] == -math.inf


def test_a_folder_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    beats = Heartbeat(tmp_path / "file" / "beats")
    beats.report("a", "a", 0, 10, 1.0)
    beats.finish("a", "completed")


def test_other_files_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"run_key": ')
    (tmp_path / "other.json").write_text('{"loss": null}')
    (tmp_path / "text.json").write_text("[]")
    assert read_beats(tmp_path) == []
    assert read_beats(tmp_path / "missing") == []
