"""When a run of a sweep may end itself, and whether a stored run that did so still counts."""

from __future__ import annotations

from harness.analysis.in_run_gates import InRunGate, ended_early
from harness.config import RunConfig
from harness.experiment.early_checks import decision_rule
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord


def in_run_gate(config: RunConfig, reference: RunRecord | None) -> InRunGate | None:
    """Return what may end this run, for one run; None for the reference, a control, or when off.

    Args:
        config: The run.
        reference: The finished reference run of the same seed; None where there is none yet.
    """
    rule = decision_rule(config.decision)
    policy = PrecisionPolicy.from_mapping(config.policy)
    if not rule.end_early or policy.is_control or policy.name == config.reference:
        return None
    return InRunGate(policy, reference, rule)


def still_counts(record: RunRecord, gate: InRunGate | None) -> bool:
    """Return whether a stored run serves: it went on to its end, or would end itself again.

    Which runs end themselves is a setting of the decision and no part of a run's key.
    """
    if ended_early(record) is None:
        return True
    return gate is not None and gate(record.series) is not None
