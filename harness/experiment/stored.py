"""`action=report`: a stored sweep analyzed again, from its records or their copies."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.analysis.rule import DecisionRule
from harness.config import ConfigError, RunConfig
from harness.experiment import manifest as manifests
from harness.experiment.conclude import conclude, load_records, show
from harness.experiment.copies import make_owed_copies, publish
from harness.experiment.early_checks import configured_store, decision_rule
from harness.experiment.manifest import Manifest, PlannedRun
from harness.runs.record import RunRecord
from harness.tracking.location import Store, StoreUnreachable
from harness.tracking.store import fetch_records, known_sweeps


def report_stored(config: RunConfig) -> int:
    """Analyze the stored runs of a sweep again, without training; return the exit code.

    The rule is the sweep's own, changed by what this command sets.

    Raises:
        ConfigError: `sweep_id` is missing or unknown, or a setting is wrong.
    """
    if config.sweep_id is None:
        raise ConfigError("action=report needs sweep_id=NAME, or sweep_id=latest")
    decision_rule(config.decision)
    store = configured_store(config)
    manifest, records = _stored_sweep(config, store)
    rule = _rule_of(manifest, config)
    conclusion = conclude(manifest, records, rule=rule, output_dir=config.output_dir)
    lines = make_owed_copies(store, config)
    show(conclusion, [*lines, *publish(conclusion, manifest, store)])
    return conclusion.exit_code


def _rule_of(manifest: Manifest, config: RunConfig) -> DecisionRule:
    defaults = DecisionRule().as_mapping()
    changed = {k: v for k, v in config.decision.items() if v != defaults[k]}
    return decision_rule({**manifest.decision, **changed})


def _stored_sweep(config: RunConfig, store: Store | None) -> tuple[Manifest, list[RunRecord]]:
    """Return manifest and records from the output folder, else from the tracking store."""
    assert config.sweep_id is not None
    try:
        manifest = manifests.read(config.output_dir, config.sweep_id)
    except ConfigError:
        sweep_id, records = _fetched(store, config.sweep_id)
        if not records:
            raise
        return _manifest_of(sweep_id, records, config), records
    records, troubles = load_records(manifest, config.output_dir)
    for line in troubles:
        print(f"warning: {line}", file=sys.stderr)
    return manifest, records


def _fetched(store: Store | None, sweep_id: str) -> tuple[str, list[RunRecord]]:
    """Return the sweep's name and its records as the store has them; none where it has none."""
    if store is None or (store.sqlite_path is not None and not store.sqlite_path.exists()):
        return sweep_id, []
    try:
        if sweep_id == manifests.LATEST:
            sweep_id = next(iter(known_sweeps(store)), sweep_id)
        return sweep_id, fetch_records(store, sweep_id=sweep_id)
    except StoreUnreachable as error:
        print(f"warning: {error}", file=sys.stderr)
        return sweep_id, []


def _manifest_of(sweep_id: str, records: Sequence[RunRecord], config: RunConfig) -> Manifest:
    """Return a manifest for records that came without one: the grid is what is there."""
    return Manifest(
        sweep_id=sweep_id,
        sweep="from the tracking store",
        command="",  # not known, so none is shown and none is built upon
        device=str(records[0].environment.get("device_kind", "cpu")),
        reference=config.reference,
        runs=tuple(
            PlannedRun(run_key=r.run_key, workload=r.workload, policy=r.policy, seed=r.seed)
            for r in sorted(records, key=lambda r: (r.workload, r.policy, r.seed))
        ),
        descriptions={},
        created_at=manifests.now(),
    )
