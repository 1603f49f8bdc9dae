"""The same-point probe of a sweep: after all runs, in the parent, before the timing."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from harness.config import RunConfig
from harness.config_schema import GradientErrorConf
from harness.experiment.grid import Grid, by_model
from harness.experiment.manifest import Manifest
from harness.experiment.plan import num_steps, num_threads, resolve_device
from harness.experiment.same_point_records import record_key, record_path
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.same_point.probe import measure_same_point
from harness.runs.same_point.record import SamePointRecord, read_same_point, write_same_point
from harness.runs.same_point.settings import KnownRun, SamePointSettings
from harness.runs.settings import ProbeSettings, RunSettings
from harness.workloads.base import Workload
from harness.workloads.registry import make_workload

# Model name -> policy name -> key of the record.
Keys = dict[str, dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """The probe of one model: what there is to measure."""

    config: RunConfig
    workload: Workload
    reference: PrecisionPolicy
    stored: RunRecord
    candidates: tuple[PrecisionPolicy, ...]
    scales: Mapping[str, tuple[float, ...]]

    @property
    def settings(self) -> GradientErrorConf:
        return self.config.probes.gradient_error

    def key(self, policy: PrecisionPolicy) -> str:
        return record_key(self.stored.run_key, policy, self.settings)


def probe_models(grid: Grid, manifest: Manifest, records: Sequence[RunRecord]) -> Keys:
    """Measure every candidate that trained, on every model whose reference is stable.

    What an earlier invocation measured is kept.

    Returns:
        The keys of all records, new and kept.
    """
    keys: Keys = {}
    for members in by_model(grid):
        stage = _stage(members, manifest, records)
        if stage is None:
            continue
        missing = [p for p in stage.candidates if not _is_stored(stage, p)]
        if missing:
            try:
                _measure(stage, missing)
            except Exception as error:  # noqa: BLE001 - what is trained is judged without the probe
                name = stage.workload.name
                print(f"warning: no same-point probe of {name}: {error!r}", file=sys.stderr)
        keys[stage.workload.name] = {p.name: stage.key(p) for p in stage.candidates}
    return keys


def _stage(
    members: Sequence[RunConfig], manifest: Manifest, records: Sequence[RunRecord]
) -> _Stage | None:
    """Return what to measure of one model; None when there is nothing."""
    workload = make_workload(members[0].workload)
    own = [record for record in records if record.workload == workload.name]
    references = {r.seed: r for r in own if r.policy == manifest.reference}
    stable = [
        references[seed]
        for seed in manifest.seeds(workload.name)
        if seed in references and references[seed].status == "completed"
    ]
    trained = {r.policy for r in own if r.status != "crashed"}
    policies = {run.policy["name"]: PrecisionPolicy.from_mapping(run.policy) for run in members}
    candidates = tuple(
        policy
        for policy in policies.values()
        if policy.name in trained and not policy.is_control and policy.name != manifest.reference
    )
    if not stable or not candidates:
        return None
    seed = stable[0].seed
    return _Stage(
        config=members[0],
        workload=workload,
        reference=policies[manifest.reference],
        stored=stable[0],
        candidates=candidates,
        scales={r.policy: r.series.get("loss_scale", ()) for r in own if r.seed == seed},
    )


def _is_stored(stage: _Stage, policy: PrecisionPolicy) -> bool:
    try:
        path = record_path(stage.config.output_dir, stage.key(policy))
        return read_same_point(path) is not None
    except ValueError:
        return False  # of another release, or cut short: measured anew


def _measure(stage: _Stage, candidates: Sequence[PrecisionPolicy]) -> None:
    config, stored = stage.config, stage.stored
    device = resolve_device(config.device)
    names = ", ".join(policy.name for policy in candidates)
    print(
        f"same-point probe of {stage.workload.name}, about {_expected(stage, candidates)}: {names}",
        flush=True,
    )
    started = time.perf_counter()
    with _bar() as progress:
        task = progress.add_task("", total=None)

        def show(done: int, total: int, policy: str) -> None:
            progress.update(task, completed=done, total=total, description=policy)

        found = measure_same_point(
            stage.workload,
            candidates,
            RunSettings(
                steps=num_steps(config, stage.workload),
                seed=stored.seed,
                device=str(device),
                num_threads=num_threads(config, device),
                backend=config.train.backend,
                probes=ProbeSettings.off(),
                tail_evaluations=1,
            ),
            reference=stage.reference,
            probe=same_point_settings(stage.settings),
            known=KnownRun(
                losses=stored.series.get("loss", ()),
                batches=stored.fingerprints.batches,
                learning_rates=stored.series.get("learning_rate", ()),
            ),
            loss_scales=stage.scales,
            on_progress=show,
        )
    for policy in candidates:
        path = record_path(config.output_dir, stage.key(policy))
        write_same_point(found[policy.name], path)
    print(f"  took {time.perf_counter() - started:.1f} s", flush=True)
    for line in _troubles(found):
        print(f"  {line}", flush=True)


def same_point_settings(settings: GradientErrorConf) -> SamePointSettings:
    """Return what `probes.gradient_error` asks for.

    Raises:
        ValueError: A value is out of range; the message names the key.
    """
    return SamePointSettings(
        points=tuple(settings.points),
        batches=settings.batches,
        fp64_max_parameters=settings.fp64_max_parameters,
    )


def _bar() -> Progress:
    console = Console()
    return Progress(
        TextColumn("  {task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _expected(stage: _Stage, candidates: Sequence[PrecisionPolicy]) -> str:
    """Return the time that this takes, from what the runs' steps took."""
    step = statistics.median(stage.stored.series.get("step_time_s") or (0.0,))
    points = len(same_point_settings(stage.settings).steps(stage.stored.num_steps))
    # A step and its undoing, the calls module by module: 1.5 steps' time, measured on char_gpt.
    beside = 1.5 * points * stage.settings.batches * (1 + len(candidates))
    seconds = step * (stage.stored.num_steps + beside)
    return f"{seconds / 60:.0f} min" if seconds > 120 else f"{max(1, round(seconds))} s"


def _troubles(found: Mapping[str, SamePointRecord]) -> list[str]:
    lines = [f"{name} was not measured: {r.failed}" for name, r in found.items() if r.failed]
    if any(record.same_trajectory is False for record in found.values()):
        lines.append("the FP32 run did not repeat itself bit for bit beside the probe")
    return lines
