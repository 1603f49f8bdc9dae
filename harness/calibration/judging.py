"""One task of the bank, judged by every rule on every draw of seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.analysis.endpoints import Level
from harness.analysis.findings import Endpoint, Outcome
from harness.analysis.probe_findings import ProbeFindings
from harness.analysis.rule import DecisionRule
from harness.analysis.same_point_rule import measure
from harness.analysis.sequential import measure_reference
from harness.calibration.contenders import OURS, Contender
from harness.calibration.draws import LONGEST, draw_orders
from harness.calibration.plans import LOOKS, Plan, plans_of
from harness.calibration.results import ArmResult, SweepCost, Tally, TaskResult
from harness.calibration.shifts import shift_curves
from harness.calibration.simulated import Candidate, Draw, replay
from harness.calibration.truth import StoredRuns, complete_seeds, policy_of, truth_of
from harness.runs.record import RunRecord


@dataclass
class Count:
    """Sums over draws that become a `Tally`."""

    outcomes: dict[Outcome, int] = field(
        default_factory=lambda: {"accept": 0, "reject": 0, "inconclusive": 0}
    )
    seeds: int = 0
    runs: float = 0.0

    def add(self, outcome: Outcome, *, seeds: int, runs: float) -> None:
        """Count one draw."""
        self.outcomes[outcome] += 1
        self.seeds += seeds
        self.runs += runs

    def tally(self, pairs: int) -> Tally:
        """Return shares and means."""
        draws = sum(self.outcomes.values())
        shares = {name: count / draws for name, count in self.outcomes.items()}
        return Tally(**shares, seeds=self.seeds / draws, runs=self.runs / draws, pairs=pairs)


def judge_task(
    bank: StoredRuns,
    task: str,
    *,
    rule: DecisionRule,
    rules: Sequence[Contender],
    draws: int,
    shift_draws: int,
    digest: str = "",
) -> TaskResult:
    """Return everything about one task.

    Args:
        bank: The stored runs.
        task: Its name.
        rule: Constants of our rule.
        rules: What is judged.
        draws: Draws of seeds for the rates.
        shift_draws: Draws of seeds per shift of the operating characteristic.
        digest: Kept in the result.

    Raises:
        ValueError: The bank has no FP32 runs of the task.
    """
    facts, records = bank.stored_arms(task), bank.records(task)
    name = next((arm.name for arm in facts.values() if arm.kind == "reference"), None)
    if name is None or name not in records:
        raise ValueError(f"{task}: the bank has no FP32 runs; train them first")
    seeds = complete_seeds(records, name)
    references = {seed: records[name][seed] for seed in seeds}
    incomplete = tuple(arm for arm in facts if not set(seeds) <= set(records.get(arm, ())))
    candidates = _candidates(bank, task, seeds=seeds, reference=name, rule=rule)
    everything = measure_reference(references, rule)
    orders = draw_orders(seeds, draws=draws, task=task)
    plans = plans_of(rule, num_seeds=len(seeds))
    tallies, sweep = _tally(candidates, references, orders, plans, rules, rule)
    levels, first = everything.levels, next(iter(references.values()))
    reason = everything.unstable_reason or everything.not_learning_reason
    return TaskResult(
        task=task,
        digest=digest,
        num_steps=first.num_steps,
        num_seeds=len(seeds),
        draws=len(orders),
        unit=levels["train"].unit if levels else "",
        progress=levels["train"].progress if levels else math.nan,
        margins=_margins(levels),
        unstable=len(everything.unstable),
        void=None if reason is None else reason.message,
        incomplete=incomplete,
        arms=tuple(
            ArmResult(
                task=task,
                name=c.facts.name,
                kind=c.facts.kind,
                family=c.facts.family,
                dose=c.facts.dose,
                sentence=c.facts.sentence,
                truth=truth_of(c.runs, everything, rule),
                probe=None if c.probe is None else c.probe.failing,
                num_seeds=len(seeds),
                tallies=tallies[c.facts.name],
            )
            for c in candidates
        ),
        shifts=shift_curves(
            candidates, references, orders[:shift_draws], plans, task=task, rule=rule
        ),
        sweep=sweep,
    )


def _candidates(
    bank: StoredRuns, task: str, *, seeds: Sequence[int], reference: str, rule: DecisionRule
) -> tuple[Candidate, ...]:
    """Return the arms that have every seed, in the bank's order, without the reference."""
    facts, probes, found = bank.stored_arms(task), bank.same_point(task), []
    for name, runs in bank.records(task).items():
        if name == reference or not set(seeds) <= set(runs):
            continue
        probe = measure(probes[name], rule) if name in probes else None
        found.append(
            Candidate(
                facts=facts[name],
                policy=policy_of(runs),
                runs={seed: runs[seed] for seed in seeds},
                probe=probe if isinstance(probe, ProbeFindings) else None,
            )
        )
    return tuple(found)


