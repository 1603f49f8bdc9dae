"""A store that is away costs no training and, once it is back, no copy."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.runs.record import RunRecord
from harness.tracking import spool
from harness.tracking.location import Store
from harness.tracking.store import fetch_records

Make = Callable[..., tuple[RunRecord, Path]]


@pytest.fixture
def away() -> Store:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Store(uri=f"http://127.0.0.1:{free.getsockname()[1]}", artifact_root=None)


def _log(store: Store, made: tuple[RunRecord, Path], sweep_id: str, output: Path) -> str | None:
    record, path = made
    return spool.log_or_spool(
        store, record, path, experiment=record.workload, sweep_id=sweep_id, output_dir=output
    )


def test_a_copy_that_could_not_be_made_is_made_later(
    away: Store, store: Store, stored: Make, tmp_path: Path
) -> None:
    made = stored()
    reason = _log(away, made, "later", tmp_path)
    assert reason is not None
    assert "does not answer" in reason
    ((marker, owed),) = spool.pending(tmp_path).items()
    assert marker.is_relative_to(tmp_path / "runs" / ".spool")
    assert (tmp_path / owed.record) == made[1]
    assert owed.reason == reason

    still = spool.replay(away, tmp_path)
    assert (still.copied, still.left) == (0, 1)
    assert "does not answer" in str(still.reason)

    done = spool.replay(store, tmp_path)
    assert (done.copied, done.left, done.reason) == (1, 0, None)
    assert spool.pending(tmp_path) == {}
    assert fetch_records(store, sweep_id="later") == [made[0]]
    assert spool.replay(away, tmp_path) == spool.Replay(copied=0, left=0)  # nothing is owed


def test_a_later_success_removes_the_marker(
    away: Store, store: Store, stored: Make, tmp_path: Path
) -> None:
    made = stored()
    _log(away, made, "success", tmp_path)
    assert _log(store, made, "success", tmp_path) is None
    assert spool.pending(tmp_path) == {}


def test_the_output_folder_can_be_moved(
    away: Store, store: Store, stored: Make, tmp_path: Path
) -> None:
    made = stored()
    _log(away, made, "moved", tmp_path)
    moved = tmp_path.with_name(f"{tmp_path.name} moved")
    tmp_path.rename(moved)
    assert spool.replay(store, moved).copied == 1


def test_sweeps_and_runs_have_markers_of_their_own(
    away: Store, stored: Make, tmp_path: Path
) -> None:
    for seed in (1, 2):
        for sweep_id in ("a/b", "a", "../c"):
            _log(away, stored(seed=seed), sweep_id, tmp_path)
    assert len(spool.pending(tmp_path)) == 6


def test_a_lost_record_is_given_up_and_the_others_are_copied(
    store: Store, stored: Make, tmp_path: Path
) -> None:
    for seed in (1, 2):
        record, path = stored(seed=seed)
        spool.spool(
            tmp_path,
            path,
            experiment="toy",
            sweep_id="lost",
            run_key=record.run_key,
            reason="was away",
        )
        if seed == 1:
            path.unlink()
    (tmp_path / "runs" / ".spool" / "half.json").write_text('{"record": ')  # not ours to judge
    done = spool.replay(store, tmp_path)
    assert (done.copied, done.left) == (1, 0)
    assert [r.seed for r in fetch_records(store, sweep_id="lost")] == [2]


def test_even_a_fault_of_the_tracking_code_ends_no_training(
    store: Store, stored: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(spool, "log_record", fault)
    reason = _log(store, stored(), "bug", tmp_path)
    assert reason == "'a bug'"
    assert len(spool.pending(tmp_path)) == 1
    assert spool.replay(store, tmp_path).left == 1
