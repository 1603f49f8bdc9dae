"""Looks replayed on stored runs: the first that settles a candidate stands, come what may."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from factories import crashed, diverged, make_record, make_same_point, with_series

from harness.analysis.analyzer import analyze_model
from harness.analysis.findings import LookSummary, ModelFindings, Verdict
from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan, open_policies
from harness.runs.record import RunRecord

RULE = DecisionRule()
LOOKS = SeedPlan.of(RULE, seeds_given=None)
EVERY_SEED = SeedPlan.of(DecisionRule(always_valid=True), seeds_given=None)
SEEDS = tuple(range(8))
# In margins of 0.02 nats: look 1 must be undecided, and look 2 or 3 settle it.
SLOW = (-0.5, 0.6, 0.2, 0.0, 0.05, 0.1, 0.0, 0.05)
# Undecided until look 3, where p is about 0.011: below its 0.015, not below half of that.
PASSES_LAST = tuple(-0.115 + (-1.0) ** k for k in range(8))
OPEN = (0.8, 1.1, 0.9, 1.2, 0.9, 1.1, 0.8, 1.2)


def shifted(policy: str, seed: int, margins: float) -> RunRecord:
    """Return a run that is worse than FP32's by so many margins of 0.02 nats, on both losses."""
    return make_record(policy, seed, seed_sd=0.0, offset=0.02 * margins)


def grid(policies: Mapping[str, Sequence[float]], *, references: int = 8) -> list[RunRecord]:
    fp32 = [make_record("fp32", seed, seed_sd=0.0) for seed in range(references)]
    others = [
        shifted(policy, seed, margins)
        for policy, differences in policies.items()
        for seed, margins in enumerate(differences)
    ]
    return fp32 + others


def analyze(
    records: Sequence[RunRecord],
    *,
    plan: SeedPlan | None = LOOKS,
    rule: DecisionRule = RULE,
    policies: Sequence[str] | None = None,
    seeds: Sequence[int] = SEEDS,
    probes: Mapping[str, Any] | None = None,
) -> ModelFindings:
    return analyze_model(
        records,
        sweep_id="s",
        policies=policies or list(dict.fromkeys(["fp32", *(r.policy for r in records)])),
        seeds=seeds,
        reference="fp32",
        rule=rule,
        timings=None,
        speed_note="not measured",
        command="python -m harness +sweep=precision",
        descriptions={},
        same_point=probes,
        plan=plan,
    )


def verdict_of(findings: ModelFindings, policy: str = "bf16") -> Verdict:
    (found,) = [v for v in findings.verdicts if v.policy == policy]
    return found


def look_of(verdict: Verdict) -> LookSummary:
    assert verdict.look is not None
    assert verdict.looks[-1] == verdict.look
    return verdict.look


def without_holm(verdict: Verdict) -> Verdict:
    """Return the verdict without what is said of all candidates together."""
    reasons = tuple(r for r in verdict.reasons if r.code != "HOLM_NOT_MET")
    return dataclasses.replace(verdict, p_accept_holm=None, reasons=reasons)


def first(records: Sequence[RunRecord], pairs: int) -> list[RunRecord]:
    return [r for r in records if r.seed < pairs]


def test_an_early_look_settles_and_later_runs_are_ignored() -> None:
    calm = (0.1, 0.05, 0.12)
    stopped = analyze(grid({"bf16": calm}, references=3))
    verdict = verdict_of(stopped)
    look = look_of(verdict)
    assert (verdict.outcome, look.stop, look.settled) == ("accept", "accepted", True)
    assert (look.index, look.of, look.pairs, look.alpha) == (1, 3, 3, 0.02)
    assert verdict.seeds_used == (0, 1, 2)
    # Later runs that would be rejected: paid for, but the verdict was given.
    went_wrong = grid({"bf16": (*calm, *(9.0,) * 5)})
    assert verdict_of(analyze(went_wrong)) == verdict
    assert verdict_of(analyze(went_wrong, plan=None)).outcome != "accept"


def test_the_interval_of_a_look_is_that_of_its_seeds_and_level() -> None:
    """Against the formula by hand: mean +- t * s / sqrt(n) over the look's own seeds."""
    from scipy.stats import t

    verdict = verdict_of(analyze(grid({"bf16": SLOW})))
    assert [look.stop for look in verdict.looks] == ["went_on", "accepted"]
    for look, pairs, alpha in zip(verdict.looks, (3, 5), (0.02, 0.015), strict=True):
        d = np.array(SLOW[:pairs])
        error = d.std(ddof=1) / math.sqrt(pairs)
        # The margin is not exactly 0.02 nats: FP32's curve has noise.
        low, mean, high = look.intervals["held_out"]
        scale = d.mean() / mean
        assert scale == pytest.approx(1, abs=0.1)
        assert high * scale == pytest.approx(d.mean() + t.ppf(1 - alpha, pairs - 1) * error)
        assert low * scale == pytest.approx(d.mean() - t.ppf(1 - alpha / 2, pairs - 1) * error)
    e = verdict.estimates["held_out"]
    assert (e.alpha_accept, e.alpha_reject, e.num_pairs) == (0.015, 0.0075, 5)
    assert e.confidence == pytest.approx(1 - 0.0225)


