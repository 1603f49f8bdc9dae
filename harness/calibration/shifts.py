"""The operating characteristic: verdicts by the true difference, on the noise of real runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from harness.analysis.rule import DecisionRule
from harness.analysis.sequential import measure_reference
from harness.analysis.setting import Setting
from harness.analysis.verdicts import Reference, compare
from harness.calibration.contenders import Contender, Evidence, at_level, loss_outcome
from harness.calibration.plans import Plan
from harness.calibration.results import ShiftCurve, ShiftPoint
from harness.calibration.simulated import Candidate, Draw, replay
from harness.runs.record import RunRecord

SHIFTS = (0.0, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""True differences, in margins."""


def shift_curves(
    candidates: Sequence[Candidate],
    references: Mapping[int, RunRecord],
    orders: Sequence[Sequence[int]],
    plans: Sequence[Plan],
    *,
    task: str,
    rule: DecisionRule,
) -> tuple[ShiftCurve, ...]:
    """Return the characteristic of every plan with at least three pairs, per noise source.

    A source is an arm whose differences are noise alone: the null arms with at least half of the
    largest spread among them, and `bf16` where it is. Their differences are centred on the mean of
    all seeds, so that a planted shift is the true difference. It is in margins of all seeds, while
    a verdict rests on the margin that its draw measures: on a source with next to no noise, the
    verdict at the margin is that measurement's luck. `at_own_margin` is at one margin of the draw.
    The probe is left out: a shift has none.
    """
    everything = measure_reference(references, rule)
    if everything.unstable_reason or everything.not_learning_reason:
        return ()
    simulated = [Draw(order, references, rule) for order in orders]
    curves = []
    for noise in _sources(candidates, everything, rule):
        for plan in plans:
            if simulated and plan.pairs >= rule.min_pairs:
                curves.append(
                    ShiftCurve(
                        task=task,
                        arm=noise.candidate.facts.name,
                        plan=plan.name,
                        points=tuple(_point(noise, shift, plan, simulated) for shift in SHIFTS),
                        at_own_margin=_point(noise, 1.0, plan, simulated, own_margin=True),
                    )
                )
    return tuple(curves)


class _Noise:
    """Differences of one arm over all seeds: their means, spread and margins, by endpoint."""

    def __init__(self, candidate: Candidate, reference: Reference, rule: DecisionRule) -> None:
        setting = Setting(seeds=tuple(candidate.runs), command="", rule=rule)
        found = compare(candidate.policy, candidate.runs, reference, setting).estimates
        self.candidate = candidate
        self.means = {k: e.mean_difference for k, e in found.items()}
        self.margins = {k: e.margin for k, e in found.items()}
        spreads = [e.sd / e.margin for e in found.values() if e.sd is not None and e.margin > 0]
        # An arm that never differs, or has a run without a tail, is no source of noise.
        self.spread = max(spreads) if spreads and len(spreads) == len(found) else 0.0

    def shifted(self, evidence: Evidence, shift: float, *, own_margin: bool) -> Evidence:
        """Return the evidence had the true differences been `shift` margins.

        Args:
            evidence: Of a draw.
            shift: In margins.
            own_margin: Whether in those of the draw instead of those of all seeds.
        """
        comparison = evidence.comparison
        estimates = {
            endpoint: at_level(
                e,
                tuple(
                    d - self.means[endpoint] + shift * (e.margin if own_margin else margin)
                    for d in e.differences
                ),
                num_endpoints=len(comparison.estimates),
                rule=evidence.rule,
            )
            for endpoint, e in comparison.estimates.items()
            for margin in [self.margins[endpoint]]
        }
        moved = dataclasses.replace(comparison, estimates=estimates)
        return dataclasses.replace(evidence, comparison=moved)


def _sources(
    candidates: Sequence[Candidate], reference: Reference, rule: DecisionRule
) -> list[_Noise]:
    nulls = [_Noise(c, reference, rule) for c in candidates if c.facts.kind == "null"]
    widest = max((noise.spread for noise in nulls), default=0.0)
    found = [noise for noise in nulls if noise.spread >= widest / 2]
    found += [_Noise(c, reference, rule) for c in candidates if c.facts.name == "bf16"]
    return [noise for noise in found if noise.spread > 0]


def _point(
    noise: _Noise,
    shift: float,
    plan: Plan,
    simulated: Sequence[Draw],
    *,
    own_margin: bool = False,
) -> ShiftPoint:
    rule = Contender(
        name="shifted",
        title="",
        judge=lambda evidence: loss_outcome(noise.shifted(evidence, shift, own_margin=own_margin)),
        sequential=True,
    )
    found = [replay(draw, plan, rule, noise.candidate, None) for draw in simulated]
    n = len(found)
    return ShiftPoint(
        shift=shift,
        accept=sum(outcome == "accept" for outcome, _ in found) / n,
        reject=sum(outcome == "reject" for outcome, _ in found) / n,
        seeds=sum(pairs for _, pairs in found) / n,
    )
