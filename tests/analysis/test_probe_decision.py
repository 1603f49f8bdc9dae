"""What the same-point probe does to a verdict and to the recommendation, and what it never does."""

from __future__ import annotations

from typing import Any

import pytest
from factories import (
    POLICIES,
    crashed,
    diverged,
    make_grid,
    make_point,
    make_record,
    make_same_point,
    with_series,
)

from harness.precision.policy import PrecisionPolicy

BENIGN = {"luck": 0.001}
SEEDS = (0, 1, 2)


def grid(*names: str, **common: Any) -> list[Any]:
    return make_grid({"fp32": {}, **{name: BENIGN for name in names}}, **common)


def test_a_passing_probe_replaces_the_caveat_and_leaves_the_acceptance(analysis: Any) -> None:
    verdict = analysis.verdict(grid("bf16"), same_point=make_same_point(nu=0.002))
    assert (verdict.outcome, verdict.lean) == ("accept", "acceptable")
    assert "PROBE_MISSING" not in analysis.codes(verdict)
    assert verdict.probe is not None
    assert verdict.probe.noise_ratio == pytest.approx(0.002)
    unprobed = analysis.verdict(grid("bf16"))
    assert unprobed.probe is None
    assert "PROBE_MISSING" in analysis.codes(unprobed)


@pytest.mark.parametrize(
    ("ratios", "code"),
    [
        ({"retention": 0.2}, "PROBE_STAGNATION"),
        ({"nu": 0.5}, "PROBE_ROUNDING_NOISE"),
        ({"beta": 0.2}, "PROBE_ROUNDING_BIAS"),
        ({"eta": 0.5}, "PROBE_DESCENT_LOSS"),
    ],
)
def test_a_failing_probe_makes_an_acceptance_undecided(
    analysis: Any, ratios: dict[str, float], code: str
) -> None:
    verdict = analysis.verdict(grid("bf16"), same_point=make_same_point(**ratios))
    assert verdict.outcome == "inconclusive"
    assert (verdict.main_reason.code, verdict.main_reason.kind) == (code, "test")
    # The test stays visible, and no seeds are asked for.
    assert analysis.codes(verdict)[1] == "NONINFERIOR"
    assert (verdict.extra_seeds, verdict.settle_command) == (None, None)
    assert verdict.extra_seeds_reason == code
    assert verdict.lean == "unclear"


def test_a_failing_probe_never_rejects_and_touches_no_gate(analysis: Any) -> None:
    probe = make_same_point(nu=99.0, eta=-1.0, retention=0.0)
    broken = [diverged(r) if r.policy == "bf16" else r for r in grid("bf16")]
    verdict = analysis.verdict(broken, same_point=probe)
    assert (verdict.outcome, verdict.main_reason.code) == ("reject", "NONFINITE")
    worse = make_grid({"fp32": {}, "bf16": {"offset": 0.5, "luck": 0.001}})
    verdict = analysis.verdict(worse, same_point=probe)
    assert (verdict.outcome, verdict.lean) == ("reject", "unacceptable")
    kinds = {r.kind for r in verdict.reasons if r.code.startswith("PROBE_")}
    assert kinds == {"warning"}
    few = analysis.verdict(grid("bf16", seeds=(0,)), seeds=(0,), same_point=probe)
    assert (few.outcome, few.main_reason.code) == ("inconclusive", "TOO_FEW_SEEDS")
    assert few.extra_seeds == 2


def test_more_seeds_are_not_asked_for_where_they_could_only_lead_to_an_acceptance(
    analysis: Any,
) -> None:
    wide = make_grid({"fp32": {}, "fp16": {"luck": 0.0125, "offset": 0.004}})
    plain = analysis.verdict(wide, "fp16")
    assert plain.main_reason.code == "CI_SPANS_MARGIN"
    assert plain.extra_seeds
    probed = analysis.verdict(wide, "fp16", same_point=make_same_point("fp16", nu=0.5))
    assert probed.main_reason.code == "CI_SPANS_MARGIN"
    assert (probed.extra_seeds, probed.extra_seeds_reason) == (None, "PROBE_ROUNDING_NOISE")


def test_a_probe_that_failed_to_measure_says_why(analysis: Any) -> None:
    record = make_same_point(failed="The workload has no batches left.")
    verdict = analysis.verdict(grid("bf16"), same_point=record)
    assert verdict.outcome == "accept"
    (caveat,) = [r for r in verdict.reasons if r.code == "PROBE_MISSING"]
    assert "(The workload has no batches left)" in caveat.message


def test_a_verdict_that_a_gate_decides_misses_no_probe(analysis: Any) -> None:
    records = [diverged(r, at_step=60) if r.policy == "bf16" else r for r in grid("bf16")]
    verdict = analysis.verdict(records)
    assert verdict.main_reason.code == "NONFINITE"
    assert "PROBE_MISSING" not in analysis.codes(verdict)


def test_a_weak_signal_is_said(analysis: Any) -> None:
    weak = make_same_point(signal=0.01, beta=0.0)
    verdict = analysis.verdict(grid("bf16"), same_point=weak)
    assert verdict.outcome == "accept"
    assert "PROBE_WEAK_SIGNAL" in analysis.codes(verdict)


def test_the_control_is_not_probed(analysis: Any) -> None:
    records = grid("fp32_twin")
    verdict = analysis.verdict(records, "fp32_twin", same_point=make_same_point("fp32", nu=9.0))
    assert verdict.probe is None
    assert not [code for code in analysis.codes(verdict) if code.startswith("PROBE_")]