def test_who_is_undecided_goes_on_and_who_is_settled_does_not() -> None:
    records = first(grid({"tf32": (0.0, 0.01, 0.02), "bf16": SLOW, "bf16_pure": (9.0,) * 3}), 3)
    findings = analyze(records)
    assert open_policies(findings) == ("bf16",)
    assert look_of(verdict_of(findings, "bf16_pure")).stop == "gate"
    look = look_of(verdict_of(findings))
    assert (look.stop, look.settled, look.index) == ("unfinished", False, 1)
    assert "the next look is at 5 seeds" in look.sentence
    # The verdict of the look that is complete stays while the next one is trained.
    during = [*records, make_record("fp32", 3, seed_sd=0.0), shifted("bf16", 3, SLOW[3])]
    midway = verdict_of(analyze(during))
    before = verdict_of(findings)
    assert dataclasses.replace(midway, look=None, looks=()) == dataclasses.replace(
        before, look=None, looks=()
    )
    assert open_policies(analyze(during)) == ("bf16",)


def test_undecided_to_the_last_look() -> None:
    findings = analyze(grid({"bf16": OPEN}))
    verdict = verdict_of(findings)
    look = look_of(verdict)
    assert (verdict.outcome, look.stop, look.settled) == ("inconclusive", "last_look", False)
    assert [x.stop for x in verdict.looks] == ["went_on", "went_on", "last_look"]
    assert open_policies(findings) == ()


def test_a_gate_ends_a_policy_before_its_look_is_complete() -> None:
    overflowed = diverged(shifted("bf16", 0, 0.0), at_step=20)
    findings = analyze([*grid({}, references=3), overflowed], policies=["fp32", "bf16"])
    verdict = verdict_of(findings)
    look = look_of(verdict)
    assert (verdict.outcome, verdict.main_reason.code) == ("reject", "NONFINITE")
    assert (look.stop, look.settled) == ("gate", True)
    assert "seeds 1 and 2 were not needed" in look.sentence
    assert "RUN_MISSING" not in [r.code for r in verdict.reasons]
    assert open_policies(findings) == ()
    # In a fixed plan what is missing is missing.
    fixed = verdict_of(
        analyze(
            [*grid({}, references=3), overflowed],
            policies=["fp32", "bf16"],
            plan=None,
            seeds=(0, 1, 2),
        )
    )
    assert fixed.main_reason.code == "NONFINITE"
    assert "RUN_MISSING" in [r.code for r in fixed.reasons]


def test_a_gate_in_a_later_look_ends_it_there() -> None:
    records = first(grid({"bf16": SLOW}), 4)
    records = [crashed(r) if (r.policy, r.seed) == ("bf16", 3) else r for r in records]
    records.append(make_record("fp32", 4, seed_sd=0.0))
    verdict = verdict_of(analyze(records))
    assert (verdict.outcome, verdict.main_reason.code) == ("reject", "CRASHED")
    assert [look.stop for look in verdict.looks] == ["went_on", "gate"]


def test_runs_that_are_missing_in_the_first_look_are_awaited() -> None:
    findings = analyze(grid({"bf16": (0.0, 0.0)}, references=3), policies=["fp32", "bf16"])
    verdict = verdict_of(findings)
    assert verdict.main_reason.code == "RUN_MISSING"
    assert open_policies(findings) == ("bf16",)


def test_an_acceptance_that_the_probe_contradicts_stops() -> None:
    failing = {"bf16": make_same_point("bf16", retention=0.2)}
    findings = analyze(grid({"bf16": (0.0, 0.01, 0.02)}), probes=failing)
    verdict = verdict_of(findings)
    assert (verdict.outcome, look_of(verdict).stop) == ("inconclusive", "probe")
    assert (verdict.seeds_used, open_policies(findings)) == ((0, 1, 2), ())


