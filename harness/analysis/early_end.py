"""Whether the further runs of a policy can be spared, because a gate has rejected it already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.analysis.analyzer import measure_reference
from harness.analysis.findings import Reason
from harness.analysis.gates import apply_gates
from harness.analysis.rule import DecisionRule
from harness.analysis.sequential import EVERY_SEED_GATES
from harness.analysis.verdicts import Setting, compare
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord

# Facts about a single run. The other gates compare with margins, and those rest on every FP32 run
# of the look: with fewer, a policy might be left out here that the verdict then does not reject.
CERTAIN = frozenset({"CRASHED", "NOT_EXPRESSIBLE", "NONFINITE", "LOSS_SCALE_COLLAPSE"})


def rejected_by_gate(
    policy: PrecisionPolicy,
    runs: Mapping[int, RunRecord],
    references: Mapping[int, RunRecord],
    *,
    seeds: Sequence[int],
    rule: DecisionRule,
) -> Reason | None:
    """Return the gate that rejects a policy on the runs that exist, or None if it may go on.

    The verdict on these runs alone is a rejection by the same gate, so nothing that a further run
    shows can change it.

    Args:
        policy: The candidate; the reference and a control are never asked about.
        runs: Seed -> finished or crashed run of the candidate, of the look's seeds.
        references: Seed -> run of the reference.
        seeds: All seeds up to the end of the look.
        rule: Constants.

    Returns:
        The deciding reason. None also where the first gate that fires is not a rejection (broken
        pairs, an FP32 that cannot judge) or speaks of every seed, where the reference crashed, and
        where a gate that needs margins fires before every FP32 run of the look is there.
    """
    known = {seed: references[seed] for seed in seeds if seed in references}
    own = {seed: runs[seed] for seed in seeds if seed in runs}
    if not known or not own or any(run.crash is not None for run in known.values()):
        return None
    reference = measure_reference(known, rule)
    setting = Setting(seeds=tuple(seeds), command="", rule=rule)
    hits = apply_gates(
        compare(policy, own, reference, setting),
        unstable=reference.unstable_reason,
        not_learning=reference.not_learning_reason,
        rule=rule,
    )
    if not hits or hits[0].outcome != "reject":
        return None
    reason = hits[0].reason
    if reason.code in EVERY_SEED_GATES:
        return None
    ended_itself = any(run.status == "diverged" for run in own.values())
    certain = reason.code in CERTAIN or (reason.code == "DIVERGED" and ended_itself)
    return reason if certain or len(known) == len(seeds) else None
