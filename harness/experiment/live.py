"""A sweep while it runs, seen from the parent process: announce, watch, time, conclude."""

from __future__ import annotations

import atexit
import dataclasses
import sys
from collections.abc import Sequence

from rich.console import Console

from harness.config import RunConfig
from harness.experiment import manifest as manifests
from harness.experiment.conclude import conclude, load_records, show
from harness.experiment.copies import make_owed_copies, prepare_store, publish
from harness.experiment.early_checks import decision_rule
from harness.experiment.grid import Grid
from harness.experiment.job import finished_record, progress_folder
from harness.experiment.manifest import PlannedRun
from harness.experiment.plan import Plan, make_plan
from harness.experiment.same_point_stage import probe_models
from harness.experiment.timing_stage import time_models
from harness.progress import ProgressDisplay
from harness.tracking.location import Store

# Workers start, import torch and MLflow, and the parent times, analyzes and draws afterwards.
START_SECONDS = 12.0
WARNINGS = ("BATCHES_NOT_REPRODUCIBLE", "MODEL_NOT_REPRODUCIBLE", "WEIGHTS_NOT_FP32")


class LiveExperiment:
    """One sweep between its announcement and its conclusion."""

    def __init__(self, grid: Grid, plan: Plan, store: Store | None, *, num_reused: int) -> None:
        self._grid = grid
        self._config = grid.runs[0]
        self._plan = plan
        self._store = store
        self._num_reused = num_reused
        self._display: ProgressDisplay | None = None

    @property
    def sweep_id(self) -> str:
        """The sweep's name, given or made from the hash of its grid."""
        return self._plan.manifest.sweep_id

    @classmethod
    def prepare(cls, grid: Grid, *, sweep: str, command: str, workers: int) -> LiveExperiment:
        """Check workloads and policies, announce what will run, create the store.

        Raises:
            ConfigError: Bad workload, policy or device.
            SystemExit: `dry_run=true`: all is said.
        """
        config = grid.runs[0]
        plan = _checked_plan(grid, sweep=sweep, command=command, workers=workers)
        todo = _unfinished(plan, config)
        _announce(plan, config, todo=todo)
        if config.dry_run:
            print("dry run: nothing was started")
            raise SystemExit(0)
        store = prepare_store(config, plan.manifest.models)
        manifests.write(plan.manifest, config.output_dir)
        return cls(grid, plan, store, num_reused=len(plan.manifest.runs) - len(todo))

    def start(self) -> None:
        """Show progress from now on."""
        self._display = ProgressDisplay(
            progress_folder(self._config.output_dir, self.sweep_id),
            total=len(self._plan.manifest.runs),
            reused=self._num_reused,
            weights=self._plan.seconds,
        )
        self._display.__enter__()
        # An interruption passes Hydra by; the terminal's cursor must come back all the same.
        atexit.register(self._stop_display)

    def _stop_display(self) -> None:
        if self._display is not None:
            self._display.__exit__(None, None, None)
            self._display = None

    def conclude(self) -> int:
        """Probe, time the steps, analyze, report; return the exit code."""
        self._stop_display()
        config, manifest = self._config, self._plan.manifest
        records, troubles = load_records(manifest, config.output_dir)
        for line in troubles:
            print(f"warning: {line}", file=sys.stderr)
        if config.probes.gradient_error.enabled:
            keys = probe_models(self._grid, manifest, records)
            manifest = dataclasses.replace(manifest, same_point=keys)
        if config.throughput.phase:
            time_models(self._grid, manifest, records)
        manifest = manifests.completed(manifest)
        manifests.write(manifest, config.output_dir)
        conclusion = conclude(
            manifest, records, rule=decision_rule(config.decision), output_dir=config.output_dir
        )
        lines = make_owed_copies(self._store, config) + publish(conclusion, manifest, self._store)
        show(conclusion, lines)
        return conclusion.exit_code


def _checked_plan(grid: Grid, *, sweep: str, command: str, workers: int) -> Plan:
    for step in make_plan(grid, sweep=sweep, command=command, workers=workers):
        if isinstance(step, Plan):
            return step
        print(step, flush=True)
    raise AssertionError("make_plan ends with a plan")


def _unfinished(plan: Plan, config: RunConfig) -> list[PlannedRun]:
    """Return the runs of the plan that have no finished record; reads every record there is."""
    return [
        run for run in plan.manifest.runs if finished_record(config.output_dir, run.run_key) is None
    ]


def _announce(plan: Plan, config: RunConfig, *, todo: Sequence[PlannedRun]) -> None:
    manifest = plan.manifest
    policies = list(dict.fromkeys(run.policy for run in manifest.runs))
    seeds = list(dict.fromkeys(run.seed for run in manifest.runs))
    models = ", ".join(f"{name} ({steps} steps)" for name, steps in plan.steps.items())
    marked = [f"{p} (reference)" if p == manifest.reference else p for p in policies]
    finished = len(manifest.runs) - len(todo)
    console = Console(highlight=False)

    def line(label: str, text: str) -> None:
        console.print(f"  {label:<10}{text}", soft_wrap=True, markup=False)

    console.print(f"sweep {manifest.sweep_id}", markup=False)
    line("models", models)
    for name, sha256 in plan.data.items():
        line("data", f"{name}: SHA-256 {sha256}")
    line("policies", ", ".join(marked))
    line("seeds", ", ".join(map(str, seeds)))
    reused = f", of which {finished} are finished and reused" if finished else ""
    line("runs", f"{len(manifest.runs)}{reused}; {plan.workers} at a time on {manifest.device}")
    line("estimate", _estimate(plan, todo))
    line("results", f"{config.output_dir}/runs, {config.output_dir}/reports/{manifest.sweep_id}")
    for text in manifest.skipped:
        line("note", text)
    for model, note in plan.notes:
        label = "warning" if note.code in WARNINGS else "note"
        line(label, f"{model}: {note.message}" if model else note.message)


def _estimate(plan: Plan, todo: Sequence[PlannedRun]) -> str:
    if not todo:
        return "nothing to train"
    seconds = START_SECONDS + sum(plan.seconds[run.run_key] for run in todo) / plan.workers
    megabytes = len(todo) * plan.bytes_per_run / 1e6
    # Shared caches, clock speed and neighbours: half as much again was seen on quiet machines.
    return f"{_duration(seconds, 2 * seconds)}, {megabytes:.0f} MB of disk"


def _duration(low: float, high: float) -> str:
    if high < 120:
        return f"{max(5, round(low, -1)):.0f} to {round(high, -1):.0f} s"
    return f"{max(1, round(low / 60))} to {max(2, round(high / 60))} min"
