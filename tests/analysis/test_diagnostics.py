"""Planted faults: each warning lights up on its evidence, never changes a verdict, and is silent
on a benign pair.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from factories import diverged, make_grid, make_record, with_final, with_series

from harness.analysis.diagnostics import diagnose
from harness.analysis.pairing import make_pair
from harness.analysis.rule import DecisionRule
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord

Change = Callable[[RunRecord], RunRecord]


def sampled(**counts: float) -> Change:
    def change(record: RunRecord) -> RunRecord:
        values = {k: (v,) * len(record.sampled_steps) for k, v in counts.items()}
        return dataclasses.replace(record, sampled={**record.sampled, **values})

    return change


def spiky(record: RunRecord) -> RunRecord:
    losses = list(record.series["loss"])
    for step in range(40, 80, 5):
        losses[step] += 3.0
    return with_series(record, loss=losses)


def growing(record: RunRecord) -> RunRecord:
    ramp = np.maximum(0, np.arange(120) - 60) * (3e-4 + 1e-5 * record.seed)
    return with_series(record, loss=[float(x) for x in np.array(record.series["loss"]) + ramp])


def skipping(record: RunRecord) -> RunRecord:
    return with_series(record, skipped=[float(k % 15 == 0) for k in range(120)])


def norms_times(factor: float) -> Change:
    def change(record: RunRecord) -> RunRecord:
        return with_series(record, grad_norm=[factor * x for x in record.series["grad_norm"]])

    return change


CANDIDATE_WARNINGS: list[tuple[str, str, Change]] = [
    ("ZERO_GRADIENTS", "bf16", lambda r: with_final(r, zero_grad_share=0.9)),
    ("WEIGHTS_NOT_MOVING", "bf16", lambda r: with_final(r, moved_weight_share=0.2)),
    ("LOST_UPDATES", "bf16_pure", sampled(lost_update_bf16=5000.0)),
    ("GRAD_NORM_RATIO", "bf16", norms_times(3.0)),
    ("GRAD_NORM_RATIO", "bf16", norms_times(1e-4)),
    ("SPIKES_EXCESS", "bf16", spiky),
    ("FP16_SKIPS_EXCESS", "fp16", skipping),
    ("TREND_WORSENING", "bf16", growing),
]


@pytest.mark.parametrize(("code", "policy", "change"), CANDIDATE_WARNINGS)
def test_each_warning_lights_up_and_decides_nothing(
    analysis: Any, code: str, policy: str, change: Change
) -> None:
    rule = DecisionRule(margin=0.5) if code == "SPIKES_EXCESS" else None
    if code == "TREND_WORSENING":
        rule = DecisionRule(margin=0.016)
    benign = make_grid({"fp32": {}, policy: {"luck": 1e-4}})
    planted = [change(r) if r.policy == policy else r for r in benign]
    verdict = analysis.verdict(planted, policy, rule=rule)
    (warning,) = [r for r in verdict.reasons if r.code == code]
    assert warning.kind == "warning"
    assert verdict.main_reason.code != code
    assert verdict.outcome == "accept"
    assert code not in analysis.codes(analysis.verdict(benign, policy, rule=rule))


def test_a_trend_needs_three_seeds_that_agree(analysis: Any) -> None:
    def warned(slopes: tuple[float, ...]) -> bool:
        ramp = np.maximum(0, np.arange(120) - 60)
        records = [
            with_series(r, loss=[float(x) for x in r.series["loss"] + slopes[r.seed] * ramp])
            if r.policy == "bf16"
            else r
            for r in make_grid(["fp32", "bf16"], range(len(slopes)))
        ]
        verdict = analysis.verdict(records, seeds=range(len(slopes)))
        return "TREND_WORSENING" in analysis.codes(verdict)

    assert warned((6e-4, 6.1e-4, 6.2e-4))
    assert not warned((6e-4, 6.1e-4))
    # The same mean, but one seed makes it: p is 0.23.
    assert not warned((-2e-4, 2e-4, 18.3e-4))


def test_underflow_is_a_matter_of_the_reference_and_of_the_missing_scaler(analysis: Any) -> None:
    spec = {"fp32": {}, "fp16_unscaled": {"luck": 1e-4}, "fp16": {"luck": 1e-4}}
    records = [sampled(grad_flushed_fp16=4000.0)(r) for r in make_grid(spec)]
    verdicts = {v.policy: v for v in analysis.findings(records).verdicts}
    assert "UNDERFLOW_OBSERVED" in analysis.codes(verdicts["fp16_unscaled"])
    assert "UNDERFLOW_OBSERVED" not in analysis.codes(verdicts["fp16"])


def test_better_than_fp32_and_disagreeing_endpoints_are_said(analysis: Any) -> None:
    better = make_grid({"fp32": {}, "bf16": {"offset": -0.1, "luck": 1e-4}})
    assert "BETTER_THAN_REFERENCE" in analysis.codes(analysis.verdict(better))
    two = analysis.verdict([r for r in better if r.seed < 2], seeds=(0, 1))
    assert "BETTER_THAN_REFERENCE" not in analysis.codes(two)
    split = make_grid({"fp32": {}, "bf16": {"offset": -0.03, "held_out_offset": 0.03}})
    assert "ENDPOINTS_DISAGREE" in analysis.codes(analysis.verdict(split))


def test_chaos_is_measured_against_the_seed_spread(analysis: Any) -> None:
    """FP32's seed sd is 0.0056 here; differences that spread by 0.01 are as wide as that."""
    spec = {"fp32": {}, "bf16": {}}
    # Two unpaired runs differ by sqrt(2) sds: 0.0045 lies between 0.7 sd and 0.7 * sqrt(2) sd.
    for spread, expected in ((0.01, True), (0.0045, False), (0.001, False)):
        records = [
            with_series(r, loss=[x + spread * (r.seed - 1) for x in r.series["loss"]])
            if r.policy == "bf16"
            else r
            for r in make_grid(spec, seed_sd=0.05)
        ]
        assert ("CHAOS_SATURATED" in analysis.codes(analysis.verdict(records))) is expected