def test_probed_16_bit_weights_may_be_chosen_after_their_autocast_sibling(analysis: Any) -> None:
    passing = {
        name: make_same_point(name) for name in ("bf16", "bf16_fallback", "bf16_pure", "fp16")
    }
    records = grid("bf16_pure", "bf16", "fp16", "bf16_fallback")
    assert analysis.findings(records, same_point=passing).choice.policy == "bf16"

    def without(*names: str) -> Any:
        spoiled = [diverged(r) if r.policy in names else r for r in records]
        return analysis.findings(spoiled, same_point=passing).choice.policy

    assert without("bf16") == "bf16_fallback"
    assert without("bf16", "bf16_fallback") == "bf16_pure"
    assert without("bf16", "bf16_fallback", "bf16_pure") == "fp16"
    # A retention that was never measured is no proof.
    still = [make_point(retained=0.0, updated=0.0)]
    unmeasured = {"bf16_pure": make_same_point("bf16_pure", points=still)}
    choice = analysis.findings(grid("bf16_pure"), same_point=unmeasured).choice
    assert choice.policy == "fp32"


def test_lowering_every_op_is_no_hazard_of_probed_bf16_weights(analysis: Any) -> None:
    own = PrecisionPolicy(
        name="bf16_pure", compute_format="bf16", param_format="bf16", low_precision_ops=("all",)
    )
    records = [*grid("tf32"), *(make_record(own, s, luck=0.001) for s in SEEDS)]
    probes = {"bf16_pure": make_same_point("bf16_pure"), "tf32": make_same_point("tf32")}
    assert analysis.findings(records, same_point=probes).choice.policy == "bf16_pure"
    assert analysis.findings(records, same_point={}).choice.policy == "tf32"


def test_unscaled_fp16_stays_unchosen_whatever_the_probe_says(analysis: Any) -> None:
    probes = {"fp16_unscaled": make_same_point("fp16_unscaled")}
    assert analysis.findings(grid("fp16_unscaled"), same_point=probes).choice.policy == "fp32"


def test_emulated_formats_have_places(analysis: Any) -> None:
    own = [
        PrecisionPolicy(name="fp8", compute_format="fp8_e4m3"),
        PrecisionPolicy(name="odd", compute_format="e5m3"),
    ]
    extra = [make_record(policy, seed, luck=0.001) for policy in own for seed in SEEDS]
    assert analysis.findings([*grid("tf32"), *extra]).choice.policy == "tf32"
    findings = analysis.findings([*grid(), *extra])
    assert findings.choice.policy == "fp8"
    choice = analysis.findings([*grid(), *extra[3:]]).choice
    assert choice.policy == "fp32"
    assert any("no device computes in e5m3" in reason for reason in choice.reasons)


def test_the_recommendation_says_what_a_failing_probe_points_to(analysis: Any) -> None:
    rounded = PrecisionPolicy(
        name="bf16_stochastic",
        compute_format="bf16",
        param_format="bf16",
        weight_rounding="stochastic",
    )
    extra = [make_record(rounded, seed, luck=0.001) for seed in SEEDS]
    probes = {
        "bf16": make_same_point("bf16"),
        "bf16_pure": make_same_point("bf16_pure", retention=0.2),
        "bf16_stochastic": make_same_point("bf16"),
    }
    findings = analysis.findings([*grid("bf16", "bf16_pure"), *extra], same_point=probes)
    (text,) = [r for r in findings.choice.reasons if r.startswith("bf16_pure is undecided")]
    assert "only 20 % of FP32's update is stored" in text
    assert "More seeds of loss do not answer that." in text
    assert "FP32 weights under the same arithmetic (bf16, accepted here)" in text
    assert "stochastic rounding of the weights (bf16_stochastic, accepted here)" in text
    assert findings.choice.policy == "bf16"


def test_an_untested_low_rate_is_tested_by_the_probe(analysis: Any) -> None:
    flat = [with_series(r, learning_rate=[1e-3] * r.num_steps) for r in grid("bf16", num_steps=120)]

    def told(**probe: Any) -> bool:
        probes = {"bf16": make_same_point(**probe)} if probe else {}
        findings = analysis.findings(flat, same_point=probes)
        return "LR_FLOOR_NOT_TESTED" in [reason.code for reason in findings.caveats]

    assert told()
    assert told(final_rate=False)
    assert not told(final_rate=True)


def test_what_was_probed_is_no_longer_listed_as_untested(analysis: Any) -> None:
    def untested(**probes: Any) -> str:
        return " ".join(analysis.findings(grid("bf16", "fp16"), same_point=probes).not_tested)

    assert "The arithmetic at fixed weights" in untested(bf16=make_same_point())
    both = untested(bf16=make_same_point(), fp16=make_same_point("fp16"))
    assert "The arithmetic at fixed weights" not in both


def test_a_crash_names_its_module(analysis: Any) -> None:
    verdict = analysis.verdict([crashed(r) if r.policy == "bf16" else r for r in grid("bf16")])
    assert verdict.guilty_module == "op"
    assert verdict.guilty_sentence == (
        "look at `op`: The matrix product in module 'op' met two different dtypes."
    )


def test_policies_of_the_factories_are_the_ones_meant_here() -> None:
    assert POLICIES["bf16_pure"].param_format == "bf16"
