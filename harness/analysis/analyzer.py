"""The runs of one model's grid in, everything concluded about it out; pure, and torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from harness.analysis import endpoints
from harness.analysis.choice import ASSUMED, ChoiceInput, choose
from harness.analysis.findings import Choice, ModelFindings, Ratio, Reason, Verdict, warning
from harness.analysis.gates import Comparison
from harness.analysis.model_cautions import all_probed, control_caution, reference_triage
from harness.analysis.multiplicity import adjust_for_multiplicity, holm_not_met, level_of
from harness.analysis.rival_method import rival_caveat
from harness.analysis.rule import DecisionRule
from harness.analysis.savings import savings
from harness.analysis.scope import not_tested, run_scope
from harness.analysis.seed_plan import SeedPlan
from harness.analysis.sequential import Look, control_at, looks_of, measure_reference, replay
from harness.analysis.verdicts import Reference, judge
from harness.analysis.wording import seeds_text
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.same_point.record import SamePointRecord

__all__ = ["analyze_model", "measure_reference"]


def analyze_model(
    records: Sequence[RunRecord],
    *,
    sweep_id: str,
    policies: Sequence[str],
    seeds: Sequence[int],
    reference: str,
    rule: DecisionRule,
    timings: Mapping[str, Ratio] | None,
    speed_note: str,
    command: str,
    descriptions: Mapping[str, str],
    same_point: Mapping[str, SamePointRecord] | None = None,
    plan: SeedPlan | None = None,
) -> ModelFindings:
    """Judge every candidate of one model against its FP32 runs and choose a policy.

    Args:
        records: The runs of the grid that exist; other runs are ignored. The order is irrelevant.
        sweep_id: Name of the sweep.
        policies: Policy names in grid order, the reference among them.
        seeds: Seeds of the grid; with a plan of looks all that it may come to, in their order.
        reference: Name of the reference policy.
        rule: Constants.
        timings: Policy -> measured step-time ratio; a policy that is absent was not measured.
            None if nothing was.
        speed_note: Why there are no ratios, or how they were measured.
        command: The command that trains this grid; its seeds are replaced in `settle_command`.
        descriptions: Policy -> one sentence.
        same_point: Policy -> its same-point probe; a policy that is absent was not probed.
        plan: When candidates are judged; None: once, over all seeds. With looks each candidate is
            judged by the first look that settles it, and its later runs are ignored.

    Returns:
        Findings with one verdict per candidate and control. If the reference is missing or crashed
        in a seed that a verdict waits for, `failed` says so; then there are verdicts only if an
        earlier look had settled one, which it keeps.

    Raises:
        ValueError: The reference is not among `policies`, there are no seeds, or fewer than the
            first look needs, or a policy has two records of one seed.
    """
    plan = plan or SeedPlan.fixed(len(seeds), rule)
    if 0 < len(seeds) < plan.looks[0]:
        raise ValueError(f"the plan looks at {plan.looks[0]} seeds, the grid has {len(seeds)}")
    runs = _by_policy(records, policies=policies, seeds=seeds, reference=reference)
    references = runs[reference]
    looks = looks_of(runs, reference=reference, seeds=seeds, plan=plan, rule=rule, command=command)
    base = _empty_findings(
        next((r for by_seed in (references, *runs.values()) for r in by_seed.values()), None),
        sweep_id=sweep_id,
        reference=reference,
        seeds=tuple(seeds),
        rule=rule,
        command=command,
        plan=plan,
    )
    candidates = {name: runs[name] for name in policies if name != reference}
    verdicts: tuple[Verdict, ...] = ()
    failed = None
    if looks:
        verdicts = _verdicts(candidates, looks, descriptions, same_point or {}, rule)
        failed = _waits_for_reference(verdicts, runs, looks, seeds=seeds, reference=reference)
    else:
        first = plan.seeds_at(0, seeds)
        failed = _reference_failure(references, seeds=first, reference=reference)
    if failed is not None and not any(v.look is not None and v.look.settled for v in verdicts):
        sentence = f"No recommendation for {base.workload}: the FP32 runs are incomplete."
        choice = Choice(policy=None, sentence=sentence, speed_basis=ASSUMED)
        return dataclasses.replace(base, failed=failed, choice=choice)
    # FP32's runs beyond the furthest look that a verdict is of say nothing to any of them.
    reached = max((v.look.index for v in verdicts if v.look is not None), default=1) - 1
    fp32, cautions = looks[reached].reference, looks[reached].cautions
    verdicts = tuple(_with_speed(v, timings, speed_note) for v in verdicts)
    floor_tested = all_probed(verdicts, lambda probe: probe.tests_final_rate)
    on_cpu = base.environment.get("device_kind", "cpu") == "cpu"
    choice = choose(
        ChoiceInput(
            workload=base.workload,
            reference=reference,
            verdicts=verdicts,
            blocked=_blocked(fp32, verdicts),
            num_steps=base.num_steps,
            measured=not on_cpu and bool(timings),
        ),
        rule,
    )
    return dataclasses.replace(
        base,
        seeds=looks[reached].setting.seeds,
        failed=failed,
        verdicts=_mark_chosen(verdicts, choice, rule),
        choice=choice,
        scope=run_scope(
            next(iter(references.values())),
            emulated=[v.policy for v in verdicts if v.execution == "emulated"],
        ),
        not_tested=not_tested(
            base.environment, base.num_steps, probed=all_probed(verdicts, lambda probe: True)
        ),
        caveats=(
            *rival_caveat(rule),
            *(c for c in cautions if c.code != "LR_FLOOR_NOT_TESTED" or not floor_tested),
            *_control_cautions(verdicts, rule),
            *_dropped_note(fp32),
            *reference_triage([references[seed] for seed in fp32.unstable]),
        ),
        savings=savings(runs, verdicts, plan=plan, seeds=seeds),
    )


def _by_policy(
    records: Sequence[RunRecord],
    *,
    policies: Sequence[str],
    seeds: Sequence[int],
    reference: str,
) -> dict[str, dict[int, RunRecord]]:
    if reference not in policies:
        raise ValueError(f"reference={reference!r} is not in the grid: {', '.join(policies)}")
    if not seeds:
        raise ValueError("the grid has no seeds")
    runs: dict[str, dict[int, RunRecord]] = {name: {} for name in policies}
    for record in sorted(records, key=lambda r: r.seed):
        if record.policy not in runs or record.seed not in seeds:
            continue
        if record.seed in runs[record.policy]:
            raise ValueError(f"two records of policy {record.policy!r} and seed {record.seed}")
        runs[record.policy][record.seed] = record
    return runs


def _reference_failure(
    references: Mapping[int, RunRecord], *, seeds: Sequence[int], reference: str
) -> str | None:
    missing = [seed for seed in seeds if seed not in references]
    if missing:
        return f"The reference {reference} has no finished run for {seeds_text(missing)}."
    for seed in seeds:
        crash = references[seed].crash
        if crash is not None:
            return f"The reference {reference} crashed (seed {seed}): {crash.sentence}"
    return None


def _waits_for_reference(
    verdicts: Sequence[Verdict],
    runs: Mapping[str, Mapping[int, RunRecord]],
    looks: Sequence[Look],
    *,
    seeds: Sequence[int],
    reference: str,
) -> str | None:
    """Return what a candidate with all runs of the next look lacks on FP32's side, or None."""
    plan = looks[0].plan
    if len(looks) == len(plan.looks):
        return None
    wanted = plan.seeds_at(len(looks), seeds)
    held_up = any(
        v.look is not None
        and (v.look.stop, v.look.index) == ("unfinished", len(looks))
        and all(seed in runs[v.policy] for seed in wanted)
        for v in verdicts
    )
    if not held_up:
        return None
    return _reference_failure(runs[reference], seeds=wanted, reference=reference)


