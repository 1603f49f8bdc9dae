"""`decision.method`: a rival decides in the product, behind the gates on the comparison."""

from __future__ import annotations

import dataclasses

import pytest
import yaml
from factories import crashed, diverged, make_grid, make_record, make_same_point, with_final

from harness.analysis.methods import METHODS, NON_INFERIORITY
from harness.analysis.rivals import RIVALS
from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan
from harness.config import CONF
from harness.precision.policy import PrecisionPolicy

# Half a percent of FP32's tail loss of 2: harmless to our rule, and to relative_tail.
HARMLESS = {"fp32": {}, "bf16": {"offset": 0.001}}
HARM = {"fp32": {}, "bf16": {"offset": 0.5}}


def rule(method: str) -> DecisionRule:
    return DecisionRule(method=method)


def ulp_policy() -> PrecisionPolicy:
    text = (CONF / "policy" / "fp32_ulp.yaml").read_text(encoding="utf-8")
    return PrecisionPolicy.from_mapping(yaml.safe_load(text))


@pytest.mark.parametrize("method", sorted(set(RIVALS) - {"ulp_envelope"}))
def test_a_rival_decides_and_says_so(method, analysis):
    for grid, outcome in ((HARM, "reject"), ({"fp32": {}, "bf16": {}}, "accept")):
        verdict = analysis.verdict(make_grid(grid), rule=rule(method))
        assert verdict.outcome == outcome
        assert verdict.main_reason.code == "RIVAL_RULE"
        assert verdict.main_reason.message.startswith(f"The rule {method} says {outcome}: ")
        assert (verdict.p_accept, verdict.p_reject, verdict.extra_seeds) == (None, None, None)
        # What our test could have seen, or would accept, is nothing a rival says.
        assert (verdict.min_detectable_harm, verdict.accepting_margins) == ({}, {})
        assert method in (verdict.min_detectable_harm_note or "")


@pytest.mark.parametrize("method", ["paired_t", "steps_to_target"])
def test_too_few_seeds_have_no_forecast(method, analysis):
    count = RIVALS[method].min_pairs - 1
    verdict = analysis.verdict(make_grid(HARM, range(count)), seeds=range(count), rule=rule(method))
    assert (verdict.outcome, verdict.main_reason.code) == ("inconclusive", "RIVAL_RULE")
    assert f"it needs {RIVALS[method].min_pairs}" in verdict.main_reason.message
    assert (verdict.extra_seeds, verdict.settle) == (None, ())


def test_the_number_of_the_rule_is_in_the_reason(analysis):
    reason = analysis.verdict(make_grid(HARM), rule=rule("relative_tail")).main_reason
    assert reason.value == pytest.approx(0.25, rel=0.05)
    assert reason.threshold == 0.01
    assert "the relative difference of the mean loss over the last third is 0.2" in reason.message
    assert reason.message.endswith("above 0.01.")


@pytest.mark.parametrize("method", METHODS)
def test_the_report_says_that_the_method_is_not_the_calibrated_one(method, analysis):
    findings = analysis.findings(make_grid(HARMLESS), rule=rule(method))
    said = [c.message for c in findings.caveats if c.code == "METHOD_NOT_CALIBRATED"]
    assert len(said) == (method != NON_INFERIORITY)
    assert all(f"decision.method={method}" in m and "docs/calibration.md" in m for m in said)


def test_the_recommendation_rests_on_the_rule_alone(analysis):
    """Also after one seed, where there is no interval to speak of."""
    findings = analysis.findings(make_grid(HARMLESS, [0]), seeds=[0], rule=rule("last_step"))
    assert findings.choice.policy == "bf16"
    assert "if you trust this rule: the rule last_step says accept" in findings.choice.sentence
    assert "margin" not in findings.choice.sentence


def test_rules_disagree_on_the_same_runs(analysis):
    """A shift of 0.3 % of the loss: a margin and a half is worse at all, and inside 1 %."""
    grid = make_grid({"fp32": {}, "bf16": {"offset": 0.006, "luck": 0.0005}}, seeds=range(5))
    outcomes = {
        method: analysis.verdict(grid, seeds=range(5), rule=rule(method)).outcome
        for method in ("relative_tail", "paired_t", NON_INFERIORITY)
    }
    assert outcomes == {
        "relative_tail": "accept",
        "paired_t": "reject",
        NON_INFERIORITY: "accept",
    }


