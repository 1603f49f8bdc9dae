"""A sweep while it runs, seen from the parent process: announce, watch, time, conclude."""

from __future__ import annotations

import atexit
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from harness.analysis.findings import ModelFindings
from harness.experiment import manifest as manifests
from harness.experiment.announcement import announce, unfinished
from harness.experiment.conclude import analyze, conclude, load_records, show
from harness.experiment.copies import make_owed_copies, prepare_store, publish
from harness.experiment.fallback_jobs import with_fallbacks
from harness.experiment.grid import Grid
from harness.experiment.job import progress_folder
from harness.experiment.looks import (
    Job,
    jobs_of,
    jobs_of_look,
    look_line,
    settled_lines,
    undecided,
)
from harness.experiment.plan import Plan, make_plan
from harness.experiment.same_point_records import same_point_records
from harness.experiment.same_point_stage import probe_models
from harness.experiment.seed_plans import plan_of
from harness.experiment.timing_stage import time_models
from harness.progress import ProgressDisplay
from harness.runs.record import RunRecord
from harness.tracking.location import Store


class LiveExperiment:
    """One sweep between its announcement and its conclusion."""

    def __init__(self, grid: Grid, plan: Plan, store: Store | None, *, todo: Sequence[str]) -> None:
        self._grid = grid
        self._config = grid.runs[0]
        self._plan = plan
        self._manifest = plan.manifest
        self._store = store
        # Keys of the runs that had no finished record when the command began.
        self._todo = frozenset(todo)
        self._display: ProgressDisplay | None = None
        self._fallbacks: Iterator[list[Job]] | None = None

    @property
    def sweep_id(self) -> str:
        """The sweep's name, given or made from the hash of its grid."""
        return self._manifest.sweep_id

    @classmethod
    def prepare(cls, grid: Grid, *, sweep: str, command: str, workers: int) -> LiveExperiment:
        """Check workloads and policies, announce what will run, create the store.

        Raises:
            ConfigError: Bad workload, policy or device.
            SystemExit: `dry_run=true`: all is said.
        """
        config = grid.runs[0]
        plan = _checked_plan(grid, sweep=sweep, command=command, workers=workers)
        todo = unfinished(plan.manifest, config.output_dir)
        announce(plan, config, todo=todo, seeds=plan_of(plan.manifest, plan.rule))
        if config.dry_run:
            print("dry run: nothing was started")
            raise SystemExit(0)
        store = prepare_store(config, plan.manifest.models)
        manifests.write(plan.manifest, config.output_dir)
        return cls(grid, plan, store, todo=[run.run_key for run in todo])

    def start(self) -> None:
        """Show progress over all runs from now on."""
        self._watch([run.run_key for run in self._manifest.runs], num_before=0)

    def batches(self) -> Iterator[list[list[str]]]:
        """Yield what to launch, one batch after the other; each must be done before the next.

        With looks: after each the records are judged, who is settled is said, and the next batch
        is for the others, their reference and their control. A finished run that is yielded
        again is reused by its worker, so a repeated command replays its looks without training.
        Then whatever `further_jobs` asks for.
        """
        launched: list[str] = []
        for jobs in self._looks():
            yield self._started([job.overrides for job in jobs], jobs, launched)
            self._stop_display()
        while further := self.further_jobs():
            jobs = [job for job in jobs_of(self._grid, self._manifest) if job.overrides in further]
            yield self._started(further, jobs, launched)
            self._stop_display()

    def further_jobs(self) -> list[tuple[str, ...]]:
        """Return the overrides of runs that the verdicts ask for beyond the grid.

        Asked again after each answer until there is none. What is answered is in the grid and the
        manifest by then.
        """
        if self._fallbacks is None:
            self._fallbacks = self._fallback_looks()
        return [job.overrides for job in next(self._fallbacks, ())]

    def _fallback_looks(self) -> Iterator[list[Job]]:
        """Yield the runs of the policies that failures point to, look by look like all others."""
        if not self._plan.rule.try_fallback:
            return
        findings = self._findings(self._records(), self._manifest.models)
        extended = with_fallbacks(self._grid, self._manifest, findings, self._plan.rule)
        for line in extended.lines:
            print(line, flush=True)
        if not extended.policies:
            return
        self._grid, self._manifest = extended.grid, extended.manifest
        manifests.write(self._manifest, self._config.output_dir)
        # What has been trained so far counts as reused where the looks begin again.
        new = unfinished(self._manifest, self._config.output_dir)
        self._todo = frozenset(run.run_key for run in new)
        yield from self._looks(extended.policies)

    def _looks(self, still_open: Mapping[str, Sequence[str]] | None = None) -> Iterator[list[Job]]:
        """Yield the jobs of each look: of the whole grid, or of these candidates of each model."""
        plan = plan_of(self._manifest, self._plan.rule)
        jobs = jobs_of(self._grid, self._manifest)
        for index in range(len(plan.looks)):
            batch = jobs_of_look(jobs, self._manifest, plan, index, still_open)
            if not batch:
                return
            if index:
                print(look_line(plan, index, batch), flush=True)
            yield batch
            if index + 1 < len(plan.looks):
                still_open = self._judge(still_open, probe=index == 0)

    def _judge(
        self, before: Mapping[str, Sequence[str]] | None, *, probe: bool
    ) -> dict[str, tuple[str, ...]]:
        """Judge the runs so far, say who is settled, and return who goes on, by model.

        The same-point probe is due once, after the first look: a policy that it does not let pass
        needs no further seeds, since the loss cannot answer it.
        """
        records = self._records()
        if probe:
            self._probe(records)
        findings = self._findings(records, self._manifest.models if before is None else before)
        for found in findings:
            candidates = {verdict.policy for verdict in found.verdicts}
            going = candidates if before is None else set(before[found.workload])
            for line in settled_lines(found, candidates - going):
                print(line, flush=True)
        return undecided(findings)

    def _findings(self, records: Sequence[RunRecord], models: Iterable[str]) -> list[ModelFindings]:
        return [
            analyze(
                self._manifest,
                model,
                [record for record in records if record.workload == model],
                rule=self._plan.rule,
                output_dir=self._config.output_dir,
                same_point=same_point_records(self._manifest, model, self._config.output_dir),
            )
            for model in models
        ]

    def _started(
        self, overrides: Sequence[Sequence[str]], jobs: Sequence[Job], launched: list[str]
    ) -> list[list[str]]:
        """Return a batch as a launcher takes it, after showing progress over it."""
        keys = [job.planned.run_key for job in jobs]
        self._watch(keys, num_before=len(launched))
        launched += keys
        # Hydra gives the callback's addition to the sweeper it knows as arguments only.
        name = f"sweep_id={self.sweep_id}"
        return [[*(o for o in job if not o.startswith("sweep_id=")), name] for job in overrides]

    def _watch(self, run_keys: Sequence[str], *, num_before: int) -> None:
        reused = sum(key not in self._todo for key in run_keys)
        self._display = ProgressDisplay(
            progress_folder(self._config.output_dir, self.sweep_id),
            total=num_before + len(run_keys),
            reused=num_before + reused,
            weights={
                key: self._plan.seconds[key]
                for key in run_keys
                if key in self._todo and key in self._plan.seconds
            },
        )
        self._display.__enter__()
        # An interruption passes Hydra by; the terminal's cursor must come back all the same.
        atexit.register(self._stop_display)

    def _stop_display(self) -> None:
        if self._display is not None:
            self._display.__exit__(None, None, None)
            self._display = None

    def _records(self) -> list[RunRecord]:
        records, troubles = load_records(self._manifest, self._config.output_dir)
        for line in troubles:
            print(f"warning: {line}", file=sys.stderr)
        return records

    def _probe(self, records: Sequence[RunRecord]) -> None:
        """Measure what the same-point probe still lacks and note where it lies."""
        if not self._config.probes.gradient_error.enabled:
            return
        keys = probe_models(self._grid, self._manifest, records)
        self._manifest = dataclasses.replace(self._manifest, same_point=keys)
        manifests.write(self._manifest, self._config.output_dir)

    def conclude(self) -> int:
        """Probe, time the steps, analyze, report; return the exit code."""
        self._stop_display()
        config = self._config
        records = self._records()
        self._probe(records)
        if config.throughput.phase:
            time_models(self._grid, self._manifest, records)
        manifest = manifests.completed(self._manifest)
        manifests.write(manifest, config.output_dir)
        conclusion = conclude(manifest, records, rule=self._plan.rule, output_dir=config.output_dir)
        lines = make_owed_copies(self._store, config) + publish(conclusion, manifest, self._store)
        show(conclusion, lines)
        return conclusion.exit_code


def _checked_plan(grid: Grid, *, sweep: str, command: str, workers: int) -> Plan:
    for step in make_plan(grid, sweep=sweep, command=command, workers=workers):
        if isinstance(step, Plan):
            return step
        print(step, flush=True)
    raise AssertionError("make_plan ends with a plan")