def _blocked(fp32: Reference, verdicts: Sequence[Verdict]) -> Reason | None:
    """Return the gate on the reference that forbids any recommendation, or None.

    What an earlier look accepted was judged by FP32 runs that could judge.
    """
    if any(v.outcome == "accept" and not v.is_control for v in verdicts):
        return None
    return fp32.unstable_reason or fp32.not_learning_reason


def _verdicts(
    candidates: Mapping[str, Mapping[int, RunRecord]],
    looks: Sequence[Look],
    descriptions: Mapping[str, str],
    same_point: Mapping[str, SamePointRecord],
    rule: DecisionRule,
) -> tuple[Verdict, ...]:
    policies = {
        name: _policy_of(name, by_seed, descriptions.get(name, ""))
        for name, by_seed in candidates.items()
    }
    family = sum(not policy.is_control for policy in policies.values())

    def judge_at(comparison: Comparison, look: Look) -> Verdict:
        policy = comparison.policy
        return judge(
            comparison,
            description=policy.description,
            reference=look.reference,
            setting=look.setting,
            same_point=same_point.get(policy.name),
            extra_caveats=()
            if policy.is_control
            else [c for c in look.cautions if c.code == "HELDOUT_MISSING"],
        )

    verdicts = [
        control_at(policy, candidates[name], looks, judge_at)
        if policy.is_control
        else replay(policy, candidates[name], looks, judge_at, family=family)
        for name, policy in policies.items()
    ]
    return adjust_for_multiplicity(verdicts, rule)


