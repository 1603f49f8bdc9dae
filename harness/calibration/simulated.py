"""One simulated user: some of the stored seeds, in an order, looked at as a plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.findings import Outcome
from harness.analysis.gates import Comparison
from harness.analysis.pairing import Pair
from harness.analysis.probe_findings import ProbeFindings
from harness.analysis.rule import DecisionRule
from harness.analysis.sequential import measure_reference
from harness.analysis.setting import Setting
from harness.analysis.verdicts import Reference, compare
from harness.calibration.bank import StoredArm
from harness.calibration.contenders import Contender, Evidence
from harness.calibration.plans import Look, Plan
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One arm as the rules see it.

    Attributes:
        facts: What was planted.
        policy: Of its runs.
        runs: Seed -> run.
        probe: Its same-point probe; None without a measurement.
    """

    facts: StoredArm
    policy: PrecisionPolicy
    runs: Mapping[int, RunRecord]
    probe: ProbeFindings | None

    def cost(self, seeds: Sequence[int]) -> float:
        """Return the runs of these seeds in whole runs."""
        return sum(share_run(self.runs[seed]) for seed in seeds)


class Draw:
    """The evidence of one order of seeds, computed once for all rules and plans."""

    def __init__(
        self, order: Sequence[int], references: Mapping[int, RunRecord], rule: DecisionRule
    ) -> None:
        self.order = tuple(order)
        self._references, self._rule = references, rule
        self._measured: dict[int, Reference] = {}
        self._known: dict[tuple[str, int, float, bool], Evidence] = {}

    def reference(self, pairs: int) -> Reference:
        """Return FP32 of the first seeds."""
        if pairs not in self._measured:
            runs = {seed: self._references[seed] for seed in sorted(self.order[:pairs])}
            self._measured[pairs] = measure_reference(runs, self._rule)
        return self._measured[pairs]

    def evidence(self, candidate: Candidate, twin: Candidate | None, look: Look) -> Evidence:
        """Return what a rule may look at.

        Args:
            candidate: The arm.
            twin: The one-ulp arm of the task, if there is one.
            look: How many pairs, and at which level.
        """
        key = (candidate.facts.name, look.pairs, look.rule.alpha, look.rule.always_valid)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Evidence(
                comparison=self._compare(candidate, look),
                reference=self.reference(look.pairs),
                probe=candidate.probe,
                twins=() if twin is None else self._pairs(candidate, twin, look),
                rule=look.rule,
            )
        return found

    def _compare(self, candidate: Candidate, look: Look) -> Comparison:
        seeds = tuple(sorted(self.order[: look.pairs]))
        return compare(
            candidate.policy,
            {seed: candidate.runs[seed] for seed in seeds},
            self.reference(look.pairs),
            Setting(seeds=seeds, command="", rule=look.rule),
        )

    def _pairs(self, candidate: Candidate, twin: Candidate, look: Look) -> tuple[Pair, ...]:
        if candidate is twin:
            return self._compare(twin, look).pairs
        return self.evidence(twin, twin, look).comparison.pairs


def replay(
    draw: Draw, plan: Plan, contender: Contender, candidate: Candidate, twin: Candidate | None
) -> tuple[Outcome, int]:
    """Return the outcome of a plan and the pairs it looked at: it stops at the first settled look.

    Args:
        draw: An order of seeds.
        plan: When to look.
        contender: The rule.
        candidate: The arm.
        twin: The one-ulp arm of the task, if there is one.
    """
    outcome: Outcome = "inconclusive"
    pairs = 0
    for look in plan.looks:
        pairs = look.pairs
        outcome, settled = contender.judge(draw.evidence(candidate, twin, look))
        if settled:
            break
    return outcome, pairs


def share_run(record: RunRecord) -> float:
    """Return which share of its planned steps a run ran."""
    return len(record.series.get("loss", ())) / record.num_steps
