"""`decision.try_fallback`: the policies that failures point to, as further runs of the sweep."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.analysis.fallback_policy import FallbackPolicy, suggested_fallbacks
from harness.analysis.findings import ModelFindings
from harness.analysis.rule import DecisionRule
from harness.config import RunConfig
from harness.experiment.grid import Grid
from harness.experiment.manifest import Manifest, PlannedRun, workload_choice
from harness.experiment.plan import num_steps, resolve_device, run_key
from harness.experiment.policy_check import check_policies
from harness.precision.policy import PrecisionPolicy
from harness.workloads.base import Workload
from harness.workloads.registry import make_workload


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One run of the grid: its configuration, how a launcher is told, its place in the sweep."""

    config: RunConfig
    job: tuple[str, ...]
    planned: PlannedRun


@dataclass(frozen=True, kw_only=True)
class Extended:
    """A sweep with its fallbacks.

    Attributes:
        grid: The grid with their runs, on every seed that there is.
        manifest: The manifest with the same runs, and what each is a fallback of.
        policies: Model -> names of the new policies; models without any are left out.
        lines: What is tried for whom and what is not, for the terminal.
    """

    grid: Grid
    manifest: Manifest
    policies: Mapping[str, tuple[str, ...]]
    lines: tuple[str, ...]


def with_fallbacks(
    grid: Grid, manifest: Manifest, findings: Sequence[ModelFindings], rule: DecisionRule
) -> Extended:
    """Return the sweep with one policy more for each failed candidate whose evidence names one.

    A candidate gets at most one, and a fallback none of its own. The same findings give the same
    policies, so that a sweep that was interrupted finds their finished runs again.

    Args:
        grid: The sweep's grid.
        manifest: Its manifest.
        findings: What its runs say, every candidate settled or at its last look.
        rule: Constants.
    """
    policies: dict[str, tuple[str, ...]] = {}
    lines: list[str] = []
    for result in findings:
        candidates = [v for v in result.verdicts if not v.is_control]
        known = manifest.fallbacks.get(result.workload, {})
        wanted = suggested_fallbacks(
            candidates, flushed_limit=rule.flushed_share, done=[*known, *known.values()]
        )
        if result.failed is not None or not wanted:
            continue
        rows = _rows(grid, manifest, result.workload)
        workload = make_workload(rows[0].config.workload)
        for fallback in wanted:
            taken = manifest.policies(result.workload)
            why_not = _why_not(fallback, workload, rows[0].config, taken=taken)
            if why_not is not None:
                lines.append(f"{result.workload}: no fallback for {fallback.of}: {why_not}")
                continue
            grid, manifest = _added(grid, manifest, fallback, rows, workload)
            name = fallback.policy.name
            policies[result.workload] = (*policies.get(result.workload, ()), name)
            lines.append(f"{result.workload}: {name} is tried automatically for {fallback.of}")
    return Extended(grid=grid, manifest=manifest, policies=policies, lines=tuple(lines))


def _why_not(
    fallback: FallbackPolicy, workload: Workload, config: RunConfig, *, taken: Sequence[str]
) -> str | None:
    """Return why a policy is not worth a run: its name is taken, or it changes nothing here."""
    if fallback.policy.name in taken:
        return f"the grid has another policy named {fallback.policy.name}"
    reference = PrecisionPolicy(name=config.reference)
    try:
        check = check_policies(
            workload,
            [reference, fallback.policy],
            reference=reference.name,
            seed=config.seed,
            steps=num_steps(config, workload),
            device=resolve_device(config.device),
            backend=config.train.backend,
        )
    except ValueError as error:
        return str(error)
    if fallback.policy.name in check.skipped:
        return check.skipped[fallback.policy.name]
    return check.notes[0].message if check.notes else None


def _rows(grid: Grid, manifest: Manifest, model: str) -> list[_Row]:
    """Return the runs of one model that the manifest has, in grid order."""
    rows = []
    for config, job in zip(grid.runs, grid.jobs, strict=True):
        planned = manifest.find(
            workload_choice(config.workload), config.policy["name"], config.seed
        )
        if planned is not None and planned.workload == model:
            rows.append(_Row(config=config, job=job, planned=planned))
    return rows


def _added(
    grid: Grid,
    manifest: Manifest,
    fallback: FallbackPolicy,
    rows: Sequence[_Row],
    workload: Workload,
) -> tuple[Grid, Manifest]:
    """Return grid and manifest with the runs of one fallback, one for each of the failed one's."""
    policy = fallback.policy
    values = {**policy.content(), "name": policy.name, "description": policy.description}
    runs, jobs, planned = [], [], []
    for row in rows:
        if row.planned.policy != fallback.of:
            continue
        config = dataclasses.replace(row.config, policy=values)
        key = run_key(config, workload, resolve_device(config.device))
        planned.append(dataclasses.replace(row.planned, run_key=key, policy=policy.name))
        runs.append(config)
        jobs.append((*row.job, *overrides(row.config.policy, values)))
    known = manifest.fallbacks.get(workload.name, {})
    return (
        dataclasses.replace(grid, runs=(*grid.runs, *runs), jobs=(*grid.jobs, *jobs)),
        dataclasses.replace(
            manifest,
            runs=_behind(manifest.runs, planned, of=fallback.of),
            descriptions={**manifest.descriptions, policy.name: policy.description},
            fallbacks={**manifest.fallbacks, workload.name: {**known, policy.name: fallback.of}},
        ),
    )


def _behind(
    runs: Sequence[PlannedRun], added: Sequence[PlannedRun], *, of: str
) -> tuple[PlannedRun, ...]:
    """Return the runs with those of a fallback behind those of the candidate that failed."""
    model = added[0].workload
    last = max(k for k, run in enumerate(runs) if (run.workload, run.policy) == (model, of))
    return (*runs[: last + 1], *added, *runs[last + 1 :])


def overrides(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the command-line overrides that turn one policy's settings into another's.

    Args:
        before: The policy as composed; fields that are absent have their defaults.
        after: The policy wanted, all fields.
    """
    found: list[str] = []
    for key, value in after.items():
        if isinstance(value, Mapping):
            inner = overrides(before.get(key) or {}, value)
            found += [f"policy.{key}.{text.removeprefix('policy.')}" for text in inner]
        elif _plain(before.get(key)) != _plain(value):
            found.append(f"policy.{key}={_quoted(value)}")
    return tuple(found)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _quoted(value: Any) -> str:
    """Return a value as Hydra's grammar has it; every text is quoted, whatever is in it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_quoted, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # In quotes only a quote needs escaping, and the backslashes right before one.
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + "\\'", str(value))
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * trailing}'"
