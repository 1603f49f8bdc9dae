"""The policy to try next: what the evidence names, as a policy that does it, if still untried."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from factories import POLICIES, diverged, make_grid, make_record, make_same_point

from harness.analysis.fallback_policy import suggested_fallback, suggested_fallbacks
from harness.analysis.findings import Reason, Verdict
from harness.analysis.remedies import remedies
from harness.analysis.rule import DecisionRule
from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.runs.same_point.record import ModuleError

SEEDS = (0, 1, 2)
HARM = {"offset": 0.5, "luck": 0.001}
FLUSHED = DecisionRule().flushed_share


def culprit(policy: str, **fields: Any) -> Any:
    """Return a probe in which one module's own error stands out."""
    modules = [
        ModuleError(module=name, kind="Linear", local_forward_error=error)
        for name, error in (("net.dist", 0.5), ("net.f", 1e-3), ("head", 1e-3))
    ]
    return make_same_point(policy, modules=modules, **fields)


def candidates(analysis: Any, records: list[Any], **probes: Any) -> tuple[Verdict, ...]:
    return tuple(analysis.findings(records, same_point=probes).verdicts)


def suggested(verdicts: tuple[Verdict, ...], policy: str) -> PrecisionPolicy | None:
    (own,) = [v for v in verdicts if v.policy == policy]
    found = suggested_fallback(own, verdicts, flushed_limit=FLUSHED)
    assert found is None or found.of == policy
    return None if found is None else found.policy


def test_the_module_that_the_evidence_names_is_kept_in_fp32(analysis: Any) -> None:
    probe = culprit("bf16", beta=0.5)
    verdicts = candidates(analysis, make_grid({"fp32": {}, "bf16": HARM}), bf16=probe)
    policy = suggested(verdicts, "bf16")
    assert policy == PrecisionPolicy(
        name="bf16_keep_net_dist",
        description="Fallback for bf16: keeping `net.dist` in FP32.",
        compute_format="bf16",
        fp32_modules=("net.dist",),
    )


def test_a_candidate_whose_arithmetic_alone_fails_gets_one_too(analysis: Any) -> None:
    probe = culprit("bf16", beta=0.5)
    verdicts = candidates(analysis, make_grid({"fp32": {}, "bf16": {"luck": 0.001}}), bf16=probe)
    assert verdicts[0].outcome == "inconclusive"
    policy = suggested(verdicts, "bf16")
    assert policy is not None
    assert policy.fp32_modules == ("net.dist",)


def test_what_is_accepted_or_merely_undecided_gets_none(analysis: Any) -> None:
    fine = candidates(analysis, make_grid({"fp32": {}, "bf16": {"luck": 0.001}}))
    assert fine[0].outcome == "accept"
    assert suggested(fine, "bf16") is None
    probe = culprit("bf16", beta=0.5)
    rejected = candidates(analysis, make_grid({"fp32": {}, "bf16": HARM}), bf16=probe)
    assert suggested(rejected, "bf16") is not None
    spanning = Reason(code="CI_SPANS_MARGIN", message="The interval spans the margin.")
    undecided = dataclasses.replace(rejected[0], outcome="inconclusive", reasons=(spanning,))
    assert suggested((undecided,), "bf16") is None


def test_a_rejection_without_a_culprit_gets_no_guess(analysis: Any) -> None:
    verdicts = candidates(analysis, make_grid({"fp32": {}, "bf16": HARM}))
    assert verdicts[0].outcome == "reject"
    assert suggested(verdicts, "bf16") is None


def test_bf16_weights_are_tried_in_fp32_unless_the_grid_has_them(analysis: Any) -> None:
    grid: dict[str, Any] = {"fp32": {}, "bf16_pure": HARM}
    alone = suggested(candidates(analysis, make_grid(grid)), "bf16_pure")
    assert alone is not None
    assert alone.name == "bf16_pure_fp32_weights"
    assert alone.content() == POLICIES["bf16"].content()
    # What the grid has tried and not refuted is the answer; what it has refuted is followed by the
    # next remedy.
    with_bf16 = candidates(analysis, make_grid({**grid, "bf16": {"luck": 0.001}}))
    assert suggested(with_bf16, "bf16_pure") is None
    refuted = suggested(candidates(analysis, make_grid({**grid, "bf16": HARM})), "bf16_pure")
    assert refuted is not None
    assert (refuted.name, refuted.weight_rounding) == ("bf16_pure_stochastic", "stochastic")
    assert refuted.param_format == "bf16"


