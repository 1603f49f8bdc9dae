"""Which policy is recommended: by order on a CPU, by speed on a GPU, and never without ground."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from factories import (
    POLICIES,
    crashed,
    diverged,
    make_grid,
    make_record,
    with_final,
    with_series,
)

from harness.analysis.findings import Ratio
from harness.precision.policy import LossScaleSettings, PrecisionPolicy

BENIGN = {"luck": 0.001}
ALL = ("tf32", "fp16", "bf16_fallback", "bf16")


def grid(*names: str, **common: Any) -> list[Any]:
    return make_grid({"fp32": {}, **{name: BENIGN for name in names}}, **common)


def spoiled(records: list[Any], *names: str) -> list[Any]:
    return [diverged(r) if r.policy in names else r for r in records]


def test_on_a_cpu_the_order_of_formats_decides(analysis: Any) -> None:
    records = grid(*ALL)
    gone: list[str] = []
    for expected in ("bf16", "bf16_fallback", "fp16", "tf32", "fp32"):
        choice = analysis.findings(spoiled(records, *gone)).choice
        assert choice.policy == expected
        assert choice.speed_basis == "assumed, not measured"
        gone.append(expected)


def test_cpu_ratios_never_decide(analysis: Any) -> None:
    timings = {"bf16": Ratio(value=3.0, ci_low=2.9, ci_high=3.1)}
    findings = analysis.findings(grid(*ALL), timings=timings)
    assert findings.choice.policy == "bf16"
    assert findings.verdicts[-1].step_time_ratio == timings["bf16"]


def test_a_users_policy_follows_the_built_in_ones_of_its_format(analysis: Any) -> None:
    own = PrecisionPolicy(name="bf16_head", compute_format="bf16", fp32_modules=("head",))
    extra = [make_record(own, seed, luck=0.001) for seed in range(3)]
    records = [*grid("fp16"), *extra]
    assert analysis.findings(records).choice.policy == "bf16_head"
    assert (
        analysis.findings([*records, *grid("bf16_fallback")[3:]]).choice.policy == "bf16_fallback"
    )


def test_weights_below_fp32_are_never_chosen_while_the_probe_is_missing(analysis: Any) -> None:
    choice = analysis.findings(grid("bf16_pure")).choice
    assert choice.policy == "fp32"
    assert any("bf16_pure is accepted on loss but not recommended" in r for r in choice.reasons)


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_unscaled_fp16_is_never_chosen(analysis: Any, device_kind: str) -> None:
    timings = {"fp16_unscaled": Ratio(value=0.4, ci_low=0.39, ci_high=0.41)}
    records = grid("fp16_unscaled", device_kind=device_kind)
    choice = analysis.findings(records, timings=timings).choice
    assert choice.policy == "fp32"
    (why,) = [r for r in choice.reasons if r.startswith("fp16_unscaled is accepted on loss but")]
    assert "the range that gradients had in this run" in why
    assert "fp16_unscaled accepted on loss alone" in choice.sentence


def test_ops_lowered_beyond_autocast_come_last_and_with_a_caution(analysis: Any) -> None:
    own = PrecisionPolicy(name="bf16_all", compute_format="bf16", low_precision_ops=("all",))
    extra = [make_record(own, seed, luck=0.001) for seed in range(3)]
    assert analysis.findings([*grid("tf32"), *extra]).choice.policy == "tf32"
    alone = analysis.findings([*grid(), *extra]).choice
    assert alone.policy == "bf16_all"
    assert any(r.startswith("Caution: bf16_all also lowers ops") for r in alone.reasons)
    # By measured speed too, though it is the fastest.
    on_gpu = [make_record(own, seed, luck=0.001, device_kind="cuda") for seed in range(3)]
    timings = {
        "fp16": Ratio(value=0.60, ci_low=0.59, ci_high=0.61),
        "bf16_all": Ratio(value=0.40, ci_low=0.39, ci_high=0.41),
    }
    findings = analysis.findings([*grid("fp16", device_kind="cuda"), *on_gpu], timings=timings)
    assert findings.choice.policy == "fp16"
    assert "Runner-up: bf16_all, also accepted." in findings.choice.reasons


def test_the_sentence_names_the_losses_that_were_tested(analysis: Any) -> None:
    both = analysis.findings(grid("bf16")).choice.sentence
    assert "its training and held-out loss stay within the margin" in both
    assert both.endswith(" margins, 3 seeds).")
    alone = analysis.findings(grid("bf16", held_out=False)).choice.sentence
    assert "its training loss stays within the margin" in alone
    assert "no held-out set" in alone


def test_on_a_gpu_the_measured_speed_decides(analysis: Any) -> None:
    records = [r for r in grid("fp16", "bf16", device_kind="cuda")]
    timings = {
        "bf16": Ratio(value=0.60, ci_low=0.59, ci_high=0.61),
        "fp16": Ratio(value=0.50, ci_low=0.49, ci_high=0.51),
    }
    choice = analysis.findings(records, timings=timings).choice
    assert (choice.policy, choice.speed_basis) == ("fp16", "measured")
    assert "0.50 of FP32's time" in choice.sentence
    # Within 3 %: the wider range goes first.
    timings["fp16"] = Ratio(value=0.59, ci_low=0.58, ci_high=0.60)
    assert analysis.findings(records, timings=timings).choice.policy == "bf16"


@pytest.mark.parametrize(
    "ratio",
    [
        Ratio(value=0.97, ci_low=0.93, ci_high=1.01),
        Ratio(value=0.97, ci_low=0.95, ci_high=0.99),  # faster, but not by 2 %
        Ratio(value=0.5),
        None,
    ],
)
def test_on_a_gpu_a_gain_that_was_not_shown_is_none(analysis: Any, ratio: Ratio | None) -> None:
    timings = {"fp16": Ratio(value=1.2, ci_low=1.1, ci_high=1.3)}
    if ratio is not None:
        timings["bf16"] = ratio
    records = grid("fp16", "bf16", device_kind="cuda")
    choice = analysis.findings(records, timings=timings).choice
    assert choice.policy == "fp32"
    assert "none is measurably faster" in choice.sentence


def test_without_timings_a_gpu_falls_back_to_the_order(analysis: Any) -> None:
    choice = analysis.findings(grid(*ALL, device_kind="cuda")).choice
    assert (choice.policy, choice.speed_basis) == ("bf16", "assumed, not measured")


def test_one_seed_that_shows_nothing_gives_no_recommendation(analysis: Any) -> None:
    choice = analysis.findings(grid("bf16", seeds=(0,)), seeds=(0,)).choice
    assert choice.policy is None
    assert "seed=0,1,2" in choice.reasons[0]
    rejected = analysis.findings(spoiled(grid("bf16", seeds=(0,)), "bf16"), seeds=(0,)).choice
    assert rejected.policy == "fp32"


def test_a_preferred_but_undecided_candidate_is_named_with_its_command(analysis: Any) -> None:
    shifts = (-0.01, 0.002, 0.013)
    records = [
        with_series(r, loss=[x + shifts[r.seed] for x in r.series["loss"]])
        if r.policy == "bf16"
        else r
        for r in grid("bf16", "fp16")
    ]
    choice = analysis.findings(records).choice
    assert choice.policy == "fp16"
    assert any("bf16 is undecided" in r and "seed=0,1,2,3" in r for r in choice.reasons)


def reason_for(analysis: Any, records: list[Any], policy: str) -> str:
    reasons = analysis.findings(records).choice.reasons
    (found,) = [r for r in reasons if r.startswith(f"{policy} is rejected")]
    return str(found)


def test_rejections_point_to_what_their_evidence_names(analysis: Any) -> None:
    overflow = reason_for(analysis, spoiled(grid("fp16", "bf16"), "fp16"), "fp16")
    assert "BF16, which has FP32's range (bf16, accepted here)" in overflow
    stalled = [
        with_final(r, moved_weight_share=0.1) if r.policy == "bf16_pure" else r
        for r in make_grid({"fp32": {}, "bf16": BENIGN, "bf16_pure": {"offset": 0.5}})
    ]
    text = reason_for(analysis, stalled, "bf16_pure")
    assert "Only 10 % of the weights" in text
    assert "FP32 weights under the same arithmetic (bf16, accepted here)" in text
    dead = [
        with_final(r, zero_grad_share=1.0) if r.policy == "fp16_unscaled" else r
        for r in make_grid({"fp32": {}, "fp16": BENIGN, "fp16_unscaled": {"offset": 0.5}})
    ]
    assert "loss scaling (fp16, accepted here)" in reason_for(analysis, dead, "fp16_unscaled")
    crash = [crashed(r) if r.policy == "bf16" else r for r in grid("bf16")]
    text = reason_for(analysis, crash, "bf16")
    assert "keeping `op` in FP32 (policy=bf16 policy.fp32_modules=[op])" in text


def test_a_remedy_that_the_grid_refuted_is_not_named(analysis: Any) -> None:
    text = reason_for(analysis, spoiled(grid("fp16", "bf16"), "fp16", "bf16"), "fp16")
    assert "BF16, which has" not in text


def test_clipping_before_unscaling_is_named_as_the_fault(analysis: Any) -> None:
    fault = PrecisionPolicy(
        name="fp16_clip",
        compute_format="fp16",
        loss_scale=LossScaleSettings(kind="dynamic"),
        clip_before_unscale=True,
    )
    records = [*grid("fp16"), *(make_record(fault, seed, offset=0.4) for seed in range(3))]
    assert "clipping after unscaling" in reason_for(analysis, records, "fp16_clip")


def test_a_fallback_that_gains_nothing_is_not_recommended(analysis: Any) -> None:
    records = make_grid(
        {
            "fp32": {},
            "bf16": {"offset": 0.5, "luck": 0.01},
            "bf16_fallback": {"offset": 0.5, "luck": 0.01},
        }
    )
    choice = analysis.findings(records).choice
    assert choice.policy == "fp32"
    assert any("bf16_fallback gains nothing beyond the noise" in r for r in choice.reasons)


def test_a_gain_within_the_noise_is_no_gain(analysis: Any) -> None:
    """Better by 0.05 on average, but by -0.1, 0.05 and 0.2 in the three seeds."""
    gains = (-0.1, 0.05, 0.2)
    spec: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"offset": 0.5},
        "bf16_fallback": {"offset": 0.5},
    }
    records = [
        with_series(r, loss=[x - gains[r.seed] for x in r.series["loss"]])
        if r.policy == "bf16_fallback"
        else r
        for r in make_grid(spec, held_out=False)
    ]
    reasons = analysis.findings(records).choice.reasons
    assert any("bf16_fallback gains nothing beyond the noise" in r for r in reasons)


def test_a_fallback_that_helps_but_not_enough_says_how_much(analysis: Any) -> None:
    records = make_grid(
        {
            "fp32": {},
            "bf16": {"offset": 0.5, "luck": 0.001},
            "bf16_fallback": {"offset": 0.25, "luck": 0.001},
        }
    )
    reasons = analysis.findings(records).choice.reasons
    assert any("bf16_fallback removes 50 % of the harm of bf16" in r for r in reasons)


def test_an_accepted_fallback_is_chosen_where_the_plain_policy_fails(analysis: Any) -> None:
    records = make_grid({"fp32": {}, "bf16": {"offset": 0.5}, "bf16_fallback": BENIGN})
    choice = analysis.findings(records).choice
    assert choice.policy == "bf16_fallback"
    assert any("keeping more of the model in FP32 (bf16_fallback" in r for r in choice.reasons)


def test_sentences_read_as_sentences(analysis: Any) -> None:
    everything = make_grid({name: BENIGN if name != "fp32" else {} for name in POLICIES})
    for records in (everything, spoiled(everything, "bf16", "fp16"), grid()):
        choice = analysis.findings(records).choice
        for text in (choice.sentence, *choice.reasons):
            assert text[0].isalnum()
            assert "None" not in text
            assert "nan" not in text.lower()
            assert "  " not in text
        assert choice.sentence.endswith(".")


def on_a_gpu(offset: float, slope: float) -> list[Any]:
    """Return FP32 and BF16 that fall from 4 to 1.5 and then by `slope` a step, BF16 a bit above."""
    line = [4.0 - 0.05 * min(step, 50) - slope * max(0, step - 50) for step in range(120)]
    return [
        with_series(r, loss=[x + (offset if r.policy == "bf16" else 0.0) for x in line])
        for r in make_grid({"fp32": {}, "bf16": {}}, device_kind="cuda")
    ]


def test_a_lag_longer_than_the_run_leaves_fp32(analysis: Any) -> None:
    """FP32's loss hardly falls at the end, so a tiny difference is thousands of steps."""
    timings = {"bf16": Ratio(value=0.6, ci_low=0.59, ci_high=0.61)}
    findings = analysis.findings(on_a_gpu(0.004, 1e-6), timings=timings)
    (verdict,) = findings.verdicts
    assert (verdict.outcome, (verdict.lag_steps or 0) > 120) == ("accept", True)
    assert findings.choice.policy == "fp32"
    assert (
        "not fast enough here to make up for the steps by which it lags" in findings.choice.sentence
    )


