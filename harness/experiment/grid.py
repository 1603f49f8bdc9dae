"""From a composed sweep to the list of runs it asks for; nothing that trains is imported."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan
from harness.config import ConfigError, RunConfig

# The sweeper that launches run after run what the experiment asks for; only it can do looks.
LOOKS_SWEEPER = "LooksSweeper"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The runs of one sweep.

    Attributes:
        runs: One configuration per run, in grid order. With looks: every run that there may be.
        arguments: The command-line overrides, for "how to reproduce".
        jobs: The overrides of each run, as a launcher takes them, parallel to `runs`.
        seeds_given: How many seeds the command, the sweep or the workload's file asked for; None
            if they are left to the looks of `decision`.
    """

    runs: tuple[RunConfig, ...]
    arguments: tuple[str, ...]
    jobs: tuple[tuple[str, ...], ...] = ()
    seeds_given: int | None = None


def expand(composed: DictConfig) -> Grid:
    """Expand the sweep's parameters and the command line into runs, as the sweeper will.

    Every combination is composed once per seedless choice; the seed is a plain value, so it is
    put in afterwards (composing takes a twentieth of a second each). Where no seed is given and
    the sweeper takes looks, the grid has the seeds of all looks, or the first `decision.seeds`.

    Raises:
        ConfigError: A choice is invalid, or the overrides contradict each other.
        hydra.errors.HydraException: A choice does not exist.
    """
    loader = GlobalHydra.instance().config_loader()
    arguments = [str(argument) for argument in composed.hydra.overrides.task]
    params = composed.hydra.sweeper.params or {}
    parser = OverridesParser.create(config_loader=loader)
    overrides = parser.parse_overrides([*(f"{k}={v}" for k, v in params.items()), *arguments])
    (jobs,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    if not jobs:
        raise ConfigError("the sweep has no runs: one of its lists is empty")

    by_choice: dict[tuple[str, ...], RunConfig] = {}
    by_seed: dict[str, int] = {}
    seed_is_given = any(override.get_key_element() == "seed" for override in overrides)
    left_to_looks = takes_looks(composed) and not seed_is_given
    if left_to_looks:
        first = RunConfig.from_hydra(loader.load_sweep_config(composed, jobs[0]))
        by_choice[tuple(jobs[0])] = first
        by_seed = {f"seed={seed}": seed for seed in _seeds_of_all_looks(first)}
        jobs = [[*job, seed] for job in jobs for seed in by_seed]
    runs = []
    for job in jobs:
        choice = tuple(argument for argument in job if not argument.startswith("seed="))
        seed = next((a for a in job if a.startswith("seed=")), "")
        if choice not in by_choice or seed not in by_seed:
            config = RunConfig.from_hydra(loader.load_sweep_config(composed, job))
            by_choice.setdefault(choice, config)
            by_seed[seed] = config.seed
        runs.append(dataclasses.replace(by_choice[choice], seed=by_seed[seed]))
    _refuse_ambiguous(runs, arguments)
    if runs[0].decision.get("try_fallback") and not takes_looks(composed):
        # Hydra's own sweeper launches the grid and asks for nothing more.
        raise ConfigError("decision.try_fallback=true needs hydra/sweeper=looks")
    grid = Grid(runs=tuple(runs), arguments=tuple(arguments), jobs=tuple(map(tuple, jobs)))
    if left_to_looks:
        return grid
    _, seeds_of_grid = axis_values(grid)
    _refuse_two_numbers_of_seeds(runs[0], len(seeds_of_grid), seed_is_given=seed_is_given)
    return dataclasses.replace(grid, seeds_given=len(seeds_of_grid))


def takes_looks(composed: DictConfig) -> bool:
    """Whether the sweeper launches what the experiment asks for, look by look."""
    return str(composed.hydra.sweeper._target_).endswith(f".{LOOKS_SWEEPER}")


def _seeds_of_all_looks(config: RunConfig) -> range:
    try:
        rule = DecisionRule.from_mapping(config.decision)
        plan = SeedPlan.of(rule, seeds_given=None)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return range(plan.max_pairs)


def _refuse_two_numbers_of_seeds(config: RunConfig, given: int, *, seed_is_given: bool) -> None:
    wanted = config.decision.get("seeds")
    if wanted is None or wanted == given:
        return
    if seed_is_given:
        raise ConfigError(
            f"decision.seeds={wanted}, but the seeds of this sweep are given: {given} of them; "
            f"leave one out, or list the seeds: seed={','.join(map(str, range(wanted)))}"
        )
    raise ConfigError(f"decision.seeds={wanted} needs hydra/sweeper=looks, or seed=0,1,...")


def _refuse_ambiguous(runs: Sequence[RunConfig], arguments: Sequence[str]) -> None:
    names = list(dict.fromkeys(run.policy["name"] for run in runs))
    fields = [a.split("=")[0] for a in arguments if a.lstrip("+").startswith("policy.")]
    if fields and len(names) > 1:
        raise ConfigError(
            f"{fields[0]} would change all {len(names)} policies of this grid; write a policy of "
            "your own instead: mine/policy/NAME.yaml with `defaults: [bf16, _self_]`, `name: NAME` "
            "and the fields, then --config-dir mine policy=fp32,NAME"
        )
    seen: set[str] = set()
    for run in runs:
        identity = repr((run.workload, run.policy["name"], run.seed))
        if identity in seen:
            raise ConfigError(_why_twice(run, runs))
        seen.add(identity)


def _why_twice(run: RunConfig, runs: Sequence[RunConfig]) -> str:
    same = [r.policy for r in runs if r.policy["name"] == run.policy["name"] and r.seed == run.seed]
    if any(policy != same[0] for policy in same):
        return f"two policies of this grid are both named {run.policy['name']!r}; rename one"
    return (
        f"policy {run.policy['name']!r} with seed {run.seed} stands in this grid twice; a sweep "
        "varies workload, policy and seed, each value once"
    )


def axis_values(grid: Grid) -> tuple[list[str], list[int]]:
    """Return the distinct policy names and the distinct seeds, in grid order."""
    policies = list(dict.fromkeys(run.policy["name"] for run in grid.runs))
    seeds = list(dict.fromkeys(run.seed for run in grid.runs))
    return policies, seeds


def by_model(grid: Grid) -> list[list[RunConfig]]:
    """Return the runs grouped by workload settings, in grid order."""
    groups: dict[str, list[RunConfig]] = {}
    for key, members in itertools.groupby(grid.runs, key=lambda run: repr(run.workload)):
        groups.setdefault(key, []).extend(members)
    return list(groups.values())