def test_gates_on_the_comparison_still_hold(analysis):
    def decided(records):
        verdict = analysis.verdict(records, rule=rule("relative_tail"))
        return verdict.outcome, verdict.main_reason.code

    grid = make_grid(HARMLESS)
    foreign = [
        dataclasses.replace(r, fingerprints=make_record("bf16", r.seed + 9).fingerprints)
        if r.policy == "bf16"
        else r
        for r in grid
    ]
    assert decided(foreign) == ("inconclusive", "PAIRING_BROKEN")
    failing = [diverged(r) if r.policy == "fp32" else r for r in grid]
    assert decided(failing) == ("inconclusive", "REFERENCE_UNSTABLE")
    idle = make_grid(HARMLESS, floor=3.95, noise=0.0, seed_sd=0.0)
    assert decided(idle) == ("inconclusive", "REFERENCE_NOT_LEARNING")
    assert decided([crashed(r) if r.policy == "bf16" else r for r in grid])[1] == "CRASHED"
    assert decided(grid[:-1]) == ("inconclusive", "RUN_MISSING")


def test_our_own_failure_gates_have_no_say(analysis):
    """Weights that ended non-finite behind a finite loss are our gate's finding alone."""
    grid = [with_final(r, nonfinite_weights=1.0) if r.policy == "bf16" else r
            for r in make_grid(HARMLESS)]  # fmt: skip
    assert analysis.verdict(grid).outcome == "reject"
    assert analysis.verdict(grid, rule=rule("relative_tail")).outcome == "accept"
    lost = [diverged(r) if r.policy == "bf16" and r.seed == 1 else r for r in make_grid(HARMLESS)]
    verdict = analysis.verdict(lost, rule=rule("relative_tail"))
    assert (verdict.outcome, verdict.main_reason.code) == ("reject", "RIVAL_RULE")
    assert "not finite to the last step in seed 1" in verdict.main_reason.message


def test_the_probe_is_evidence_only(analysis):
    probe = make_same_point("bf16", retention=0.2)
    grid = make_grid(HARMLESS)
    assert analysis.verdict(grid, same_point=probe).outcome == "inconclusive"
    verdict = analysis.verdict(grid, rule=rule("paired_t"), same_point=probe)
    assert verdict.main_reason.code == "RIVAL_RULE"
    (stagnation,) = [r for r in verdict.reasons if r.code == "PROBE_STAGNATION"]
    assert stagnation.kind == "warning"


class TestUlpEnvelope:
    def test_without_the_twin_it_names_the_policy_to_add(self, analysis):
        verdict = analysis.verdict(make_grid(HARMLESS), rule=rule("ulp_envelope"))
        assert verdict.outcome == "inconclusive"
        assert "add policy=fp32_ulp" in verdict.main_reason.message

    def test_the_noise_matched_control_is_no_such_twin(self, analysis):
        grid = make_grid({**HARMLESS, "fp32_twin": {"luck": 0.01}})
        verdict = analysis.verdict(grid, rule=rule("ulp_envelope"))
        assert "add policy=fp32_ulp" in verdict.main_reason.message

    @pytest.mark.parametrize(("size", "outcome"), [(0.0025, "accept"), (0.0035, "reject")])
    def test_the_policy_draws_the_envelope(self, size, outcome, analysis):
        twins = [make_record(ulp_policy(), seed, offset=0.001) for seed in range(3)]
        grid = [*make_grid({"fp32": {}, "bf16": {"offset": size}}), *twins]
        findings = analysis.findings(grid, rule=rule("ulp_envelope"))
        by_policy = {v.policy: v for v in findings.verdicts}
        assert by_policy["bf16"].outcome == outcome
        assert by_policy["bf16"].main_reason.threshold == pytest.approx(0.003)
        assert by_policy["fp32_ulp"].is_control


def test_a_rival_has_no_looks():
    plan = SeedPlan.of(rule("paired_t"), seeds_given=None)
    assert (plan.kind, plan.looks) == ("fixed", (8,))
    assert SeedPlan.of(rule("paired_t"), seeds_given=5).looks == (5,)
    assert SeedPlan.of(DecisionRule(), seeds_given=None).kind == "looks"


def test_an_unknown_method_is_one_line():
    with pytest.raises(ValueError, match=r"decision\.method='t_test' is not allowed; allowed: non"):
        rule("t_test")