def model_codes(analysis: Any, records: list[RunRecord], **keywords: Any) -> list[str]:
    return [c.code for c in analysis.findings(records, **keywords).caveats]


def test_model_level_cautions(analysis: Any) -> None:
    benign = {"fp32": {}, "bf16": {"luck": 1e-4}}
    assert model_codes(analysis, make_grid(benign)) == []
    assert "HELDOUT_SMALL" in model_codes(analysis, make_grid(benign, num_items=200))
    assert "HELDOUT_MISSING" in model_codes(analysis, make_grid(benign, held_out=False))
    assert "LOSS_NEAR_ZERO" in model_codes(analysis, make_grid(benign, floor=0.01, noise=0.0))
    assert "TAIL_SHORT" in model_codes(analysis, make_grid(benign, num_steps=60))
    constant = [with_series(r, learning_rate=(1e-3,) * 120) for r in make_grid(benign)]
    assert "LR_FLOOR_NOT_TESTED" in model_codes(analysis, constant)
    for last, told in ((6e-4, True), (4e-4, False)):
        stepped = (1e-3,) * 60 + (last,) * 60
        decayed = [with_series(r, learning_rate=stepped) for r in make_grid(benign)]
        assert ("LR_FLOOR_NOT_TESTED" in model_codes(analysis, decayed)) is told
    own = {"linear": {"bf16": 1, "fp32": 3}}
    lowered = [dataclasses.replace(r, audit=own) for r in make_grid(benign)]
    assert "REFERENCE_NOT_FP32" in model_codes(analysis, lowered)
    wild = make_grid({**benign, "fp32_twin": {"offset": -0.5}})
    (chaos,) = [c for c in analysis.findings(wild).caveats if c.code == "CHAOTIC_MODEL"]
    assert chaos.value > chaos.threshold  # a size: the sign stands in the message


