"""Which runs each look takes, and what is said between looks; nothing here trains."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.findings import ModelFindings, Verdict
from harness.analysis.seed_plan import SeedPlan, open_policies
from harness.analysis.wording import counted, seeds_text
from harness.experiment.grid import Grid
from harness.experiment.manifest import Manifest, PlannedRun, workload_choice
from harness.experiment.seed_plans import seeds_of_look
from harness.precision.policy import PrecisionPolicy

_WORDS = {"accept": "accepted", "reject": "rejected", "inconclusive": "not decided"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run as a launcher takes it.

    Attributes:
        overrides: The overrides that compose it, the sweep's name not among them.
        planned: The run of the manifest.
        is_shared: Whether other policies need it: a run of the reference or of a control.
    """

    overrides: tuple[str, ...]
    planned: PlannedRun
    is_shared: bool


def jobs_of(grid: Grid, manifest: Manifest) -> tuple[Job, ...]:
    """Return the jobs of all runs that the manifest has, in grid order."""
    planned = {(run.choice, run.policy, run.seed): run for run in manifest.runs}
    jobs = []
    for run, overrides in zip(grid.runs, grid.jobs, strict=True):
        policy = PrecisionPolicy.from_mapping(run.policy)
        found = planned.get((workload_choice(run.workload), policy.name, run.seed))
        if found is not None:  # else left out on purpose, and the plan has said why
            shared = policy.is_control or policy.name == manifest.reference
            jobs.append(Job(overrides=overrides, planned=found, is_shared=shared))
    return tuple(jobs)


def jobs_of_look(
    jobs: Sequence[Job],
    manifest: Manifest,
    plan: SeedPlan,
    index: int,
    still_open: Mapping[str, Sequence[str]] | None = None,
) -> list[Job]:
    """Return what look `index` (from 0) adds, in launch order.

    A fixed plan launches the grid as it stands. With looks it goes by model and seed, the reference
    first: whoever fails on the first seed is known before the second is due.

    Args:
        jobs: All jobs.
        manifest: The sweep.
        plan: Its looks.
        index: Number of the look, from 0.
        still_open: Model -> candidates that are undecided; None before the first look. A model
            with none of them is done, its reference and control included.
    """
    if not plan.adaptive and still_open is not None:
        return [j for j in jobs if j.planned.policy in still_open.get(j.planned.workload, ())]

    def goes_on(job: Job) -> bool:
        if still_open is None:
            return True
        going = still_open.get(job.planned.workload, ())
        return job.planned.policy in going or (job.is_shared and bool(going))

    chosen = [job for job in jobs if goes_on(job)]
    if not plan.adaptive:
        return chosen
    seeds = {m: seeds_of_look(plan, manifest.seeds(m), index) for m in manifest.models}
    models = manifest.models

    def place(job: Job) -> tuple[int, int, bool]:
        run = job.planned
        by_seed = seeds[run.workload].index(run.seed)
        return models.index(run.workload), by_seed, run.policy != manifest.reference

    return sorted((j for j in chosen if j.planned.seed in seeds[j.planned.workload]), key=place)


def undecided(findings: Sequence[ModelFindings]) -> dict[str, tuple[str, ...]]:
    """Return the candidates of each model that go on; a model without any is left out."""
    found = {f.workload: open_policies(f) for f in findings if f.failed is None}
    return {model: policies for model, policies in found.items() if policies}


def settled_lines(findings: ModelFindings, already: Collection[str]) -> Iterator[str]:
    """Yield a line for each policy that a look has settled.

    Args:
        findings: What the runs so far say of one model.
        already: Policies that were settled before.
    """
    if findings.failed is not None:
        yield f"{findings.workload}: {findings.failed}"
    going = {*open_policies(findings), *already}
    for verdict in findings.verdicts:
        if not verdict.is_control and verdict.policy not in going:
            yield f"{findings.workload}: {_settled_line(verdict)}"


def _settled_line(verdict: Verdict) -> str:
    """Return `bf16 accepted after 3 seeds`, with the reason where it is not accepted."""
    num_seeds = len(verdict.seeds_used)
    line = f"{verdict.policy} {_WORDS[verdict.outcome]} after {counted(num_seeds, 'seed')}"
    if verdict.outcome != "accept" and verdict.reasons:
        line += f": {verdict.main_reason.message}"
    if verdict.look is not None and verdict.look.stop == "gate":
        spared = verdict.look.pairs - num_seeds - len(verdict.seeds_dropped)
        line += f" ({counted(spared, 'run')} of this look not started)" if spared > 0 else ""
    return line


def look_line(plan: SeedPlan, index: int, jobs: Sequence[Job]) -> str:
    """Return what the next look runs: `look 2 of 3: seeds 3 and 4 of tiny: bf16; 6 runs`."""
    groups = []
    for model in dict.fromkeys(job.planned.workload for job in jobs):
        own = [job for job in jobs if job.planned.workload == model]
        policies = list(dict.fromkeys(j.planned.policy for j in own if not j.is_shared))
        seeds = sorted({job.planned.seed for job in own})
        groups.append(f"{model}: {', '.join(policies)} on {seeds_text(seeds)}")
    runs = counted(len(jobs), "run")
    return f"look {index + 1} of {len(plan.looks)}, {runs}: {'; '.join(groups)}"
