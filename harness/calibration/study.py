"""The study as a whole: every task of a bank judged, and the document written."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import harness
from harness.analysis.rule import DecisionRule
from harness.calibration.contenders import contenders
from harness.calibration.document import write_document
from harness.calibration.interrupts import leave_interrupts_to_the_parent
from harness.calibration.judging import judge_task
from harness.calibration.results import TaskResult
from harness.calibration.targets import Target, reported_half, targets
from harness.calibration.truth import StoredRuns
from harness.runs.record_files import read_if_there, strict_json, write_atomically

# A leading dot: a folder of the bank without one is a task.
JUDGED_FOLDER = ".judged"
# Every draw of the operating characteristic is judged at each of its shifts; the page says that it
# has half of the draws.
_SHIFT_DIVISOR = 2
# Their source is part of what a stored result rests on.
_JUDGING = (
    "analysis",
    "calibration/contenders.py",
    "calibration/draws.py",
    "calibration/judging.py",
    "calibration/plans.py",
    "calibration/results.py",
    "calibration/shifts.py",
    "calibration/simulated.py",
    "calibration/truth.py",
)


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """What the study found.

    Attributes:
        tasks: Everything, by task.
        targets: The table of targets, over the half of the tasks that is reported.
        document: The page that was written; its figures lie in a folder beside it.
    """

    tasks: tuple[TaskResult, ...]
    targets: tuple[Target, ...]
    document: Path


def run_study(
    bank: StoredRuns,
    *,
    output: Path,
    draws: int,
    command: str,
    quick: bool = False,
    workers: int | None = None,
    rule: DecisionRule | None = None,
) -> StudyResult:
    """Judge a bank and write `calibration.md` with its figures.

    A task that was judged before is not judged again while runs, rule, draws and code are the same.

    Args:
        bank: The stored runs.
        output: Folder of `calibration.md` and `calibration/*.png`; created if needed.
        draws: Draws of seeds per arm, rule and plan.
        command: That gives this page, for its first lines.
        quick: Whether the page says that this was the quick version.
        workers: Processes; as many as there are cores by default.
        rule: Constants; the defaults if None.

    Raises:
        ValueError: The bank holds no task with FP32 runs.
    """
    rule = rule or DecisionRule()
    names = [task for task in bank.tasks() if bank.stored_arms(task)]
    if not names:
        raise ValueError(f"{bank.folder} holds no runs to judge; train them first")
    processes = min(workers or os.cpu_count() or 1, len(names))
    tasks = tuple(_judged(bank, names, rule=rule, draws=draws, processes=processes))
    document = write_document(tasks, output=output, rule=rule, command=command, quick=quick)
    found = targets(tasks, reported_half(tasks))
    return StudyResult(tasks=tasks, targets=found, document=document)


def judge_stored(bank: StoredRuns, task: str, rule: DecisionRule, draws: int) -> TaskResult:
    """Return the result of one task: the stored one if nothing has changed, else a new one.

    Args:
        bank: The stored runs; the result is stored in its folder.
        task: Its name.
        rule: Constants.
        draws: Draws of seeds.
    """
    shift_draws = max(1, draws // _SHIFT_DIVISOR)
    digest = _digest(bank.digest(task), rule, draws, shift_draws)
    path = bank.folder / JUDGED_FOLDER / f"{task}.json"
    try:
        stored = read_if_there(path, TaskResult.from_json)
    except ValueError:
        # Of another release: it is replaced below.
        stored = None
    if stored is not None and stored.digest == digest:
        return stored
    result = judge_task(
        bank,
        task,
        rule=rule,
        rules=contenders(),
        draws=draws,
        shift_draws=shift_draws,
        digest=digest,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, result.to_json())
    return result


def _judged(
    bank: StoredRuns, names: Sequence[str], *, rule: DecisionRule, draws: int, processes: int
) -> Iterator[TaskResult]:
    if processes == 1:
        for task in names:
            yield judge_stored(bank, task, rule, draws)
        return
    # Spawned: a forked process inherits the threads' locks of whatever the parent has loaded.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=leave_interrupts_to_the_parent
    ) as pool:
        running = [pool.submit(judge_stored, bank, task, rule, draws) for task in names]
        try:
            for future in running:
                yield future.result()
        except KeyboardInterrupt:
            # Leaving the pool would wait for the tasks in hand, which take minutes; what a task
            # has found is written atomically.
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _digest(stored: str, rule: DecisionRule, draws: int, shift_draws: int) -> str:
    parts = {
        "stored": stored,
        "rule": rule.as_mapping(),
        "draws": [draws, shift_draws],
        "code": _code(),
    }
    return hashlib.sha256(strict_json(parts).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def _code() -> str:
    """Return a hash of the source that judges."""
    package = Path(harness.__file__).parent
    digest = hashlib.sha256()
    for name in _JUDGING:
        path = package / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()
