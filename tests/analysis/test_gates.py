"""Planted faults: each gate fires on its fault, decides as specified, and is silent without it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from factories import crashed, diverged, make_grid, make_record, with_final, with_series

from harness.analysis.findings import Outcome
from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.runs.record import HeldOut, RunRecord

Change = Callable[[RunRecord], RunRecord]


def planted(
    change: Change, *, policy: str = "bf16", in_seeds: tuple[int, ...] = (1,), **common: Any
) -> list[RunRecord]:
    """Return a benign grid of FP32 and one candidate, with a fault planted in the candidate."""
    records = make_grid({"fp32": {}, policy: {"luck": 0.001}}, **common)
    return [change(r) if r.policy == policy and r.seed in in_seeds else r for r in records]


def with_held_out(record: RunRecord, loss: Callable[[HeldOut], tuple[float, ...]]) -> RunRecord:
    held = record.held_out
    assert held is not None
    return dataclasses.replace(record, held_out=dataclasses.replace(held, loss=loss(held)))


def nan_at(record: RunRecord, step: int) -> RunRecord:
    losses = list(record.series["loss"])
    losses[step] = math.nan
    return with_series(record, loss=losses)


def replaced(record: RunRecord, name: str, start: int, stop: int, value: float) -> RunRecord:
    values = list(record.series[name])
    values[start:stop] = [value] * (stop - start)
    return with_series(record, **{name: values})


def back_up(record: RunRecord) -> RunRecord:
    """Training loss climbs back to its start over the last quarter."""
    losses = np.array(record.series["loss"])
    losses[90:] = losses[0]
    return with_series(record, loss=[float(x) for x in losses])


def reseeded(record: RunRecord) -> RunRecord:
    return dataclasses.replace(
        record, fingerprints=dataclasses.replace(record.fingerprints, init_sha256="0" * 64)
    )


def shifted(by: float) -> Change:
    def change(record: RunRecord) -> RunRecord:
        return with_series(record, loss=[x + by for x in record.series["loss"]])

    return change


EVERY = (0, 1, 2)
FAULTS: list[tuple[str, Outcome, list[RunRecord], str]] = [
    ("PAIRING_BROKEN", "inconclusive", planted(reseeded), "bf16"),
    ("CRASHED", "reject", planted(crashed), "bf16"),
    ("CRASHED", "reject", planted(crashed, in_seeds=EVERY), "bf16"),
    (
        "NOT_EXPRESSIBLE",
        "reject",
        planted(lambda r: crashed(r, not_expressible=True), policy="fp16"),
        "fp16",
    ),
    ("NONFINITE", "reject", planted(diverged), "bf16"),
    ("NONFINITE", "reject", planted(lambda r: diverged(r, at_step=0), in_seeds=EVERY), "bf16"),
    ("NONFINITE", "reject", planted(lambda r: nan_at(r, 60), policy="fp16"), "fp16"),
    ("NONFINITE", "reject", planted(lambda r: with_final(r, nonfinite_weights=1.0)), "bf16"),
    ("NONFINITE", "reject", planted(lambda r: with_final(r, nonfinite_buffers=64.0)), "bf16"),
    (
        "NONFINITE",
        "reject",
        planted(lambda r: with_held_out(r, lambda h: (*h.loss[:-1], math.nan))),
        "bf16",
    ),
    (
        "NONFINITE",
        "reject",
        planted(lambda r: replaced(r, "nonfinite_grad", 5, 6, 3.0), policy="fp16_unscaled"),
        "fp16_unscaled",
    ),
    (
        "LOSS_SCALE_COLLAPSE",
        "reject",
        planted(lambda r: replaced(r, "loss_scale", 50, 120, 0.5), policy="fp16"),
        "fp16",
    ),
    (
        "LOSS_SCALE_COLLAPSE",
        "reject",
        planted(lambda r: replaced(r, "skipped", 0, 20, 1.0), policy="fp16"),
        "fp16",
    ),
    ("DIVERGED", "reject", planted(back_up), "bf16"),
    ("GROSS_DEGRADATION", "reject", planted(shifted(0.5), in_seeds=EVERY), "bf16"),
    (
        "LOSS_LOGGED_LOW_PRECISION",
        "inconclusive",
        planted(
            lambda r: dataclasses.replace(r, loss_on_16bit_grid="bf16"),
            in_seeds=EVERY,
            held_out=False,
        ),
        "bf16",
    ),
    ("REFERENCE_NOT_LEARNING", "inconclusive", planted(shifted(0.0), start=2.01), "bf16"),
]


@pytest.mark.parametrize(("code", "outcome", "records", "policy"), FAULTS)
def test_each_planted_fault_is_caught_by_its_gate(
    analysis: Any, code: str, outcome: Outcome, records: list[RunRecord], policy: str
) -> None:
    verdict = analysis.verdict(records, policy)
    assert (verdict.outcome, verdict.main_reason.code) == (outcome, code)
    assert verdict.main_reason.kind == "gate"


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp16_unscaled", "tf32", "bf16_pure"])
def test_no_gate_fires_on_a_benign_candidate(analysis: Any, policy: str) -> None:
    verdict = analysis.verdict(planted(lambda r: r, policy=policy), policy)
    assert verdict.outcome == "accept"
    assert not [r for r in verdict.reasons if r.kind == "gate"]


def test_what_a_loss_scaler_does_in_its_calibration_is_normal(analysis: Any) -> None:
    def calibrating(record: RunRecord) -> RunRecord:
        record = replaced(record, "nonfinite_grad", 0, 3, 100.0)
        return replaced(record, "skipped", 0, 3, 1.0)

    assert analysis.verdict(planted(calibrating, policy="fp16"), "fp16").outcome == "accept"


def test_a_small_static_scale_has_not_collapsed(analysis: Any) -> None:
    static = PrecisionPolicy(
        name="fp16_static",
        compute_format="fp16",
        loss_scale=LossScaleSettings(kind="static", init_scale=0.5),
    )
    scaled = [make_record(static, seed, luck=0.001) for seed in range(3)]
    scaled = [replaced(r, "loss_scale", 0, 120, 0.5) for r in scaled]
    records = [*make_grid(["fp32"]), *scaled]
    assert analysis.verdict(records, "fp16_static").outcome == "accept"


def test_a_rise_that_fp32_shares_is_no_divergence(analysis: Any) -> None:
    """Both climb halfway back; one seed of the candidate a little further, far from 3 margins
    in every seed.
    """

    def halfway(record: RunRecord) -> RunRecord:
        losses = np.array(record.series["loss"])
        losses[90:] = 3.0 + (0.3 if (record.policy, record.seed) == ("bf16", 1) else 0.0)
        return with_series(record, loss=[float(x) for x in losses])

    verdict = analysis.verdict([halfway(r) for r in make_grid(["fp32", "bf16"])])
    assert "DIVERGED" not in analysis.codes(verdict)
    assert verdict.outcome == "inconclusive"


def test_buffers_that_fp32_ruins_as_well_are_not_held_against_a_candidate(analysis: Any) -> None:
    records = [with_final(r, nonfinite_buffers=1.0) for r in make_grid(["fp32", "bf16"])]
    assert analysis.verdict(records).outcome == "accept"


def test_all_hits_are_reported_the_first_one_decides(analysis: Any) -> None:
    records = planted(lambda r: reseeded(diverged(r)))
    assert analysis.codes(analysis.verdict(records))[:2] == ["PAIRING_BROKEN", "NONFINITE"]


def test_the_pairing_message_says_what_differed(analysis: Any) -> None:
    message = analysis.verdict(planted(reseeded)).main_reason.message
    assert "the initial weights differ" in message
    assert "seed 1" in message
    assert "from a generator seeded with `seed`" in message


def test_a_different_first_loss_is_only_a_warning(analysis: Any) -> None:
    records = planted(lambda r: replaced(r, "loss", 0, 1, 1.2 * r.series["loss"][0]))
    verdict = analysis.verdict(records)
    assert verdict.outcome == "accept"
    (warning,) = [r for r in verdict.reasons if r.code == "STEP0_LOSS_DIFFERS"]
    assert warning.kind == "warning"
    assert warning.value == pytest.approx(0.2, rel=0.05)


def test_tf32_has_a_tighter_bound_on_the_first_loss(analysis: Any) -> None:
    def off(record: RunRecord) -> RunRecord:
        return replaced(record, "loss", 0, 1, 1.01 * record.series["loss"][0])

    for policy, expected in (("tf32", True), ("bf16", False)):
        found = analysis.codes(analysis.verdict(planted(off, policy=policy), policy))
        assert ("STEP0_LOSS_DIFFERS" in found) is expected


def test_an_unstable_reference_is_inconclusive_for_all(analysis: Any) -> None:
    records = [diverged(r) for r in make_grid(["fp32", "fp32_twin", "bf16", "fp16", "tf32"])]
    findings = analysis.findings(records)
    for verdict in findings.verdicts:
        assert verdict.outcome == "inconclusive"
        assert "REFERENCE_UNSTABLE" in analysis.codes(verdict)
    assert findings.choice.policy is None
    assert findings.choice.reasons == ()
    assert findings.failed is None
    assert {v.execution for v in findings.verdicts if v.policy == "tf32"} == {"emulated"}


def test_few_unstable_references_are_left_out(analysis: Any) -> None:
    seeds = tuple(range(6))
    records = [
        diverged(r) if r.policy == "fp32" and r.seed == 4 else r
        for r in make_grid({"fp32": {}, "bf16": {"luck": 0.001}}, seeds)
    ]
    findings = analysis.findings(records, seeds=seeds)
    (verdict,) = findings.verdicts
    assert (verdict.outcome, verdict.seeds_used, verdict.seeds_dropped) == (
        "accept",
        (0, 1, 2, 3, 5),
        (4,),
    )
    assert "SEEDS_DROPPED" in [c.code for c in findings.caveats]


def test_a_reference_that_relapses_is_unstable(analysis: Any) -> None:
    records = [back_up(r) if r.policy == "fp32" else r for r in make_grid(["fp32", "bf16"])]
    assert analysis.verdict(records).main_reason.code == "REFERENCE_UNSTABLE"


def flat_then(record: RunRecord, level: float, *, start: float = 4.0) -> RunRecord:
    """Return the record with its loss falling to 2 within 20 steps and at `level` from step 60."""
    fall = np.maximum(2.0, start - 0.1 * np.arange(120))
    fall[60:] = level
    return with_series(record, loss=[float(x) for x in fall])


@pytest.mark.parametrize(("level", "diverges"), [(2.515, False), (2.6, True)])
def test_a_hair_beyond_the_bound_is_no_divergence(
    analysis: Any, level: float, diverges: bool
) -> None:
    """The bound is a quarter of what was learned, 2.5. FP32 ends just below it; a candidate just
    above it is 1.5 margins (of 0.02) worse, one at 2.6 is 6 margins worse.
    """
    records = [
        flat_then(r, level if (r.policy, r.seed) == ("bf16", 1) else 2.485)
        for r in make_grid(["fp32", "bf16"])
    ]
    assert ("DIVERGED" in analysis.codes(analysis.verdict(records))) is diverges


def test_a_loss_scale_of_one_has_not_collapsed(analysis: Any) -> None:
    records = planted(lambda r: replaced(r, "loss_scale", 50, 120, 1.0), policy="fp16")
    assert analysis.verdict(records, "fp16").outcome == "accept"


def test_a_gate_and_a_test_that_agree_are_both_said(analysis: Any) -> None:
    verdict = analysis.verdict(planted(shifted(0.5), in_seeds=EVERY))
    assert analysis.codes(verdict)[:2] == ["GROSS_DEGRADATION", "INFERIOR_TRAIN"]


def test_a_reference_that_climbs_above_its_start_is_unstable(analysis: Any) -> None:
    climb = [4.0 + 0.01 * step for step in range(120)]
    records = [with_series(r, loss=climb) for r in make_grid(["fp32", "bf16"])]
    assert analysis.verdict(records).main_reason.code == "REFERENCE_UNSTABLE"


def test_a_reference_that_loses_next_to_nothing_is_not_unstable(analysis: Any) -> None:
    """A dip by 5 % of the loss and back is noise; the run has not learned, which is said."""
    dip = [4.0] * 20 + [3.8] * 40 + [3.99] * 60
    records = [
        with_series(r, loss=dip) for r in make_grid(["fp32", "bf16"], held_out=False, start=4.0)
    ]
    assert analysis.verdict(records).main_reason.code == "REFERENCE_NOT_LEARNING"


def test_learning_must_stand_out_from_its_spread_over_seeds(analysis: Any) -> None:
    """Shares of 5 %, 60 % and 2 %: a mean of 22 % with a standard error of 19 %."""
    records = [
        make_record(policy, seed, floor=floor, seed_sd=0.0)
        for policy in ("fp32", "bf16")
        for seed, floor in enumerate((3.8, 1.6, 3.92))
    ]
    reason = analysis.verdict(records).main_reason
    assert reason.code == "REFERENCE_NOT_LEARNING"
    assert "not beyond its spread over seeds" in reason.message


def test_a_noisy_reference_is_not_called_unstable(analysis: Any) -> None:
    """Step noise as large as what was learned: fine-tuning with small batches looks like that."""
    records = make_grid({"fp32": {}, "bf16": {}}, start=3.0, floor=2.0, noise=1.0)
    assert analysis.verdict(records).outcome == "accept"


def test_a_crash_counts_even_where_fp32_does_not_learn(analysis: Any) -> None:
    verdict = analysis.verdict(planted(crashed, start=2.01))
    assert (verdict.outcome, verdict.main_reason.code) == ("reject", "CRASHED")


def test_a_missing_run_leaves_the_policy_undecided(analysis: Any) -> None:
    records = [r for r in make_grid(["fp32", "bf16"]) if (r.policy, r.seed) != ("bf16", 2)]
    verdict = analysis.verdict(records)
    assert (verdict.outcome, verdict.main_reason.code) == ("inconclusive", "RUN_MISSING")
    assert verdict.seeds_used == (0, 1)


@pytest.mark.parametrize("change", [lambda r: None, crashed])
def test_a_reference_that_is_missing_or_crashed_fails_the_model(
    analysis: Any, change: Callable[[RunRecord], RunRecord | None]
) -> None:
    records = [
        changed
        for r in make_grid(["fp32", "bf16"])
        if (changed := change(r) if (r.policy, r.seed) == ("fp32", 1) else r) is not None
    ]
    findings = analysis.findings(records)
    assert findings.failed is not None
    assert "seed 1" in findings.failed
    assert (findings.verdicts, findings.choice.policy) == ((), None)


def test_a_gross_difference_says_what_a_margin_is(analysis: Any) -> None:
    """Learned 2 nats from 4 to 2: the margin is 1 % of that, and 0.5 nats are 25 margins."""
    grid = make_grid({"fp32": {"seed_sd": 0.0}, "bf16": {"seed_sd": 0.0, "offset": 0.5}})
    message = analysis.verdict(grid).main_reason.message
    assert "by at least 25" in message
    assert "1 % of what FP32 learned" in message
    assert "which is small" not in message


def test_a_margin_of_a_vanishing_loss_is_explained(analysis: Any) -> None:
    """The loss ends at 0.02 after 4: 2 % of that is 1 / 100 of 1 % of what was learned."""
    common = {"floor": 0.02, "noise": 0.0, "seed_sd": 0.0}
    grid = make_grid({"fp32": common, "bf16": {**common, "offset": 0.01}})
    verdict = analysis.verdict(grid)
    assert verdict.main_reason.code == "GROSS_DEGRADATION"
    message = verdict.main_reason.message
    assert "2 % of FP32's loss at the end" in message
    assert "which is small beside the 3.9" in message
    assert "nats that it learned." in message


def test_one_seed_needs_a_larger_difference_to_be_gross(analysis: Any) -> None:
    """margin here is about 0.02: 5 margins decide two seeds, not one; 15 decide one."""
    for seeds, shift, outcome in (
        ((0, 1), 0.1, "reject"),
        ((0,), 0.1, "inconclusive"),
        ((0,), 0.3, "reject"),
    ):
        records = planted(shifted(shift), in_seeds=seeds, seeds=seeds)
        assert analysis.verdict(records, seeds=seeds).outcome == outcome


def test_low_precision_loss_with_a_held_out_set_is_judged_on_that_set(analysis: Any) -> None:
    records = planted(lambda r: dataclasses.replace(r, loss_on_16bit_grid="bf16"), in_seeds=EVERY)
    verdict = analysis.verdict(records)
    assert verdict.outcome == "accept"
    assert "LOSS_LOGGED_LOW_PRECISION" in analysis.codes(verdict)
    # One endpoint is tested, so rejection need not be divided.
    assert verdict.estimates["held_out"].alpha_reject == 0.05


def test_a_mean_of_a_few_16_bit_values_is_not_a_loss_in_another_16_bit_format(
    analysis: Any,
) -> None:
    """Four BF16 values have a mean of two bits more, which FP16 holds: nothing was logged in it."""

    def on_grid(record: RunRecord) -> RunRecord:
        return dataclasses.replace(record, loss_on_16bit_grid="fp16", held_out=None)

    records = planted(on_grid, in_seeds=EVERY)
    assert "LOSS_LOGGED_LOW_PRECISION" not in analysis.codes(analysis.verdict(records))
    # A loss that is cast by hand is in that format under every policy.
    verdict = analysis.verdict([on_grid(record) for record in records])
    assert verdict.main_reason.code == "LOSS_LOGGED_LOW_PRECISION"


def test_records_of_one_run_twice_are_refused(analysis: Any) -> None:
    records = [*make_grid(["fp32", "bf16"]), make_record("bf16", 0)]
    with pytest.raises(ValueError, match="two records of policy 'bf16' and seed 0"):
        analysis.findings(records)


def test_gradients_that_fp32_survives_as_well_are_not_held_against_a_candidate(
    analysis: Any,
) -> None:
    """An optimizer that drops non-finite gradients lets both runs go on."""
    records = planted(lambda r: replaced(r, "nonfinite_grad", 5, 6, 3.0))
    assert analysis.verdict(records).main_reason.code == "NONFINITE"
    both = [replaced(r, "nonfinite_grad", 5, 6, 3.0) if r.policy == "fp32" else r for r in records]
    verdict = analysis.verdict(both)
    assert (verdict.outcome, "NONFINITE" in analysis.codes(verdict)) == ("accept", False)


def test_what_is_no_pair_is_not_said_to_have_equal_weights_or_data(analysis: Any) -> None:
    records = planted(lambda r: reseeded(replaced(r, "loss", 0, 1, 1.2 * r.series["loss"][0])))
    assert "STEP0_LOSS_DIFFERS" not in analysis.codes(analysis.verdict(records))
    broken = analysis.verdict(planted(lambda r: reseeded(diverged(r))))
    (reason,) = [r for r in broken.reasons if r.code == "NONFINITE"]
    assert reason.message.endswith("FP32 stays finite.")
    whole = analysis.verdict(planted(diverged)).main_reason.message
    assert whole.endswith("FP32 stays finite on the same data.")


def test_masks_that_differ_have_an_advice_of_their_own(analysis: Any) -> None:
    def masked(record: RunRecord) -> RunRecord:
        prints = dataclasses.replace(record.fingerprints, dropout=(1,) * record.num_steps)
        return dataclasses.replace(record, fingerprints=prints)

    message = analysis.verdict(planted(masked)).main_reason.message
    assert "the dropout masks of step 0 differ" in message
    assert "torch's own generators" in message
    assert "build_model" not in message


def test_a_training_loss_in_16_bits_is_no_endpoint(analysis: Any) -> None:
    """It would span five margins; the held-out loss decides, and no sentence claims more."""

    def coarse(record: RunRecord) -> RunRecord:
        record = shifted(0.05 * (record.seed - 1) + 0.02)(record)
        return dataclasses.replace(record, loss_on_16bit_grid="bf16")

    findings = analysis.findings(planted(coarse, in_seeds=EVERY))
    (verdict,) = findings.verdicts
    assert verdict.outcome == "accept"
    assert set(verdict.estimates) == {"held_out"}
    assert "its held-out loss stays within the margin" in findings.choice.sentence
    assert "the training loss was not tested" in findings.choice.sentence
    # Nor can it reject, however gross the difference looks.
    gross = planted(
        lambda r: dataclasses.replace(shifted(0.5)(r), loss_on_16bit_grid="bf16"), in_seeds=EVERY
    )
    assert analysis.verdict(gross).outcome == "accept"


def test_a_figure_that_starts_at_zero_can_be_learned(analysis: Any) -> None:
    """Minus an accuracy, whatever its scale: any gain is large beside a start of 0."""
    for scale in (1.0, 1e-6):
        records = [
            with_held_out(r, lambda h, s=scale, k=r.seed: (0.0, *(-s * (1 + 0.01 * k),) * 5))
            for r in make_grid({"fp32": {}, "bf16": {"luck": 0.001}}, held_out_unit="own units")
        ]
        assert analysis.verdict(records).outcome == "accept"
