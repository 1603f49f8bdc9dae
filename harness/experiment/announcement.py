"""What will run, said before anything starts: models, policies, seeds, an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.analysis.seed_plan import SeedPlan
from harness.analysis.wording import listing
from harness.config import RunConfig
from harness.experiment.job import finished_record
from harness.experiment.manifest import Manifest, PlannedRun
from harness.experiment.plan import Plan

# Workers start, import torch and MLflow, and the parent times, analyzes and draws afterwards.
START_SECONDS = 12.0
WARNINGS = ("BATCHES_NOT_REPRODUCIBLE", "MODEL_NOT_REPRODUCIBLE", "WEIGHTS_NOT_FP32")


def unfinished(manifest: Manifest, output_dir: Path) -> list[PlannedRun]:
    """Return the runs that have no finished record; reads every record there is."""
    return [run for run in manifest.runs if finished_record(output_dir, run.run_key) is None]


def announce(plan: Plan, config: RunConfig, *, todo: Sequence[PlannedRun], seeds: SeedPlan) -> None:
    """Print what will run.

    Args:
        plan: The checked sweep.
        config: What its runs share.
        todo: The runs that are not finished yet.
        seeds: Its plan of seeds.
    """
    manifest = plan.manifest
    policies = list(dict.fromkeys(run.policy for run in manifest.runs))
    models = ", ".join(f"{name} ({steps} steps)" for name, steps in plan.steps.items())
    marked = [f"{p} (reference)" if p == manifest.reference else p for p in policies]
    console = Console(highlight=False)

    def line(label: str, text: str) -> None:
        console.print(f"  {label:<10}{text}", soft_wrap=True, markup=False)

    console.print(f"sweep {manifest.sweep_id}", markup=False)
    line("models", models)
    for name, sha256 in plan.data.items():
        line("data", f"{name}: SHA-256 {sha256}")
    line("policies", ", ".join(marked))
    line("seeds", seeds_line(manifest, seeds))
    line(
        "runs", f"{runs_line(manifest, seeds, todo)}; {plan.workers} at a time on {manifest.device}"
    )
    line("estimate", _estimate(plan, todo, seeds))
    line("results", f"{config.output_dir}/runs, {config.output_dir}/reports/{manifest.sweep_id}")
    for text in manifest.skipped:
        line("note", text)
    for model, note in plan.notes:
        label = "warning" if note.code in WARNINGS else "note"
        line(label, f"{model}: {note.message}" if model else note.message)


def seeds_line(manifest: Manifest, plan: SeedPlan) -> str:
    """Return which seeds are run, and when they are judged."""
    seeds = list(dict.fromkeys(run.seed for run in manifest.runs))
    if not plan.adaptive:
        return ", ".join(map(str, seeds))
    if plan.kind == "always_valid":
        return (
            f"{plan.looks[0]} to {plan.max_pairs}: a look after every one; "
            "who is settled goes no further"
        )
    return f"in looks of {listing([str(n) for n in plan.looks])}; who is settled goes no further"


def runs_line(manifest: Manifest, plan: SeedPlan, todo: Sequence[PlannedRun]) -> str:
    """Return how many runs there are, how many of them at once, and how many are finished."""
    num_runs = len(manifest.runs)
    finished = num_runs - len(todo)
    reused = f", of which {finished} are finished and reused" if finished else ""
    if not plan.adaptive:
        return f"{num_runs}{reused}"
    first = len(_first_look(manifest, plan, manifest.runs))
    return (
        f"{first} now (look 1 of {len(plan.looks)}), up to {num_runs} if nobody is settled{reused}"
    )


def _first_look(manifest: Manifest, plan: SeedPlan, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    return [run for run in runs if run.seed in plan.seeds_at(0, manifest.seeds(run.workload))]


def _estimate(plan: Plan, todo: Sequence[PlannedRun], seeds: SeedPlan) -> str:
    """Return time and disk; with looks from the first look alone to all of them."""
    if not todo:
        return "nothing to train"
    first = _first_look(plan.manifest, seeds, todo) if seeds.adaptive else todo

    def seconds(runs: Sequence[PlannedRun]) -> float:
        return START_SECONDS + sum(plan.seconds[run.run_key] for run in runs) / plan.workers

    least, most = (round(len(runs) * plan.bytes_per_run / 1e6) for runs in (first, todo))
    disk = f"{most}" if least == most else f"{least} to {most}"
    # Shared caches, clock speed and neighbours: half as much again was seen on quiet machines.
    return f"{_duration(seconds(first), 2 * seconds(todo))}, {disk} MB of disk"


def _duration(low: float, high: float) -> str:
    if high < 120:
        return f"{max(5, round(low, -1)):.0f} to {round(high, -1):.0f} s"
    return f"{max(1, round(low / 60))} to {max(2, round(high / 60))} min"