@pytest.mark.parametrize("hopeless", ["absent", "nan", "crashed"])
@pytest.mark.parametrize("plan", [LOOKS, EVERY_SEED])
def test_a_hopeless_candidate_changes_nothing_for_another(hopeless: str, plan: SeedPlan) -> None:
    records = grid({"bf16": SLOW})
    alone = verdict_of(analyze(records, plan=plan))
    lost = [make_record("fp16", seed) for seed in SEEDS]
    if hopeless == "nan":
        lost = [with_series(r, loss=(math.nan,) * r.num_steps) for r in lost]
    elif hopeless == "crashed":
        lost = [crashed(r) for r in lost]
    else:
        lost = []
    together = verdict_of(analyze([*records, *lost], policies=["fp32", "fp16", "bf16"], plan=plan))
    assert alone.p_accept_holm != together.p_accept_holm  # the family is larger
    assert without_holm(together) == without_holm(alone)


def test_the_replay_does_not_depend_on_the_order_of_records() -> None:
    records = grid({"bf16": SLOW, "tf32": OPEN})
    shuffled = records.copy()
    random.Random(0).shuffle(shuffled)
    assert analyze(shuffled, policies=["fp32", "bf16", "tf32"]) == analyze(
        records, policies=["fp32", "bf16", "tf32"]
    )


def test_seed_order_does_not_matter_for_the_fixed_plan() -> None:
    records = grid({"bf16": SLOW[:5]}, references=5)
    plain = analyze(records, plan=None, seeds=(0, 1, 2, 3, 4))
    turned = analyze(records, plan=None, seeds=(3, 0, 4, 2, 1))
    (a,), (b,) = plain.verdicts, turned.verdicts
    assert dataclasses.replace(a, settle_command=None) == dataclasses.replace(
        b, settle_command=None
    )


@pytest.mark.parametrize("plan", [LOOKS, EVERY_SEED])
@pytest.mark.parametrize("seed", range(12))
def test_looks_never_contradict_themselves(plan: SeedPlan, seed: int) -> None:
    """What is there after each look alone leads along one way to the verdict on all runs."""
    rng = np.random.default_rng(seed)
    shifts = rng.normal(rng.choice([0.0, 0.5, 1.0, 2.0]), 0.4, 8)
    records = grid({"bf16": tuple(shifts)})
    final = verdict_of(analyze(records, plan=plan))
    for pairs in plan.looks:
        sofar = verdict_of(analyze(first(records, pairs), plan=plan))
        look = look_of(sofar)
        if pairs >= look_of(final).pairs:
            assert sofar == final
        else:
            assert (look.stop, look.pairs) == ("unfinished", pairs)
            assert [x.stop for x in sofar.looks] == ["went_on"] * (look.index - 1) + ["unfinished"]


def test_references_are_needed_for_the_looks_that_are_waited_for_only() -> None:
    settled = grid({"bf16": (0.0, 0.01, 0.02)}, references=3)
    assert analyze(settled).failed is None
    stray = [*settled, crashed(make_record("fp32", 5))]
    assert analyze(stray).failed is None
    waiting = [r for r in grid({"bf16": SLOW}) if (r.policy, r.seed) != ("fp32", 4)]
    assert analyze(waiting).failed == "The reference fp32 has no finished run for seed 4."
    broken = [crashed(r) if (r.policy, r.seed) == ("fp32", 4) else r for r in grid({"bf16": SLOW})]
    assert "The reference fp32 crashed (seed 4)" in (analyze(broken).failed or "")
    assert analyze(first(grid({"bf16": SLOW}), 2)).failed is not None


def test_what_a_look_has_settled_survives_a_reference_that_fails_later() -> None:
    """Another candidate that goes on, and meets a crashed FP32 run, costs the first one nothing."""
    records = grid({"bf16": (0.0, 0.01, 0.02), "fp16": SLOW})
    alone = analyze([r for r in records if r.policy != "fp16"])
    both = analyze([crashed(r) if (r.policy, r.seed) == ("fp32", 4) else r for r in records])
    first_verdict, second_verdict = both.verdicts
    assert without_holm(first_verdict) == without_holm(verdict_of(alone))
    assert both.choice.policy == "bf16"
    assert (second_verdict.outcome, look_of(second_verdict).stop) == ("inconclusive", "unfinished")
    assert both.failed_line is not None
    assert both.failed_line.startswith("Incomplete: The reference fp32 crashed (seed 4)")


