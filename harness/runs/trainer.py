"""One seeded run of one workload under one policy, from a model's first weights to a record."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from harness.precision.policy import PrecisionPolicy
from harness.runs.crash import describe_crash
from harness.runs.determinism import deterministic, preserved_random_state
from harness.runs.loop import EndedBy, TrainingRun
from harness.runs.memory import PeakMemory
from harness.runs.record import RunRecord
from harness.runs.settings import Progress, RunSettings
from harness.runs.summary import make_record
from harness.workloads.base import Workload

__all__ = ["Progress", "RunSettings", "train"]


def train(
    workload: Workload,
    policy: PrecisionPolicy,
    settings: RunSettings,
    *,
    run_key: str,
    environment: dict[str, Any],
    on_progress: Callable[[Progress], None] | None = None,
    ended_by: EndedBy | None = None,
) -> RunRecord:
    """Train and return the record.

    Whatever goes wrong between building the model and the last evaluation becomes a record with
    status `crashed`; only interruptions (`KeyboardInterrupt`, `SystemExit`) pass through. Random
    state, threads, backend switches and kernels of this process are as before on return.

    Args:
        workload: What is trained.
        policy: In which precision.
        settings: How long, which seed, on what.
        run_key: Key of the record.
        environment: Goes into the record as it is.
        on_progress: Called some times a second.
        ended_by: Called with the series so far (name -> one float per step) each time they have
            been fetched, every 25 steps; a sentence ends the run as diverged, with an event
            `ended_early`. It only reads: a run that it does not end is the same bit for bit.
    """
    run = TrainingRun(workload, policy, settings, on_progress, ended_by=ended_by)
    started = time.perf_counter()
    crash = None
    device = torch.device(settings.device)
    memory = PeakMemory(device)
    try:
        with preserved_random_state(device), deterministic(settings.num_threads, run.notes):
            run.train(device)
    except Exception as error:  # noqa: BLE001 - a crash of the user's model is a result
        crash = describe_crash(error, position=run.position, model=run.model)
        run.flush_quietly()
    peak, source = memory.read()
    record = make_record(run, crash, run_key=run_key, environment=environment)
    return dataclasses.replace(
        record,
        peak_memory_bytes=peak,
        peak_memory_source=source,
        wall_time_s=time.perf_counter() - started,
    )
