"""A plan of looks replayed on the runs that exist: the first look that settles a candidate stands.

Every look is judged from exactly its own seeds: FP32's levels and margins, the differences, the
gates. Runs beyond the look that settled a candidate are ignored for it, so its verdict is the same
whether another candidate went on or not, and the same when stored runs are analyzed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis import endpoints
from harness.analysis.findings import Endpoint, LookSummary, Reason, Stop, Verdict
from harness.analysis.gates import Comparison
from harness.analysis.model_cautions import model_cautions
from harness.analysis.reference_gates import (
    reference_not_learning,
    reference_unstable,
    unstable_reason,
)
from harness.analysis.rival_method import ulp_twins
from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan
from harness.analysis.setting import Setting
from harness.analysis.verdicts import Reference, compare
from harness.analysis.wording import counted, in_margins, number, seeds_text
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord

Runs = Mapping[int, RunRecord]
Judge = Callable[[Comparison, "Look"], Verdict]

EVERY_SEED_GATES = frozenset({"GROSS_DEGRADATION"})
"""Gates that speak of every seed: a run that is still missing could undo them."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look that FP32's runs are there for.

    Attributes:
        index: From 0.
        reference: FP32 over the seeds of the look.
        setting: Its seeds, and the rule at its level.
        plan: The plan that it belongs to.
        cautions: What concerns the whole model, as this look sees it.
    """

    index: int
    reference: Reference
    setting: Setting
    plan: SeedPlan
    cautions: tuple[Reason, ...]

    @property
    def name(self) -> str:
        """How a sentence calls it."""
        if not self.plan.adaptive:
            return f"with {counted(len(self.setting.seeds), 'seed')}, as planned"
        count = f"look {self.index + 1} of {len(self.plan.looks)}"
        return f"at {count} ({counted(len(self.setting.seeds), 'seed')})"


def measure_reference(references: Runs, rule: DecisionRule) -> Reference:
    """Return what the FP32 runs reached and whether they can judge a candidate."""
    reasons = {seed: unstable_reason(run, rule) for seed, run in references.items()}
    unstable = {seed: reason for seed, reason in reasons.items() if reason is not None}
    stable = {seed: references[seed] for seed in sorted(references) if seed not in unstable}
    levels = endpoints.measure_levels(tuple(stable.values()), rule)
    return Reference(
        stable=stable,
        unstable=unstable,
        levels=levels,
        unstable_reason=reference_unstable(unstable, num_seeds=len(references), rule=rule),
        not_learning_reason=reference_not_learning(levels, rule),
    )


def looks_of(
    runs: Mapping[str, Runs],
    *,
    reference: str,
    seeds: Sequence[int],
    plan: SeedPlan,
    rule: DecisionRule,
    command: str,
) -> tuple[Look, ...]:
    """Return the looks, from the first, whose FP32 runs are all there and did not crash.

    Args:
        runs: Policy -> seed -> run.
        reference: Name of the reference policy.
        seeds: All seeds of the plan, in order.
        plan: When candidates are judged.
        rule: Constants.
        command: The command that trains the grid.
    """
    found = []
    for index in range(len(plan.looks)):
        chosen = plan.seeds_at(index, seeds)
        if len(chosen) < plan.looks[index]:  # a stored grid, judged again under a longer plan
            break
        if any(s not in runs[reference] or runs[reference][s].crash is not None for s in chosen):
            break
        own = plan.rule_at(index, rule)
        fp32 = measure_reference({seed: runs[reference][seed] for seed in chosen}, own)
        setting = Setting(
            seeds=chosen,
            command=command,
            rule=own,
            plan=plan,
            look=index,
            twins=ulp_twins(runs, fp32.stable, own),
        )
        cautions = model_cautions(tuple(fp32.stable.values()), fp32.levels, own)
        found.append(
            Look(index=index, reference=fp32, setting=setting, plan=plan, cautions=cautions)
        )
    return tuple(found)


def replay(
    policy: PrecisionPolicy,
    runs: Runs,
    looks: Sequence[Look],
    judge_at: Judge,
    *,
    family: int,
) -> Verdict:
    """Return the verdict of the first look that settles a candidate, else of the last complete one.

    Args:
        policy: The candidate.
        runs: Seed -> its run.
        looks: The looks that FP32's runs are there for, at least one.
        judge_at: The verdict on a comparison at a look.
        family: Number of candidates. Where Holm's adjustment binds, an acceptance before the last
            look must hold against all of them at once, whatever the others turn out to be.
    """
    history: list[LookSummary] = []
    last: tuple[Verdict, Look] | None = None
    for look in looks:
        comparison = compare(policy, within(runs, look.setting.seeds), look.reference, look.setting)
        if comparison.missing and look.plan.adaptive:
            return _incomplete(comparison, look, last, history, judge_at)
        verdict = judge_at(comparison, look)
        stop = _stop(verdict, look, family)
        if stop != "went_on":
            return _with_look(verdict, look, stop, history)
        history.append(_summary(verdict, look, "went_on"))
        last = verdict, look
    assert last is not None, "a plan has at least one look"
    return _with_look(*last, "unfinished", history[:-1])


def control_at(
    policy: PrecisionPolicy, runs: Runs, looks: Sequence[Look], judge_at: Judge
) -> Verdict:
    """Return the picture of a control over the last look that it has all runs of."""
    whole = [look for look in looks if all(seed in runs for seed in look.setting.seeds)]
    look = whole[-1] if whole else looks[0]
    seeds = look.setting.seeds
    return judge_at(compare(policy, within(runs, seeds), look.reference, look.setting), look)


def within(runs: Runs, seeds: Sequence[int]) -> Runs:
    """Return the runs of these seeds that exist, by seed: the order of `seeds` is irrelevant."""
    return {seed: runs[seed] for seed in sorted(seeds) if seed in runs}


def _incomplete(
    comparison: Comparison,
    look: Look,
    last: tuple[Verdict, Look] | None,
    history: list[LookSummary],
    judge_at: Judge,
) -> Verdict:
    """Return the verdict where runs of a look are missing.

    A gate that rejects for what one run did needs no further runs. Otherwise the last complete look
    has the word; before the first one is complete, the missing runs are the verdict's reason.
    """
    if comparison.pairs:
        verdict = judge_at(dataclasses.replace(comparison, missing=()), look)
        main = verdict.main_reason
        certain = main.kind == "gate" and main.code not in EVERY_SEED_GATES
        if verdict.outcome == "reject" and certain:
            return _with_look(verdict, look, "gate", history, missing=comparison.missing)
    if last is None:
        return _with_look(judge_at(comparison, look), look, "unfinished", history)
    return _with_look(*last, "unfinished", history[:-1], missing=comparison.missing)


def _stop(verdict: Verdict, look: Look, family: int) -> Stop:
    main = verdict.main_reason
    if main.kind == "gate":
        return "unfinished" if main.code == "RUN_MISSING" else "gate"
    if verdict.outcome == "reject":
        return "rejected"
    if verdict.outcome == "accept" and (look.setting.last_look or _holds(verdict, look, family)):
        return "accepted"
    if main.kind == "test" and main.code.startswith("PROBE_"):
        return "probe"
    return "last_look" if look.setting.last_look else "went_on"


def _holds(verdict: Verdict, look: Look, family: int) -> bool:
    rule = look.setting.rule
    return not rule.familywise or (
        verdict.p_accept is not None and family * verdict.p_accept <= rule.alpha
    )


def _with_look(
    verdict: Verdict,
    look: Look,
    stop: Stop,
    history: Sequence[LookSummary],
    *,
    missing: tuple[int, ...] = (),
) -> Verdict:
    summary = _summary(verdict, look, stop, missing=missing)
    return dataclasses.replace(verdict, look=summary, looks=(*history, summary))


def _summary(
    verdict: Verdict, look: Look, stop: Stop, *, missing: tuple[int, ...] = ()
) -> LookSummary:
    intervals: dict[Endpoint, tuple[float, float, float]] = {
        endpoint: (
            in_margins(e.ci_low, e.margin),
            in_margins(e.mean_difference, e.margin),
            in_margins(e.ci_high, e.margin),
        )
        for endpoint, e in verdict.estimates.items()
    }
    return LookSummary(
        index=look.index + 1,
        of=len(look.plan.looks),
        pairs=len(look.setting.seeds),
        alpha=look.setting.rule.alpha,
        settled=stop in ("accepted", "rejected", "gate", "probe"),
        stop=stop,
        sentence=_sentence(verdict, look, stop, missing),
        intervals=intervals,
    )


def _sentence(verdict: Verdict, look: Look, stop: Stop, missing: tuple[int, ...]) -> str:
    name = look.name
    if stop == "accepted":
        return f"Accepted {name}."
    if stop == "rejected":
        return f"Rejected {name}."
    if stop == "probe":
        return f"The loss passed {name}, the probe did not; more seeds would not answer that."
    if stop == "last_look":
        return f"Undecided {name}."
    if stop == "went_on":
        return f"Undecided {name}; went on."
    if stop == "gate":
        spared = ""
        if missing:
            verb = "was" if len(missing) == 1 else "were"
            spared = f"; {seeds_text(missing)} {verb} not needed"
        return f"Ended by a gate {name}: {verdict.main_reason.code}{spared}."
    if verdict.main_reason.code == "RUN_MISSING":
        return f"Not yet settled: runs are missing {name}."
    after = look.plan.looks[look.index + 1] if not look.setting.last_look else None
    if after is None:
        return f"Not yet settled {name}."
    lacking = f", of which {seeds_text(missing)} are not there" if missing else ""
    level = number(look.plan.alphas[look.index + 1])
    return f"Not yet settled {name}; the next look is at {after} seeds, level {level}{lacking}."
