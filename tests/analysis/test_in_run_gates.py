"""When a run ends itself: certain failures at once, hopeless ones late, others never."""

from __future__ import annotations

import dataclasses
import math

import pytest
from factories import POLICIES, make_record, with_final, with_series

from harness.analysis.analyzer import analyze_model
from harness.analysis.in_run_gates import InRunGate, ended_early
from harness.analysis.rule import DecisionRule
from harness.runs.record import ENDED_EARLY, RunRecord

STEPS = 300
FETCH = 25
RULE = DecisionRule()
# FP32 goes from 4 nats to 2, so D is 2 and hopeless means 4 nats above it.
FP32 = make_record("fp32", num_steps=STEPS)


def candidate(policy: str = "bf16", **series: list[float]) -> RunRecord:
    return with_series(make_record(policy, num_steps=STEPS), **series)


def ended_at(
    record: RunRecord, reference: RunRecord | None = FP32, rule: DecisionRule = RULE
) -> tuple[int, str] | None:
    """Return after how many steps, and why, a run that is looked at every 25 steps ends."""
    gate = InRunGate(POLICIES[record.policy], reference, rule)
    for done in range(FETCH, record.num_steps, FETCH):
        why = gate({name: list(values[:done]) for name, values in record.series.items()})
        if why is not None:
            return done, why
    return None


def raised(*, by: float, first: int, last: int = STEPS) -> list[float]:
    losses = list(FP32.series["loss"])
    for step in range(first, last):
        losses[step] += by
    return losses


def stopped(record: RunRecord, step: int, why: str) -> RunRecord:
    """Return what is left of a run that ended itself."""
    held = record.held_out
    assert held is not None
    kept = [k for k, at in enumerate(held.steps) if at <= step]
    prints = record.fingerprints
    return dataclasses.replace(
        record,
        status="diverged",
        series={name: values[:step] for name, values in record.series.items()},
        held_out=dataclasses.replace(
            held, steps=held.steps[: len(kept)], loss=held.loss[: len(kept)]
        ),
        fingerprints=dataclasses.replace(
            prints, batches=prints.batches[:step], dropout=prints.dropout[:step]
        ),
        events=({"step": step, "kind": ENDED_EARLY, "message": why},),
    )


def test_a_healthy_run_goes_on() -> None:
    assert ended_at(candidate()) is None
    assert ended_at(candidate("fp16")) is None


def test_the_first_loss_that_is_not_finite_ends_the_run_at_the_next_fetch() -> None:
    losses = list(FP32.series["loss"])
    losses[61] = math.inf
    why = "the loss is not finite at step 61"
    assert ended_at(candidate(loss=losses)) == (75, why)
    # It needs no reference: a seed whose FP32 run fails too is left out of every comparison.
    assert ended_at(candidate(loss=losses), reference=None) == (75, why)


def test_gradients_that_are_not_finite_end_a_run_without_a_scaler_only() -> None:
    counts = [0.0] * STEPS
    counts[30] = 5.0
    found = ended_at(candidate("fp16_unscaled", nonfinite_grad=counts))
    assert found is not None
    assert found[0] == 50
    assert "gradients are not finite at step 30" in found[1]
    assert ended_at(candidate("fp16", nonfinite_grad=counts)) is None
    assert ended_at(candidate("fp16_unscaled", nonfinite_grad=counts), reference=None) is None
    # An optimizer that drops them is survived by FP32 as well.
    survived = with_series(FP32, nonfinite_grad=counts)
    assert ended_at(candidate("fp16_unscaled", nonfinite_grad=counts), survived) is None