def test_a_margin_that_does_not_shrink_with_the_loss_gets_no_warning(analysis: Any) -> None:
    """A margin of one's own, and losses that can be negative and so have no natural zero."""
    benign = {"fp32": {}, "bf16": {"luck": 1e-4}}
    near_zero = make_grid(benign, floor=0.01, noise=0.0)
    own = DecisionRule(margin=0.1)
    assert "LOSS_NEAR_ZERO" not in model_codes(analysis, near_zero, rule=own)
    signed = [
        with_series(r, loss=[*r.series["loss"][:-1], -0.01])
        for r in make_grid(benign, floor=0.01, noise=0.0, held_out=False)
    ]
    assert "LOSS_NEAR_ZERO" not in model_codes(analysis, signed)


def test_the_threshold_of_spikes_is_the_one_that_was_passed(analysis: Any) -> None:
    """FP32 spikes 2 times a seed, so 6: both 6 + 3 and 3 * 6 must be passed."""

    def spikes(record: RunRecord, count: int) -> RunRecord:
        losses = list(record.series["loss"])
        for step in range(40, 40 + 4 * count, 4):
            losses[step] += 3.0
        return with_series(record, loss=losses)

    rule = DecisionRule(margin=5.0)
    for ours, warned in ((6, False), (7, True)):
        grid = make_grid(["fp32", "bf16"])
        records = [spikes(r, 2 if r.policy == "fp32" else ours) for r in grid]
        found = [
            r for r in analysis.verdict(records, rule=rule).reasons if r.code == "SPIKES_EXCESS"
        ]
        assert [(r.value, r.threshold) for r in found] == ([(21.0, 18.0)] if warned else [])


def test_diagnostics_are_means_over_seeds_of_both_sides() -> None:
    pairs = [
        make_pair(
            with_final(make_record("bf16", seed), zero_grad_share=0.2 + 0.1 * seed),
            make_record("fp32", seed),
        )
        for seed in range(3)
    ]
    table = diagnose(pairs, PrecisionPolicy(name="bf16", compute_format="bf16"), DecisionRule())
    assert table["zero_grad_share"] == (pytest.approx(0.3), pytest.approx(0.01))
    assert table["lost_update_share"] == (pytest.approx(0.2), pytest.approx(0.2))
    assert table["flushed_share_fp16"] == (pytest.approx(0.005), pytest.approx(0.005))
    assert table["grad_norm_ratio"] == (pytest.approx(1.0), 1.0)
    assert table["first_nonfinite_step"] == (None, None)
    assert "min_loss_scale" not in table


def test_diagnostics_of_a_run_that_ended_early_and_of_none() -> None:
    rule = DecisionRule()
    policy = PrecisionPolicy(name="bf16", compute_format="bf16")
    pair = make_pair(diverged(make_record("bf16", 1), at_step=7), make_record("fp32", 1))
    table = diagnose([pair], policy, rule)
    assert table["first_nonfinite_step"] == (7.0, None)
    assert table["grad_norm_ratio"] == (None, None)
    empty = diagnose([], policy, rule)
    assert all(value == (None, None) for value in empty.values())


def test_every_verdict_carries_what_it_leaves_open(analysis: Any) -> None:
    findings = analysis.findings(make_grid({"fp32": {}, "tf32": {"luck": 1e-4}}))
    (verdict,) = findings.verdicts
    caveats = {r.code: r for r in verdict.reasons if r.kind == "caveat"}
    assert {"PROBE_MISSING", "EMULATED", "FAILURE_RATE_BOUND"} <= set(caveats)
    assert verdict.failure_rate_bound == pytest.approx(1 - 0.05 ** (1 / 3))
    assert verdict.execution == "emulated"
    assert verdict.step_time_ratio is None
    assert verdict.peak_memory_ratio is None
    assert "tf32 emulated" in findings.scope
    assert any("GPU" in sentence for sentence in findings.not_tested)


def test_lag_is_the_difference_over_fp32s_slope(analysis: Any) -> None:
    """A straight fall of 0.01 a step and a candidate 0.02 behind: two steps."""
    line = [4.0 - 0.01 * step for step in range(120)]
    records = [
        with_series(r, loss=[x + (0.02 if r.policy == "bf16" else 0.0) for x in line])
        for r in make_grid(["fp32", "bf16"])
    ]
    assert analysis.verdict(records).lag_steps == pytest.approx(2.0)
    assert math.isfinite(analysis.verdict(records).estimates["train"].mean_difference)