def _policy_of(name: str, by_seed: Mapping[int, RunRecord], description: str) -> PrecisionPolicy:
    """Return the policy as its records have it; a policy without any run is known by name only."""
    content = next((r.policy_content for r in by_seed.values()), {})
    return PrecisionPolicy.from_mapping({**content, "name": name, "description": description})


def _with_speed(verdict: Verdict, timings: Mapping[str, Ratio] | None, speed_note: str) -> Verdict:
    if verdict.execution == "emulated":
        return dataclasses.replace(verdict, speed_note="emulated: its step time says nothing")
    ratio = (timings or {}).get(verdict.policy)
    note = "not measured" if ratio is None and timings else speed_note
    return dataclasses.replace(verdict, step_time_ratio=ratio, speed_note=note)


def _mark_chosen(
    verdicts: Sequence[Verdict], choice: Choice, rule: DecisionRule
) -> tuple[Verdict, ...]:
    """Add HOLM_NOT_MET to the chosen candidate if its adjusted p is above its look's level."""
    return tuple(
        dataclasses.replace(v, reasons=(*v.reasons, holm_not_met(v.p_accept_holm, level, rule)))
        if v.policy == choice.policy
        and v.p_accept_holm is not None
        and v.p_accept_holm > (level := level_of(v, rule))
        else v
        for v in verdicts
    )


def _control_cautions(verdicts: Sequence[Verdict], rule: DecisionRule) -> tuple[Reason, ...]:
    found = (
        control_caution(v.estimates, control=v.policy, rule=rule) for v in verdicts if v.is_control
    )
    return tuple(reason for reason in found if reason is not None)


def _dropped_note(fp32: Reference) -> tuple[Reason, ...]:
    if not fp32.unstable or fp32.unstable_reason is not None:
        return ()
    seed, why = next(iter(fp32.unstable.items()))
    message = (
        f"FP32 failed in {seeds_text(sorted(fp32.unstable))} (seed {seed}: {why}); "
        "left out of every comparison."
    )
    return (warning("SEEDS_DROPPED", message),)


def _empty_findings(
    record: RunRecord | None,
    *,
    sweep_id: str,
    reference: str,
    seeds: tuple[int, ...],
    rule: DecisionRule,
    command: str,
    plan: SeedPlan,
) -> ModelFindings:
    environment = dict(record.environment) if record is not None else {}
    num_steps = record.num_steps if record is not None else 0
    return ModelFindings(
        sweep_id=sweep_id,
        workload=record.workload if record is not None else "unknown",
        device=str(environment.get("device_kind", "unknown")),
        reference_policy=reference,
        seeds=seeds,
        num_steps=num_steps,
        tail_start=endpoints.tail_start(num_steps, rule),
        verdicts=(),
        choice=Choice(policy=None, sentence="", speed_basis=""),
        scope=f"{num_steps} steps",
        not_tested=not_tested(environment, num_steps),
        environment=environment,
        command=command,
        rule=rule.as_mapping(),
        plan=plan,
    )