def test_a_scale_below_one_ends_the_run_unless_it_is_static() -> None:
    scales = [2.0**16 / 2 ** (k // 3) for k in range(STEPS)]  # 1 at step 48, 0.5 at step 51
    found = ended_at(candidate("fp16", loss_scale=scales))
    assert found == (75, "the loss scale fell to 0.00391")
    static = dataclasses.replace(
        POLICIES["fp16"],
        loss_scale=dataclasses.replace(POLICIES["fp16"].loss_scale, kind="static"),
    )
    gate = InRunGate(static, FP32, RULE)
    assert gate(candidate("fp16", loss_scale=scales).series) is None


def test_a_streak_of_skips_across_two_fetches_counts_as_one() -> None:
    skipped = [1.0 if 40 <= k < 60 else 0.0 for k in range(STEPS)]  # 10 and 10
    assert ended_at(candidate("fp16", skipped=skipped)) == (
        75,
        "the loss scaler skipped 20 steps in a row",
    )
    skipped[59] = 0.0
    assert ended_at(candidate("fp16", skipped=skipped)) is None


def test_a_run_far_above_fp32_ends_after_a_third_and_a_window() -> None:
    # 30 of its steps must lie after step 100, so the fetch after 150 steps is the first that sees.
    found = ended_at(candidate(loss=raised(by=5.0, first=20)))
    assert found is not None
    assert found[0] == 150
    assert "each of the last 30 losses is above FP32's by 5" in found[1]
    assert ended_at(candidate(loss=raised(by=5.0, first=180))) is not None


@pytest.mark.parametrize(
    ("what", "losses"),
    [
        ("late bloomer at the loss before training", [4.0] * 200 + [2.0] * 100),
        ("spike of 29 steps", raised(by=50.0, first=121, last=150)),
        ("blow-up in the first third", raised(by=50.0, first=5, last=110)),
        ("every second step is fine", [4.0, 60.0] * 150),
        ("off by less than twice what FP32 learned", raised(by=3.8, first=20)),
        ("another level from the first step on, and learning", raised(by=5.0, first=0)),
    ],
)  # fmt: skip
def test_a_run_that_may_still_recover_is_not_ended(what: str, losses: list[float]) -> None:
    assert ended_at(candidate(loss=losses)) is None, what


def test_without_a_reference_that_learned_nothing_is_hopeless() -> None:
    lost = candidate(loss=raised(by=50.0, first=20))
    assert ended_at(lost, reference=None) is None
    flat = with_series(FP32, loss=[4.0] * STEPS)
    assert FP32.held_out is not None
    flat = dataclasses.replace(
        flat, held_out=dataclasses.replace(FP32.held_out, loss=(4.0,) * len(FP32.held_out.loss))
    )
    assert ended_at(lost, reference=flat) is None
    diverged = with_final(FP32, nonfinite_weights=1.0)
    assert ended_at(lost, reference=diverged) is None


def test_a_wide_margin_of_ones_own_is_more_patient() -> None:
    lost = candidate(loss=raised(by=5.0, first=20))
    assert ended_at(lost, rule=DecisionRule(margin=0.2)) is not None
    assert ended_at(lost, rule=DecisionRule(margin=0.3)) is None  # 20 margins are 6 nats
    assert ended_at(lost, rule=DecisionRule(hopeless_progress=3.0)) is None


def test_what_was_saved_is_steps_left_times_the_mean_step() -> None:
    record = stopped(candidate(), 75, "the loss is not finite at step 61")
    end = ended_early(record)
    assert end is not None
    assert (end.step, end.num_steps, end.why) == (75, 300, "the loss is not finite at step 61")
    assert end.seconds_saved == pytest.approx(225 * 0.01)
    assert end.note == "That ended the run after 75 of 300 steps, which saved about 2.3 s."
    assert ended_early(FP32) is None


def judged(record: RunRecord) -> tuple[str, dict[str, str]]:
    """Return outcome and gate messages of a candidate whose seed 0 is the given run."""
    name = record.policy
    records = [make_record(p, s, num_steps=STEPS) for p in ("fp32", name) for s in (0, 1, 2)]
    records = [r for r in records if (r.policy, r.seed) != (name, 0)] + [record]
    findings = analyze_model(
        records,
        sweep_id="s",
        policies=["fp32", name],
        seeds=[0, 1, 2],
        reference="fp32",
        rule=RULE,
        timings=None,
        speed_note="",
        command="",
        descriptions={},
    )
    (verdict,) = findings.verdicts
    return verdict.outcome, {r.code: r.message for r in verdict.reasons if r.kind == "gate"}


def test_the_verdict_on_a_run_that_overflowed_says_where_it_ended() -> None:
    losses = list(FP32.series["loss"])
    losses[61:] = [math.nan] * (STEPS - 61)
    record = candidate(loss=losses)
    found = ended_at(record)
    assert found is not None
    outcome, gates = judged(stopped(record, *found))
    assert outcome == "reject"
    assert list(gates) == ["NONFINITE"]
    assert "The loss is not finite at step 61 (seed 0; 1 of 3 seeds)" in gates["NONFINITE"]
    assert "ended the run after 75 of 300 steps" in gates["NONFINITE"]


def test_the_verdict_on_a_collapsed_scale_is_that_gate_alone() -> None:
    record = candidate("fp16", loss_scale=[2.0**16 / 2 ** (k // 3) for k in range(STEPS)])
    found = ended_at(record)
    assert found is not None
    outcome, gates = judged(stopped(record, *found))
    assert outcome == "reject"
    assert list(gates) == ["LOSS_SCALE_COLLAPSE"]
    assert "ended the run after 75 of 300 steps" in gates["LOSS_SCALE_COLLAPSE"]


def test_the_verdict_on_a_hopeless_run_is_divergence() -> None:
    record = candidate(loss=raised(by=5.0, first=20))
    found = ended_at(record)
    assert found is not None
    outcome, gates = judged(stopped(record, *found))
    assert outcome == "reject"
    assert list(gates) == ["DIVERGED"]
    assert "Seed 0: each of the last 30 losses" in gates["DIVERGED"]
    assert "ended the run after 150 of 300 steps" in gates["DIVERGED"]


def test_a_hopeless_run_would_have_been_rejected_at_its_end_as_well() -> None:
    record = candidate(loss=raised(by=5.0, first=20))
    outcome, gates = judged(record)
    assert outcome == "reject"
    assert "DIVERGED" in gates
