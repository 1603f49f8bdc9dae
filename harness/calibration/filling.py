"""Fills a bank: plans what is missing, lets workers train it, and says how far it is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.calibration.bank import Bank, StoredArm
from harness.calibration.jobs import Job, Plan, make_plan, record_arms
from harness.calibration.wanted import Wanted, selection_of
from harness.calibration.watch import Watch, duration
from harness.calibration.workers import do_jobs


@dataclass(frozen=True, kw_only=True)
class Filled:
    """How filling a bank went.

    Attributes:
        num_done: Runs and probes done now.
        num_left: Runs and probes that are still missing, those that failed among them.
        failures: One line per job that failed; a training that crashed is a record, no failure.
    """

    num_done: int
    num_left: int
    failures: tuple[str, ...]


def fill(
    folder: Path,
    wanted: Wanted,
    *,
    num_workers: int,
    minutes: float | None,
    stream: IO[str],
) -> Filled:
    """Train and probe what is missing; what is stored is not trained again.

    Args:
        folder: Of the bank.
        wanted: What it is to hold.
        num_workers: Processes, one thread each.
        minutes: No job is begun that would end after them; None for no limit.
        stream: Where the estimate and the progress go.

    Raises:
        OSError: The folder cannot be written to.
    """
    began = time.monotonic()
    arms = record_arms(folder, wanted.tasks, catalogue=wanted.catalogue)
    selection = selection_of(wanted)
    arms = {task: {name: arms[task][name] for name in selection[task]} for task in arms}
    bank = Bank(folder, selection=selection, num_seeds=wanted.num_seeds)
    plan = make_plan(bank, arms, num_seeds=wanted.num_seeds)
    for line in _announced(folder, plan, arms, wanted, num_workers=num_workers):
        print(line, file=stream, flush=True)
    if not plan.jobs:
        return Filled(num_done=0, num_left=0, failures=())

    def may_start(job: Job) -> bool:
        if minutes is None:
            return True
        return time.monotonic() - began + plan.seconds[job] <= 60 * minutes

    failures = []
    with Watch(plan, num_workers=num_workers, stream=stream) as watch:
        ended = do_jobs(
            plan.jobs,
            folder=folder,
            catalogue=wanted.catalogue,
            num_workers=num_workers,
            may_start=may_start,
            on_idle=watch.draw,
        )
        # Closed here, so that an interruption leaves no worker behind.
        with closing(ended):
            for done in ended:
                watch.note(done)
                if done.failure:
                    failures.append(f"{done.job.label}: {done.failure}")
    return Filled(
        num_done=watch.num_done,
        num_left=watch.num_wanted - watch.num_done,
        failures=tuple(failures),
    )


def _announced(
    folder: Path,
    plan: Plan,
    arms: Mapping[str, Mapping[str, StoredArm]],
    wanted: Wanted,
    *,
    num_workers: int,
) -> Iterator[str]:
    """Yield what there is to do and how long it should take."""
    num_arms = sum(map(len, arms.values()))
    yield (
        f"{folder}: {len(arms)} tasks, {num_arms} arms, {wanted.num_seeds} seeds; "
        f"{plan.num_stored} runs and probes are stored, {_counted(plan.jobs)} to come"
    )
    if plan.num_unreadable:
        yield f"{plan.num_unreadable} files were no records of this bank and have been set aside"
    if plan.jobs:
        seconds = sum(plan.seconds.values()) / num_workers
        yield (
            f"about {duration(seconds)} with {num_workers} "
            f"worker{'s' if num_workers > 1 else ''}; "
            "once interrupted, the same command goes on from there"
        )


def _counted(jobs: Sequence[Job]) -> str:
    runs = sum(job.kind == "run" for job in jobs)
    probes = sum(len(job.arms) for job in jobs if job.kind == "probe")
    return f"{runs} runs and {probes} same-point probes"
