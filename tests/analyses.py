"""One call from records to findings, everything else at a default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.analysis.analyzer import analyze_model
from harness.analysis.decision import DecisionRule
from harness.analysis.findings import ModelFindings, Ratio, Verdict
from harness.runs.record import RunRecord
from harness.runs.same_point.record import SamePointRecord

COMMAND = "python -m harness +sweep=precision seed=0,1,2"


class Analysis:
    """Analyze records with everything else at a default, and look verdicts up by policy."""

    def findings(
        self,
        records: Sequence[RunRecord],
        *,
        seeds: Sequence[int] = (0, 1, 2),
        rule: DecisionRule | None = None,
        timings: Mapping[str, Ratio] | None = None,
        policies: Sequence[str] | None = None,
        same_point: Mapping[str, SamePointRecord] | None = None,
    ) -> ModelFindings:
        return analyze_model(
            records,
            sweep_id="s",
            policies=policies or list(dict.fromkeys(["fp32", *(r.policy for r in records)])),
            seeds=seeds,
            reference="fp32",
            rule=rule or DecisionRule(),
            timings=timings,
            speed_note="not measured",
            command=COMMAND,
            descriptions={},
            same_point=same_point,
        )

    def verdict(
        self,
        records: Sequence[RunRecord],
        policy: str = "bf16",
        *,
        seeds: Sequence[int] = (0, 1, 2),
        rule: DecisionRule | None = None,
        same_point: SamePointRecord | None = None,
    ) -> Verdict:
        probes = {} if same_point is None else {policy: same_point}
        verdicts = self.findings(records, seeds=seeds, rule=rule, same_point=probes).verdicts
        (found,) = [v for v in verdicts if v.policy == policy]
        return found

    @staticmethod
    def codes(verdict: Verdict) -> list[str]:
        """Return the reason codes of a verdict, the deciding one first."""
        return [reason.code for reason in verdict.reasons]