@pytest.mark.parametrize(("ratio", "chosen"), [(0.95, "fp32"), (0.85, "bf16")])
def test_fp32_competes_with_a_score_of_one(analysis: Any, ratio: float, chosen: str) -> None:
    """A lag of 12 of 120 steps costs a tenth of the speed-up: 0.9 / 0.95 < 1 < 0.9 / 0.85."""
    timings = {"bf16": Ratio(value=ratio, ci_low=ratio - 0.01, ci_high=ratio + 0.01)}
    findings = analysis.findings(on_a_gpu(0.012, 0.001), timings=timings)
    assert findings.verdicts[0].lag_steps == pytest.approx(12.0)
    assert findings.choice.policy == chosen


def test_too_few_pairs_are_too_few_seeds_whatever_the_grid(analysis: Any) -> None:
    """Of three seeds FP32 lost one: two pairs remain, and no test is possible."""
    records = [
        diverged(r) if (r.policy, r.seed) == ("fp32", 1) else r for r in grid("bf16", "fp16")
    ]
    choice = analysis.findings(records).choice
    assert choice.policy is None
    assert "seeds 0 and 2 can show a gross failure" in choice.sentence
    assert "seed=0,1,2,3" in choice.reasons[0]


def test_a_broken_pair_is_not_blamed_on_too_few_seeds(analysis: Any) -> None:
    records = [
        dataclasses.replace(
            r, fingerprints=dataclasses.replace(r.fingerprints, init_sha256="other")
        )
        if r.policy == "bf16"
        else r
        for r in grid("bf16", seeds=(0,))
    ]
    choice = analysis.findings(records, seeds=(0,)).choice
    assert choice.policy is None
    assert "these runs are not pairs" in choice.sentence
    assert "none occurred" not in choice.sentence
    assert choice.reasons == ()


def test_an_undecided_candidate_that_leans_to_rejection_is_not_advertised(analysis: Any) -> None:
    """1.3 margins on average, from 0 to 2.4: more seeds would rather reject it."""
    shifts = (0.0, 0.03, 0.048)
    records = [
        with_series(r, loss=[x + shifts[r.seed] for x in r.series["loss"]])
        if r.policy == "bf16"
        else r
        for r in grid("bf16", "fp16")
    ]
    findings = analysis.findings(records)
    (bf16,) = [v for v in findings.verdicts if v.policy == "bf16"]
    assert (bf16.outcome, bf16.lean) == ("inconclusive", "unacceptable")
    assert not any("bf16 is undecided" in reason for reason in findings.choice.reasons)


def test_what_no_seeds_settle_says_what_would(analysis: Any) -> None:
    seeds = range(8)
    records = make_grid({"fp32": {}, "bf16": {"luck": 0.03, "offset": 0.006}}, seeds)
    findings = analysis.findings(records, seeds=seeds)
    assert findings.verdicts[0].extra_seeds_reason == "UNRESOLVABLE_AT_NMAX"
    (told,) = [r for r in findings.choice.reasons if r.startswith("bf16 is undecided")]
    assert "a larger held-out set" in told
