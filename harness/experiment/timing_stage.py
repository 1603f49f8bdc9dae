"""The timing stage of a sweep: after all runs, in the parent, alone on the device."""

from __future__ import annotations

from collections.abc import Sequence

from harness.config import RunConfig
from harness.experiment.conclude import timing_folder
from harness.experiment.grid import Grid, by_model
from harness.experiment.manifest import Manifest
from harness.experiment.plan import num_steps, num_threads, resolve_device
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.settings import RunSettings
from harness.runs.timing.record import TimingRecord, read_timing, write_timing
from harness.runs.timing.step_times import NO_PROFILE, measure_step_times
from harness.workloads.base import Workload
from harness.workloads.registry import make_workload


def time_models(grid: Grid, manifest: Manifest, records: Sequence[RunRecord]) -> None:
    """Measure step-time ratios of every model whose candidates ran natively.

    What was emulated is not timed: it says nothing about the format's speed. A stage that an
    earlier invocation of the same sweep finished is kept.
    """
    for members in by_model(grid):
        workload = make_workload(members[0].workload)
        native = {
            record.policy
            for record in records
            if record.workload == workload.name
            and record.execution == "native"
            and record.status != "crashed"
        }
        policies = _distinct(members, keep=native | {manifest.reference})
        if not any(not p.is_reference and not p.is_control for p in policies):
            continue
        folder = timing_folder(members[0].output_dir, manifest.sweep_id, workload.name)
        known = read_timing(folder)
        if known is not None and _has_all(known, policies, members[0].probes.profile.steps):
            continue
        names_in_order = ", ".join(policy.name for policy in policies)
        print(f"timing the steps of {workload.name}, some seconds: {names_in_order}", flush=True)
        write_timing(_measure(members[0], workload, policies, manifest.reference), folder)


def _has_all(known: TimingRecord, policies: Sequence[PrecisionPolicy], profile_steps: int) -> bool:
    timed = {p.name for p in policies} <= {*known.step_time_s, *known.excluded}
    profiled = profile_steps == 0 or bool(known.profiles) or NO_PROFILE in known.note
    return timed and profiled


def _measure(
    config: RunConfig, workload: Workload, policies: Sequence[PrecisionPolicy], reference: str
) -> TimingRecord:
    device = resolve_device(config.device)
    return measure_step_times(
        workload,
        policies,
        RunSettings(
            steps=num_steps(config, workload),
            seed=config.seed,
            device=str(device),
            num_threads=num_threads(config, device),
            backend=config.train.backend,
        ),
        reference=reference,
        blocks=config.throughput.blocks,
        steps_per_block=config.throughput.steps_per_block,
        warmup_steps=config.throughput.warmup_steps,
        profile_steps=config.probes.profile.steps,
    )


def _distinct(members: Sequence[RunConfig], *, keep: set[str]) -> list[PrecisionPolicy]:
    policies = {run.policy["name"]: run.policy for run in members if run.policy["name"] in keep}
    return [PrecisionPolicy.from_mapping(policy) for policy in policies.values()]
