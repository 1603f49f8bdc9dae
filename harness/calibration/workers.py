"""Worker processes that do jobs one after the other, and outlive neither their parent nor a fault.

Each has a pipe to the parent: a job goes down, how it ended comes back. A worker that dies (killed
for memory, say) costs its job and is replaced; one whose parent dies reads the end of its pipe and
ends after the job in hand.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from harness.calibration.interrupts import leave_interrupts_to_the_parent
from harness.calibration.jobs import Job

# Not fork: torch's threads do not survive one.
_CONTEXT = multiprocessing.get_context("spawn")
# Workers that die one after the other without doing a job: the fault is not the jobs'.
_MAX_DEATHS_IN_A_ROW = 5
# A pause between looks at the clock while nothing ends.
_WAKE_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a job ended.

    Attributes:
        job: The job.
        outcome: As `Workbench.do` returns it; empty when the job failed.
        failure: Why it failed, in one line.
        seconds: From hand-out to answer.
    """

    job: Job
    outcome: str = ""
    failure: str = ""
    seconds: float


@dataclass(kw_only=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    job: Job | None = None
    since: float = 0.0


def do_jobs(
    jobs: Sequence[Job],
    *,
    folder: Path,
    catalogue: str,
    num_workers: int,
    may_start: Callable[[Job], bool],
    on_idle: Callable[[], None],
) -> Generator[Done, None, None]:
    """Do jobs in order, on several workers, and yield each as it ends.

    On leaving, by an exception or by closing the iterator too, no worker is left.

    Args:
        jobs: In order; a probe waits for the runs of its task with seed 0.
        folder: Of the bank.
        catalogue: As for `Workbench`.
        num_workers: Processes, one torch thread each.
        may_start: Asked before each job is handed out; once it says no, none is handed out.
        on_idle: Called at least once a second.

    Raises:
        RuntimeError: Workers die one after the other.
    """
    crew = _Crew(folder, catalogue, min(num_workers, max(1, len(jobs))))
    with contextlib.closing(crew):
        waiting, stopped = list(jobs), False
        while True:
            for worker in crew.idle():
                job = None if stopped else _next(waiting, crew.in_hand())
                if job is None:
                    continue
                if not may_start(job):
                    stopped = True
                    continue
                waiting.remove(job)
                crew.hand_out(worker, job)
            if not crew.in_hand():
                return
            yield from crew.ended(_WAKE_EVERY_S)
            on_idle()


def _next(waiting: Sequence[Job], in_hand: Sequence[Job]) -> Job | None:
    """Return the first job that needs nothing which is still to come."""
    for job in waiting:
        if job.kind == "run":
            return job
        unfinished = (*in_hand, *waiting)
        if not any(j.kind == "run" and j.seed == 0 and j.task == job.task for j in unfinished):
            return job
    return None


class _Crew:
    """The workers that are there."""

    def __init__(self, folder: Path, catalogue: str, num_workers: int) -> None:
        self._folder, self._catalogue = folder, catalogue
        self._deaths_in_a_row = 0
        self._workers = [self._hire() for _ in range(num_workers)]

    def _hire(self) -> _Worker:
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(
            target=_serve, args=(theirs, self._folder, self._catalogue), daemon=True
        )
        process.start()
        theirs.close()
        return _Worker(process=process, pipe=ours)

    def idle(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.job is None]

    def in_hand(self) -> list[Job]:
        return [worker.job for worker in self._workers if worker.job is not None]

    def hand_out(self, worker: _Worker, job: Job) -> None:
        worker.job, worker.since = job, time.monotonic()
        # One that has died answers with the end of its pipe.
        with contextlib.suppress(OSError):
            worker.pipe.send(job)

    def ended(self, timeout_s: float) -> list[Done]:
        """Return the jobs that end within a time; a worker that died is replaced."""
        busy = {worker.pipe: worker for worker in self._workers if worker.job is not None}
        found = []
        for pipe in wait(list(busy), timeout=timeout_s):
            assert isinstance(pipe, Connection)
            worker = busy[pipe]
            job = worker.job
            assert job is not None
            seconds = time.monotonic() - worker.since
            try:
                outcome, failure = pipe.recv()
                self._deaths_in_a_row = 0
            except (EOFError, OSError):
                outcome, failure = "", self._replace(worker)
            worker.job = None
            found.append(Done(job=job, outcome=outcome, failure=failure, seconds=seconds))
        return found

    def _replace(self, worker: _Worker) -> str:
        """Put another in a dead worker's place; return how it died."""
        worker.process.join()
        worker.pipe.close()
        how = f"its process ended with {worker.process.exitcode}"
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row >= _MAX_DEATHS_IN_A_ROW:
            raise RuntimeError(f"no worker stays alive; of the last one {how}")
        self._workers[self._workers.index(worker)] = self._hire()
        return how

    def close(self) -> None:
        """End all workers: at once, since records are written atomically."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()


def _serve(pipe: Connection, folder: Path, catalogue: str) -> None:
    """Do jobs until the pipe ends."""
    leave_interrupts_to_the_parent()
    import torch

    from harness.calibration.training import Workbench

    torch.set_num_threads(1)
    bench = Workbench(folder, catalogue)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (bench.do(job), "")
        except Exception as error:  # noqa: BLE001 - one job's fault must not end the others
            first = (str(error).splitlines() or [""])[0]
            answer = ("", f"{type(error).__name__}: {first}")
        try:
            pipe.send(answer)
        except OSError:
            return
