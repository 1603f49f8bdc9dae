"""`action=report`: a stored sweep analyzed again, from its records or their copies."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from harness.analysis.forecast import without_overrides
from harness.analysis.rule import DecisionRule
from harness.config import ConfigError, RunConfig
from harness.experiment import manifest as manifests
from harness.experiment.conclude import conclude, load_records, show
from harness.experiment.copies import make_owed_copies, publish
from harness.experiment.early_checks import configured_store, decision_rule
from harness.experiment.manifest import Manifest, PlannedRun
from harness.experiment.seed_plans import plan_of
from harness.runs.record import RunRecord
from harness.tracking.location import Store, StoreUnreachable
from harness.tracking.store import fetch_decision, fetch_records, known_sweeps


def report_stored(config: RunConfig, *, arguments: Sequence[str] = ()) -> int:
    """Analyze the stored runs of a sweep again, without training; return the exit code.

    The rule is the sweep's own, changed by what this command sets. So is the command that the
    report shows and builds upon: what it advises is to be judged by the same rule.

    Args:
        config: The command as composed.
        arguments: Its overrides, which tell a default that was asked for from one that was not.

    Raises:
        ConfigError: `sweep_id` is missing or unknown, or a setting is wrong.
    """
    if config.sweep_id is None:
        raise ConfigError("action=report needs sweep_id=NAME, or sweep_id=latest")
    decision_rule(config.decision)
    store = configured_store(config)
    manifest, records = _stored_sweep(config, store)
    changed = _changed(config, arguments)
    rule = _rule_of(manifest, changed)
    manifest = dataclasses.replace(manifest, command=_command_with(manifest, changed))
    _check_seeds(manifest, rule)
    conclusion = conclude(manifest, records, rule=rule, output_dir=config.output_dir)
    lines = make_owed_copies(store, config)
    show(conclusion, [*lines, *publish(conclusion, manifest, store)])
    return conclusion.exit_code


def _changed(config: RunConfig, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the decision settings that this command asks for, be it by their defaults."""
    defaults = DecisionRule().as_mapping()
    named = {argument.lstrip("+").split("=")[0] for argument in arguments}
    return {
        k: v for k, v in config.decision.items() if v != defaults[k] or f"decision.{k}" in named
    }


def _command_with(manifest: Manifest, changed: Mapping[str, Any]) -> str:
    """Return the sweep's command with these decision settings; empty where it is not known."""
    command = manifest.command
    if not command:
        return ""
    for key, value in changed.items():
        if key == "seeds" and manifest.plan.get("seeds_given", 1) is not None:
            continue  # the seeds that the command lists stand, and two numbers of them do not
        if value is None:
            text = "null"
        elif isinstance(value, list | tuple):
            text = f"[{','.join(map(str, value))}]"
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
        override = shlex.quote(f"decision.{key}={text}")
        command = f"{without_overrides(command, f'decision.{key}')} {override}"
    return command


def _check_seeds(manifest: Manifest, rule: DecisionRule) -> None:
    first = plan_of(manifest, rule).looks[0]
    for model in manifest.models:
        available = len(manifest.seeds(model))
        if available < first:
            how = f"; train them first: {manifest.command}" if manifest.command else ""
            raise ConfigError(
                f"sweep {manifest.sweep_id!r} is of {available} seeds, and this command judges "
                f"{model} at {first}{how}"
            )


def _rule_of(manifest: Manifest, changed: Mapping[str, Any]) -> DecisionRule:
    defaults = DecisionRule().as_mapping()
    stored = {k: v for k, v in manifest.decision.items() if k in defaults}
    # Sweeps of earlier versions had a margin per endpoint, which one margin for both is not.
    gone = [f"{k}={v}" for k, v in manifest.decision.items() if k not in defaults and v is not None]
    if gone and "margin" not in changed:
        raise ConfigError(
            f"sweep {manifest.sweep_id!r} was made with decision.{', decision.'.join(gone)}, which "
            "no longer exists; set decision.margin (one margin for both losses) in this command"
        )
    return decision_rule({**stored, **changed})


def _stored_sweep(config: RunConfig, store: Store | None) -> tuple[Manifest, list[RunRecord]]:
    """Return manifest and records from the output folder, else from the tracking store."""
    assert config.sweep_id is not None
    try:
        manifest = manifests.read(config.output_dir, config.sweep_id)
    except ConfigError:
        sweep_id, records, decision = _fetched(store, config.sweep_id)
        if not records:
            raise
        return _manifest_of(sweep_id, records, decision, config), records
    records, troubles = load_records(manifest, config.output_dir)
    for line in troubles:
        print(f"warning: {line}", file=sys.stderr)
    return manifest, records


def _fetched(store: Store | None, sweep_id: str) -> tuple[str, list[RunRecord], dict[str, Any]]:
    """Return the sweep's name, its records and its decision file as the store has them."""
    if store is None or (store.sqlite_path is not None and not store.sqlite_path.exists()):
        return sweep_id, [], {}
    try:
        if sweep_id == manifests.LATEST:
            sweep_id = next(iter(known_sweeps(store)), sweep_id)
        records = fetch_records(store, sweep_id=sweep_id)
        return sweep_id, records, fetch_decision(store, sweep_id=sweep_id) if records else {}
    except StoreUnreachable as error:
        print(f"warning: {error}", file=sys.stderr)
        return sweep_id, [], {}


def _manifest_of(
    sweep_id: str,
    records: Sequence[RunRecord],
    decision: Mapping[str, Any],
    config: RunConfig,
) -> Manifest:
    """Return a manifest for records that came without one: the grid is what is there.

    Rule and plan of the seeds are those of the sweep's last report. Without one (it never ended)
    runs that some policies have and others lack tell that the seeds were taken in looks.
    """
    seeds = sorted({record.seed for record in records})
    plan = decision.get("plan") or {}
    lacking = len(records) < len({(r.workload, r.policy) for r in records}) * len(seeds)
    adaptive = plan.get("kind", "fixed") != "fixed" if decision else lacking
    if adaptive and plan:
        seeds = list(range(max(plan["looks"])))
    there = {(r.workload, r.policy, r.seed): r.run_key for r in records}
    grid = sorted(
        {(r.workload, r.policy, seed) for r in records for seed in seeds} if adaptive else there
    )
    return Manifest(
        sweep_id=sweep_id,
        sweep="from the tracking store",
        command="",  # not known, so none is shown and none is built upon
        device=str(records[0].environment.get("device_kind", "cpu")),
        reference=config.reference,
        runs=tuple(
            PlannedRun(
                # A run that a look made unnecessary has no key, and no record is found for it.
                run_key=there.get((workload, policy, seed), ""),
                workload=workload,
                policy=policy,
                seed=seed,
            )
            for workload, policy, seed in grid
        ),
        descriptions={},
        decision=dict(decision.get("rule", {})),
        plan={"seeds_given": None if adaptive else len(seeds)},
        created_at=manifests.now(),
    )
