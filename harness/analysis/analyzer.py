"""The runs of one model's grid in, everything concluded about it out; pure, and torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from harness.analysis import endpoints
from harness.analysis.choice import ASSUMED, ChoiceInput, choose
from harness.analysis.findings import Choice, ModelFindings, Ratio, Reason, Verdict, warning
from harness.analysis.model_cautions import (
    all_probed,
    control_caution,
    model_cautions,
    reference_triage,
)
from harness.analysis.multiplicity import adjust_for_multiplicity, holm_not_met
from harness.analysis.reference_gates import (
    reference_not_learning,
    reference_unstable,
    unstable_reason,
)
from harness.analysis.rule import DecisionRule
from harness.analysis.verdicts import Reference, Setting, compare, judge
from harness.analysis.wording import listing, seeds_text
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.same_point.record import SamePointRecord


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
) -> ModelFindings:
    """Judge every candidate of one model against its FP32 runs and choose a policy.

    Args:
        records: The runs of the grid that exist; other runs are ignored. The order is irrelevant.
        sweep_id: Name of the sweep.
        policies: Policy names in grid order, the reference among them.
        seeds: Seeds of the grid.
        reference: Name of the reference policy.
        rule: Constants.
        timings: Policy -> measured step-time ratio; a policy that is absent was not measured.
            None if nothing was.
        speed_note: Why there are no ratios, or how they were measured.
        command: The command that trains this grid; its seeds are replaced in `settle_command`.
        descriptions: Policy -> one sentence.
        same_point: Policy -> its same-point probe; a policy that is absent was not probed.

    Returns:
        Findings with one verdict per candidate and control. If the reference is missing or crashed
        in any seed: no verdicts, and `failed` says why.

    Raises:
        ValueError: The reference is not among `policies`, there are no seeds, or a policy has two
            records of one seed.
    """
    runs = _by_policy(records, policies=policies, seeds=seeds, reference=reference)
    references = runs[reference]
    failed = _reference_failure(references, seeds=seeds, reference=reference)
    base = _empty_findings(
        next((r for by_seed in (references, *runs.values()) for r in by_seed.values()), None),
        sweep_id=sweep_id,
        reference=reference,
        seeds=tuple(seeds),
        rule=rule,
        command=command,
    )
    if failed is not None:
        sentence = f"No recommendation for {base.workload}: the FP32 runs are incomplete."
        choice = Choice(policy=None, sentence=sentence, speed_basis=ASSUMED)
        return dataclasses.replace(base, failed=failed, choice=choice)
    fp32 = measure_reference(references, rule)
    setting = Setting(seeds=tuple(seeds), command=command, rule=rule)
    cautions = model_cautions(tuple(fp32.stable.values()), fp32.levels, rule)
    verdicts = _verdicts(
        {name: runs[name] for name in policies if name != reference},
        fp32=fp32,
        setting=setting,
        descriptions=descriptions,
        same_point=same_point or {},
        held_out_missing=[c for c in cautions if c.code == "HELDOUT_MISSING"],
    )
    verdicts = tuple(_with_speed(v, timings, speed_note) for v in verdicts)
    floor_tested = all_probed(verdicts, lambda probe: probe.tests_final_rate)
    on_cpu = base.environment.get("device_kind", "cpu") == "cpu"
    choice = choose(
        ChoiceInput(
            workload=base.workload,
            reference=reference,
            verdicts=verdicts,
            blocked=fp32.unstable_reason or fp32.not_learning_reason,
            num_steps=base.num_steps,
            measured=not on_cpu and bool(timings),
        ),
        rule,
    )
    return dataclasses.replace(
        base,
        verdicts=_mark_chosen(verdicts, choice, rule),
        choice=choice,
        scope=_scope(next(iter(references.values())), verdicts),
        not_tested=_not_tested(
            base.environment, base.num_steps, probed=all_probed(verdicts, lambda probe: True)
        ),
        caveats=(
            *(c for c in cautions if c.code != "LR_FLOOR_NOT_TESTED" or not floor_tested),
            *_control_cautions(verdicts, rule),
            *_dropped_note(fp32),
            *reference_triage([references[seed] for seed in fp32.unstable]),
        ),
    )


def measure_reference(references: Mapping[int, RunRecord], rule: DecisionRule) -> Reference:
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


def _verdicts(
    candidates: Mapping[str, Mapping[int, RunRecord]],
    *,
    fp32: Reference,
    setting: Setting,
    descriptions: Mapping[str, str],
    same_point: Mapping[str, SamePointRecord],
    held_out_missing: Sequence[Reason],
) -> tuple[Verdict, ...]:
    verdicts = []
    for name, by_seed in candidates.items():
        policy = _policy_of(name, by_seed, descriptions.get(name, ""))
        verdicts.append(
            judge(
                compare(policy, by_seed, fp32, setting),
                description=policy.description,
                reference=fp32,
                setting=setting,
                same_point=same_point.get(name),
                extra_caveats=() if policy.is_control else held_out_missing,
            )
        )
    return adjust_for_multiplicity(verdicts, setting.rule)


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
    """Add HOLM_NOT_MET to the chosen candidate if its adjusted p is above alpha."""
    return tuple(
        dataclasses.replace(v, reasons=(*v.reasons, holm_not_met(v.p_accept_holm, rule)))
        if v.policy == choice.policy
        and v.p_accept_holm is not None
        and v.p_accept_holm > rule.alpha
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
        not_tested=_not_tested(environment, num_steps),
        environment=environment,
        command=command,
        rule=rule.as_mapping(),
    )


def _scope(record: RunRecord, verdicts: Sequence[Verdict]) -> str:
    parts = [f"the first {record.num_steps} steps of this schedule"]
    if record.samples_per_step:
        parts.append(f"batch {record.samples_per_step:g}")
    parts.append(f"on {record.environment.get('device_kind', 'an unknown device')}")
    emulated = [v.policy for v in verdicts if v.execution == "emulated"]
    scope = ", ".join(parts)
    return f"{scope}; {listing(emulated)} emulated" if emulated else scope


def _not_tested(
    environment: Mapping[str, object], num_steps: int, *, probed: bool = False
) -> tuple[str, ...]:
    sentences = [
        f"Training beyond step {num_steps}, and other batch sizes, learning rates, schedules or "
        "model sizes.",
        "Failures that are rare: see the failure-rate bound of each verdict.",
        "More than one device.",
    ]
    if not probed:
        sentences.insert(
            1,
            "The arithmetic at fixed weights (update retention, rounding noise and bias): harm "
            "that builds up over many more steps may not show in the loss yet.",
        )
    if environment.get("device_kind", "cpu") == "cpu":
        sentences.append(
            "A GPU: its kernels sum in another order and width, and its speed and memory are "
            "not those of a CPU."
        )
    return tuple(sentences)
