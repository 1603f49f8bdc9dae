"""What there is to train for a bank, what of it is stored, and in which order the rest comes."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from harness import __version__
from harness.calibration.bank import Bank, StoredArm, read_arms, write_arms
from harness.calibration.content import content_hash
from harness.calibration.wanted import CATALOGUE
from harness.runs.environment import bf16_is_native
from harness.runs.settings import ProbeSettings, RunSettings
from harness.workloads.base import Workload

# Each costs one more FP32 run, and what a kill loses is at most this many probes.
ARMS_PER_PROBE = 8
# Before anything has been timed.
SECONDS_PER_RUN = 0.8


@dataclass(frozen=True, kw_only=True)
class Job:
    """One thing that a worker does.

    Attributes:
        kind: `run`, or `probe`: the same-point probe of several arms along FP32's first seed.
        task: Of the arms.
        arms: One for a run.
        seed: Of a run; 0 for a probe.
        keys: Key of each arm.
    """

    kind: Literal["run", "probe"]
    task: str
    arms: tuple[str, ...]
    keys: tuple[str, ...]
    seed: int = 0

    @property
    def label(self) -> str:
        """Return what a reader is told about it."""
        if self.kind == "probe":
            return f"{self.task} same-point probe of {len(self.arms)} arms"
        return f"{self.task} {self.arms[0]} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a bank still needs.

    Attributes:
        jobs: In order: references first, then seed by seed, so that a bank that was interrupted
            has as many seeds of every arm, but for one.
        num_stored: Jobs that are done already.
        seconds: Job -> expected seconds.
        num_unreadable: Files that were set aside.
    """

    jobs: tuple[Job, ...]
    num_stored: int
    seconds: Mapping[Job, float]
    num_unreadable: int


def run_settings(workload: Workload, *, seed: int) -> RunSettings:
    """Return how a run of the bank is made: one thread, step probes off."""
    return RunSettings(
        steps=workload.default_steps,
        seed=seed,
        device="cpu",
        num_threads=1,
        probes=ProbeSettings.off(),
    )


def arm_key(workload: Workload, content: Mapping[str, Any]) -> str:
    """Return 16 hex digits over what can change an arm's numbers, but the seed.

    Task, faults, policy and settings by their content. The code that trains (`runs`, `precision`)
    by the release alone: after a change there that alters numbers, train into another folder.

    Args:
        workload: The arm's own, with its functions in it.
        content: Of its policy.
    """
    return content_hash(
        workload,
        dict(content),
        dataclasses.asdict(run_settings(workload, seed=0)),
        torch.__version__,
        __version__,
        torch.backends.cpu.get_cpu_capability(),
        bf16_is_native(torch.device("cpu")),
    )


def record_arms(
    folder: Path, tasks: Sequence[str], *, catalogue: str = CATALOGUE
) -> dict[str, dict[str, StoredArm]]:
    """Write what the arms of each task are now, all of them; return them by task and name."""
    module = importlib.import_module(catalogue)
    found = {}
    for task in tasks:
        arms = [
            StoredArm(
                name=arm.name,
                kind=arm.kind,
                family=arm.family,
                dose=arm.dose,
                sentence=arm.sentence,
                key=arm_key(module.workload_of(task, arm), arm.policy.content()),
            )
            for arm in module.arms_of(task)
        ]
        write_arms(folder, task, arms)
        found[task] = read_arms(folder, task)
    return found


def make_plan(
    bank: Bank,
    arms: Mapping[str, Mapping[str, StoredArm]],
    *,
    num_seeds: int,
    probes: bool = True,
) -> Plan:
    """Return what is missing of a bank, and how long it should take on one core.

    Args:
        bank: As it is.
        arms: Task -> name -> arm, the reference first; only these are wanted.
        num_seeds: Seeds 0 to `num_seeds` - 1 are wanted of each.
        probes: Whether same-point probes are wanted too.
    """
    wanted = list(_ordered(arms, num_seeds=num_seeds, probes=probes))
    missing = [job for job in wanted if not _is_stored(bank, job)]
    jobs = [*_grouped(job for job in missing if job.kind == "probe")]
    runs = [job for job in missing if job.kind == "run"]
    # A probe reads seed 0 of its arms: behind the other seeds nobody waits for it.
    later = next((i for i, job in enumerate(runs) if job.seed > 1), len(runs))
    jobs = [*runs[:later], *jobs, *runs[later:]]
    return Plan(
        jobs=tuple(jobs),
        num_stored=len(wanted) - len(missing),
        seconds=_expected(bank, jobs),
        num_unreadable=sum(map(len, bank.set_aside.values())),
    )


def _ordered(
    arms: Mapping[str, Mapping[str, StoredArm]], *, num_seeds: int, probes: bool
) -> Iterator[Job]:
    """Yield every run by seed, references first, then single probes."""
    for seed in range(num_seeds):
        for is_first in (True, False):
            for task, of_task in arms.items():
                for index, arm in enumerate(of_task.values()):
                    if (index == 0) is is_first:
                        yield Job(
                            kind="run", task=task, arms=(arm.name,), keys=(arm.key,), seed=seed
                        )
    if probes:
        for task, of_task in arms.items():
            for arm in list(of_task.values())[1:]:
                yield Job(kind="probe", task=task, arms=(arm.name,), keys=(arm.key,))


def _is_stored(bank: Bank, job: Job) -> bool:
    (name,) = job.arms
    if job.kind == "probe":
        return name in bank.same_point(job.task)
    return job.seed in bank.records(job.task).get(name, {})


def _grouped(probes: Iterator[Job]) -> Iterator[Job]:
    """Yield probes of several arms of a task at once: they share the FP32 run."""
    by_task: dict[str, list[Job]] = {}
    for job in probes:
        by_task.setdefault(job.task, []).append(job)
    for task, jobs in by_task.items():
        for start in range(0, len(jobs), ARMS_PER_PROBE):
            part = jobs[start : start + ARMS_PER_PROBE]
            yield Job(
                kind="probe",
                task=task,
                arms=tuple(job.arms[0] for job in part),
                keys=tuple(job.keys[0] for job in part),
            )


def _expected(bank: Bank, jobs: Sequence[Job]) -> dict[Job, float]:
    """Return expected seconds: of the arm if some of it is stored, else of its task, else of all.

    Medians, so that a run which another program slowed down does not count.
    """
    by_arm = {
        (task, arm): _median([record.wall_time_s for record in seeds.values()])
        for task in {job.task for job in jobs}
        for arm, seeds in bank.records(task).items()
    }
    of_all = _median(list(by_arm.values())) if by_arm else SECONDS_PER_RUN
    by_task = {
        task: _median([s for (other, _), s in by_arm.items() if other == task] or [of_all])
        for task in {job.task for job in jobs}
    }

    def seconds(job: Job) -> float:
        if job.kind == "run":
            return by_arm.get((job.task, job.arms[0]), by_task[job.task])
        # Measured on char_gpt: a candidate's steps beside the run take about a run.
        return by_task[job.task] * (1 + len(job.arms))

    return {job: seconds(job) for job in jobs}


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
