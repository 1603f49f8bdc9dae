"""What a worker does with a job: train an arm, or probe arms along FP32's first seed, and store."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from pathlib import Path
from typing import Any

import torch

from harness.calibration.bank import Bank, run_key, write_probe, write_run
from harness.calibration.jobs import Job, arm_key, run_settings
from harness.runs.environment import describe_environment
from harness.runs.record import RunRecord
from harness.runs.same_point.probe import measure_same_point
from harness.runs.same_point.settings import KnownRun, SamePointSettings
from harness.runs.trainer import train

# A microsecond is finer than any clock's noise here, and half the digits.
_STEP_TIME_DECIMALS = 6


class JobError(Exception):
    """A job could not be done; the message says why in one line."""


class Workbench:
    """Does jobs in this process.

    Args:
        folder: Of the bank.
        catalogue: Dotted name of the module with `arms_of` and `workload_of`.
    """

    def __init__(self, folder: Path, catalogue: str) -> None:
        self._folder = folder
        self._catalogue: Any = importlib.import_module(catalogue)
        self._environment = describe_environment(torch.device("cpu"), num_threads=1)
        self._arms = functools.cache(self._arms_by_name)
        self._key = functools.cache(self._key_now)

    def do(self, job: Job) -> str:
        """Do a job; return how it ended: a record's status, or `probed`.

        Raises:
            JobError: An arm of the job is no longer there or no longer what it was when the job
                was planned, or FP32's run is missing.
        """
        for name, key in zip(job.arms, job.keys, strict=True):
            # This process read the code later than the one that planned.
            if self._key(job.task, name) != key:
                raise JobError(f"the code of {job.task} {name} has changed since the start")
        if job.kind == "run":
            return self._train(job)
        self._probe(job)
        return "probed"

    def _arms_by_name(self, task: str) -> dict[str, Any]:
        return {arm.name: arm for arm in self._catalogue.arms_of(task)}

    def _arm(self, task: str, name: str) -> Any:
        try:
            return self._arms(task)[name]
        except KeyError:
            raise JobError(f"{task} has no arm {name!r}") from None

    def _key_now(self, task: str, name: str) -> str:
        arm = self._arm(task, name)
        return arm_key(self._catalogue.workload_of(task, arm), arm.policy.content())

    def _train(self, job: Job) -> str:
        (name,), (key,) = job.arms, job.keys
        arm = self._arm(job.task, name)
        workload = self._catalogue.workload_of(job.task, arm)
        record = train(
            workload,
            arm.policy,
            run_settings(workload, seed=job.seed),
            run_key=run_key(key, job.seed),
            environment=self._environment,
        )
        write_run(self._folder, _small(record))
        return record.status

    def _probe(self, job: Job) -> None:
        arms = [self._arm(job.task, name) for name in job.arms]
        reference = next(iter(self._arms(job.task).values()))
        names = [reference.name, *job.arms]
        bank = Bank(self._folder, selection={job.task: names}, num_seeds=1)
        stored = {name: seeds[0] for name, seeds in bank.records(job.task).items()}
        if reference.name not in stored:
            raise JobError(f"{job.task} has no run of {reference.name} with seed 0")
        workload = self._catalogue.workload_of(job.task, reference)
        known = stored[reference.name]
        found = measure_same_point(
            workload,
            [arm.policy for arm in arms],
            run_settings(workload, seed=0),
            reference=reference.policy,
            probe=SamePointSettings(),
            known=KnownRun(
                losses=known.series.get("loss", ()),
                batches=known.fingerprints.batches,
                learning_rates=known.series.get("learning_rate", ()),
            ),
            loss_scales={name: r.series.get("loss_scale", ()) for name, r in stored.items()},
            workloads={arm.name: self._catalogue.workload_of(job.task, arm) for arm in arms},
        )
        for arm, key in zip(arms, job.keys, strict=True):
            write_probe(self._folder, found[arm.name], key=key)


def _small(record: RunRecord) -> RunRecord:
    """Return a record without what nobody asks of a bank: which op of which module ran how."""
    times = record.series.get("step_time_s", ())
    rounded = tuple(round(seconds, _STEP_TIME_DECIMALS) for seconds in times)
    return dataclasses.replace(
        record,
        series={**record.series, "step_time_s": rounded},
        probes={name: found for name, found in record.probes.items() if name != "audit"},
    )