def ulp_twin(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the null arm that moves the weights by one ulp: the smallest perturbation."""
    moved = [c for c in candidates if c.facts.kind == "null" and c.policy.perturbation > 0]
    smallest = min(moved, key=lambda c: c.policy.perturbation, default=None)
    # 2^-20: a few ulp at most. Noise as large as BF16's is no one-ulp twin.
    return smallest if smallest is not None and smallest.policy.perturbation <= 2.0**-20 else None


def _tally(
    candidates: Sequence[Candidate],
    references: Mapping[int, RunRecord],
    orders: Sequence[Sequence[int]],
    plans: Sequence[Plan],
    rules: Sequence[Contender],
    rule: DecisionRule,
) -> tuple[dict[str, dict[str, Tally]], SweepCost | None]:
    twin = ulp_twin(candidates)
    counts: dict[str, dict[tuple[str, str], Count]] = {c.facts.name: {} for c in candidates}
    # One pair has as many draws as there are seeds: each is judged once.
    known: dict[tuple[str, str, int], tuple[Outcome, int]] = {}
    sweep = _Sweep()
    for order in orders:
        draw = Draw(order, references, rule)
        used: dict[str, int] = {}
        for candidate in candidates:
            name = candidate.facts.name
            for contender, plan in _asked(rules, plans):
                key = (name, contender.name, order[0]) if plan.pairs == 1 else None
                found = known.get(key) if key is not None else None
                if found is None:
                    found = replay(draw, plan, contender, candidate, twin)
                if key is not None:
                    known[key] = found
                outcome, pairs = found
                counts[name].setdefault((contender.name, plan.name), Count()).add(
                    outcome, seeds=pairs, runs=candidate.cost(order[:pairs])
                )
                if contender.name == OURS and plan.name == LOOKS:
                    used[name] = pairs
        sweep.add(order, [c for c in candidates if c.facts.kind == "harmless"], used)
    last = {plan.name: plan.pairs for plan in plans}
    tallies = {
        name: {f"{r}@{p}": count.tally(last[p]) for (r, p), count in by_rule.items()}
        for name, by_rule in counts.items()
    }
    return tallies, sweep.cost()


def _asked(rules: Sequence[Contender], plans: Sequence[Plan]) -> list[tuple[Contender, Plan]]:
    return [
        (contender, plan)
        for contender in rules
        for plan in plans
        if plan.pairs >= contender.min_pairs and (contender.sequential or not plan.sequential)
    ]


class _Sweep:
    """Sums the cost of a sweep whose candidates share FP32: it runs as long as any candidate."""

    def __init__(self) -> None:
        self._adaptive, self._fixed, self._draws, self._candidates = 0.0, 0.0, 0, 0

    def add(
        self, order: Sequence[int], candidates: Sequence[Candidate], used: Mapping[str, int]
    ) -> None:
        counted = [c for c in candidates if c.facts.name in used]
        if not counted or len(order) < LONGEST:
            return
        self._draws += 1
        self._candidates = len(counted)
        self._adaptive += max(used[c.facts.name] for c in counted)
        self._adaptive += sum(c.cost(order[: used[c.facts.name]]) for c in counted)
        self._fixed += LONGEST + sum(c.cost(order[:LONGEST]) for c in counted)

    def cost(self) -> SweepCost | None:
        if not self._draws:
            return None
        return SweepCost(
            candidates=self._candidates,
            adaptive=self._adaptive / self._draws,
            fixed=self._fixed / self._draws,
        )


def _margins(levels: Mapping[Endpoint, Level]) -> dict[str, tuple[float, str]]:
    return {endpoint: (level.margin, level.margin_term) for endpoint, level in levels.items()}
