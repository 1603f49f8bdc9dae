"""A run that need not start: a gate has rejected its policy on the runs that are there."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from harness.analysis.early_end import rejected_by_gate
from harness.config import RunConfig
from harness.experiment.early_checks import decision_rule
from harness.experiment.job import run_folder
from harness.experiment.manifest import Manifest, PlannedRun
from harness.experiment.seed_plans import plan_of, seeds_up_to
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RECORD_FILE, RunRecord, read_record


def reason_to_spare(config: RunConfig, manifest: Manifest, planned: PlannedRun) -> str | None:
    """Return why a run need not start, in one sentence; None if it is to be done.

    Only with looks: a fixed plan does all its runs. The reference and the control are always done.
    Reads the records of the policy and of the reference, up to the end of the run's look.
    """
    rule = decision_rule(manifest.decision)
    plan = plan_of(manifest, rule)
    policy = PrecisionPolicy.from_mapping(config.policy)
    if not plan.adaptive or policy.is_control or policy.name == manifest.reference:
        return None
    seeds = seeds_up_to(plan, manifest.seeds(planned.workload), planned.seed)
    records = {
        name: {
            run.seed: record
            for run in manifest.runs
            if (run.workload, run.policy) == (planned.workload, name)
            and run.seed in seeds
            and run.run_key != planned.run_key
            and (record := _counting_record(config.output_dir, run.run_key, manifest)) is not None
        }
        for name in (policy.name, manifest.reference)
    }
    reason = rejected_by_gate(
        policy, records[policy.name], records[manifest.reference], seeds=seeds, rule=rule
    )
    return None if reason is None else reason.message


def _counting_record(output_dir: Path, run_key: str, manifest: Manifest) -> RunRecord | None:
    """Return a record that speaks for its policy: not a crash of an earlier invocation.

    A crash is tried again once per invocation, and so is no reason to leave others out before.
    """
    folder = run_folder(output_dir, run_key)
    try:
        record = read_record(folder)
    except (FileNotFoundError, ValueError):
        return None
    if record.status != "crashed":
        return record
    started = datetime.fromisoformat(manifest.created_at).timestamp()
    return record if (folder / RECORD_FILE).stat().st_mtime >= started else None