def test_a_candidate_that_only_holm_holds_back_is_not_said_to_be_accepted() -> None:
    rule = DecisionRule(familywise=True)
    records = grid({"bf16": PASSES_LAST, "fp16": PASSES_LAST})
    alone = verdict_of(analyze([r for r in records if r.policy != "fp16"], rule=rule))
    held_back = analyze(records, rule=rule).verdicts[0]
    assert (alone.outcome, look_of(alone).stop) == ("accept", "accepted")
    assert (held_back.outcome, held_back.main_reason.code) == ("inconclusive", "HOLM_NOT_MET")
    assert (look_of(held_back).stop, look_of(held_back).settled) == ("last_look", False)
    assert look_of(held_back) == held_back.looks[-1]
    assert look_of(held_back).sentence == (
        "Inside the margin at look 3 of 3 (8 seeds), but not among all candidates at once (Holm): "
        "undecided."
    )


def test_model_findings_are_those_of_the_furthest_look() -> None:
    findings = analyze(grid({"bf16": SLOW, "tf32": (0.0, 0.01, 0.02)}))
    assert findings.seeds == (0, 1, 2, 3, 4)
    assert findings.plan == LOOKS
    assert analyze(grid({"tf32": (0.0, 0.01, 0.02)})).seeds == (0, 1, 2)


def test_the_control_goes_along_and_is_never_open() -> None:
    records = grid({"fp32_twin": (0.1,) * 5, "bf16": SLOW[:5]}, references=5)
    findings = analyze(records)
    control = verdict_of(findings, "fp32_twin")
    assert (control.look, control.seeds_used) == (None, (0, 1, 2, 3, 4))
    assert open_policies(findings) == ()


def test_savings_count_what_no_verdict_needed() -> None:
    policies = {"fp32_twin": (0.1,) * 5, "tf32": (0.0, 0.01, 0.02), "bf16": SLOW[:5]}
    records = [
        dataclasses.replace(r, wall_time_s=3.0 if r.policy == "tf32" else 2.0)
        for r in grid(policies, references=5)
    ]
    saved = analyze(records).savings
    assert saved is not None
    assert saved.by_policy == {"fp32": 3, "fp32_twin": 3, "tf32": 5, "bf16": 3}
    assert (saved.runs, saved.full_runs) == (14, 32)
    assert saved.seconds == pytest.approx(9 * 2.0 + 5 * 3.0)
    assert saved.full_seconds == pytest.approx(24 * 2.0 + 8 * 3.0)
    assert saved.sentence == "14 of 32 runs were not needed: about 33 s of 72 s of run time."
    midway = analyze(first(records, 3)).savings
    assert midway is not None
    assert midway.by_policy == {"tf32": 5}  # bf16 goes on, and FP32 and its twin with it
    assert analyze(records, plan=None, seeds=range(5)).savings is None


def test_binding_holm_is_at_the_level_of_the_look() -> None:
    """p of about 0.01 passes look 1 at 0.02, not for four candidates at once; look 2 settles it."""
    rule = DecisionRule(familywise=True)
    spread = (-0.2, 0.2, 0.0, 0.0, 0.05, 0.0, 0.0, 0.0)
    policies = {"bf16": tuple(0.1 + 1.2 * x for x in spread)}
    alone = verdict_of(analyze(grid(policies), rule=rule))
    assert (alone.outcome, alone.looks[-1].index) == ("accept", 1)
    assert alone.p_accept is not None
    crowd = grid({**policies, "tf32": (9.0,) * 3, "fp16": (9.0,) * 3, "bf16_pure": (9.0,) * 3})
    family = 4
    verdict = verdict_of(analyze(crowd, rule=rule))
    later = alone.p_accept * family > 0.02
    assert later, "the sample must tell the two apart"
    assert verdict.looks[0].stop == "went_on"
    assert verdict.outcome == "accept"
    assert verdict.p_accept_holm is not None
    assert verdict.p_accept_holm <= look_of(verdict).alpha


def test_a_fixed_plan_has_one_look() -> None:
    verdict = verdict_of(analyze(grid({"bf16": SLOW[:5]}, references=5), plan=None, seeds=range(5)))
    assert len(verdict.looks) == 1
    look = look_of(verdict)
    assert (look.index, look.of, look.pairs, look.alpha) == (1, 1, 5, 0.05)
    assert look.sentence == "Accepted with 5 seeds, as planned."


def test_a_stored_grid_is_judged_under_a_longer_plan_as_far_as_it_goes() -> None:
    longer = SeedPlan(kind="looks", looks=(3, 5, 14), alphas=LOOKS.alphas)
    findings = analyze(grid({"bf16": OPEN}), plan=longer)
    look = look_of(verdict_of(findings))
    assert (look.stop, look.pairs, findings.failed) == ("unfinished", 5, None)
    assert "the next look is at 14 seeds" in look.sentence
    with pytest.raises(ValueError, match="looks at 9 seeds, the grid has 8"):
        analyze(grid({"bf16": OPEN}), plan=SeedPlan.fixed(9, RULE))