def test_unscaled_fp16_that_flushes_gets_a_scaler(analysis: Any) -> None:
    grid = make_grid({"fp32": {}, "fp16_unscaled": HARM})
    zeroed = [
        dataclasses.replace(r, sampled={**r.sampled, "grad_flushed_fp16": r.sampled["grad_total"]})
        for r in grid
    ]
    (verdict,) = candidates(analysis, zeroed)
    codes = {reason.code for reason in verdict.reasons}
    assert codes & {"UNDERFLOW_OBSERVED", "ZERO_GRADIENTS"}, codes
    policy = suggested((verdict,), "fp16_unscaled")
    assert policy is not None
    assert policy.name == "fp16_unscaled_with_scaler"
    assert policy.loss_scale == LossScaleSettings(kind="dynamic")


def overflowing(policy: PrecisionPolicy) -> list[Any]:
    fp32 = [make_record("fp32", seed) for seed in SEEDS]
    return [*fp32, *(diverged(make_record(policy, seed)) for seed in SEEDS)]


def test_fp16_that_overflows_is_tried_in_bf16(analysis: Any) -> None:
    policy = suggested(candidates(analysis, overflowing(POLICIES["fp16"])), "fp16")
    assert policy is not None
    assert policy.name == "fp16_in_bf16"
    assert policy.content() == POLICIES["bf16"].content()


ODD = (
    PrecisionPolicy(
        name="cast",
        compute_format="fp16",
        param_format="fp16",
        low_precision_ops=("all",),
        loss_scale=LossScaleSettings(kind="static", init_scale=8.0),
        fp32_modules=("head",),
    ),
    PrecisionPolicy(
        name="fp8",
        compute_format="fp8_e4m3",
        gradient_format="fp8_e5m2",
        operand_scaling="per_tensor",
        rounding="stochastic",
    ),
    PrecisionPolicy(name="clipped", compute_format="fp16", clip_before_unscale=True),
    *(POLICIES[name] for name in ("bf16_pure", "fp16", "fp16_unscaled", "bf16", "tf32")),
)


@pytest.mark.parametrize("policy", ODD, ids=lambda p: p.name)
@pytest.mark.parametrize("fails_by", ["overflow", "loss"])
def test_every_remedy_that_is_a_policy_is_valid_and_does_what_it_says(
    policy: PrecisionPolicy, fails_by: str, analysis: Any
) -> None:
    grid = (
        overflowing(policy)
        if fails_by == "overflow"
        else [
            *(make_record("fp32", s) for s in SEEDS),
            *(make_record(policy, s, **HARM) for s in SEEDS),
        ]
    )
    (verdict,) = candidates(analysis, grid)
    assert verdict.outcome == "reject"
    for remedy in remedies(verdict, flushed_limit=FLUSHED):
        if not remedy.changes:
            continue
        changed = {**verdict.policy_content, **remedy.changes}
        # The names of all fields and values are checked here.
        built = PrecisionPolicy.from_mapping({**changed, "name": f"x_{remedy.suffix}"})
        assert built.content() == changed
        assert remedy.suffix
        if remedy.does_it is not None:
            assert remedy.does_it(dataclasses.replace(verdict, policy_content=changed)), remedy.text


def test_two_failures_that_point_to_the_same_policy_try_it_once(analysis: Any) -> None:
    deepspeed = dataclasses.replace(
        POLICIES["fp16"],
        name="fp16_deepspeed",
        loss_scale=LossScaleSettings(kind="deepspeed", growth_interval=1000),
    )
    records = [*overflowing(POLICIES["fp16"]), *overflowing(deepspeed)[3:]]
    verdicts = candidates(analysis, records)
    found = suggested_fallbacks(verdicts, flushed_limit=FLUSHED)
    assert [(f.of, f.policy.name) for f in found] == [("fp16", "fp16_in_bf16")]
    done = suggested_fallbacks(verdicts, flushed_limit=FLUSHED, done=["fp16", "fp16_deepspeed"])
    assert done == ()


def test_the_flag_is_offered_where_it_would_do_something(analysis: Any) -> None:
    records = make_grid({"fp32": {}, "bf16": HARM})
    probes = {"bf16": culprit("bf16", beta=0.5)}

    def said(rule: DecisionRule, **same_point: Any) -> str:
        return " ".join(analysis.findings(records, rule=rule, same_point=same_point).choice.reasons)

    assert "decision.try_fallback=true" in said(DecisionRule(), **probes)
    assert "decision.try_fallback" not in said(DecisionRule(try_fallback=True), **probes)
    assert "decision.try_fallback" not in said(DecisionRule())
