"""What would settle an undecided verdict, and that it does."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from factories import make_record, make_same_point
from scipy.stats import t

from harness.analysis.analyzer import analyze_model
from harness.analysis.decision import DecisionRule, estimate, non_inferiority
from harness.analysis.findings import Endpoint, Estimate, Verdict
from harness.analysis.forecast import forecast_looks, looks_command, settle_command
from harness.analysis.seed_plan import SeedPlan
from harness.analysis.settling import accepting_margins, settle_sentences
from harness.runs.same_point.record import SamePointRecord

RULE = DecisionRule()
LOOKS = SeedPlan.of(RULE, seeds_given=None)
EVERY_SEED = SeedPlan.of(DecisionRule(always_valid=True), seeds_given=None)


def one(
    differences: Sequence[float],
    *,
    rule: DecisionRule = RULE,
    num_endpoints: int = 1,
    unit: str = "nats",
) -> Estimate:
    return estimate(
        tuple(differences),
        unit=unit,
        margin=1.0,
        margin_term="progress",
        progress=100.0,
        reference_loss=2.0,
        num_endpoints=num_endpoints,
        rule=rule,
    )


def spread(mean: float, sd: float, pairs: int) -> tuple[float, ...]:
    """Return differences with exactly this mean and standard deviation."""
    x = np.linspace(-1, 1, pairs)
    return tuple(mean + sd * x / x.std(ddof=1))


def test_a_look_is_named_at_which_it_should_settle() -> None:
    """By hand: (t(n-1, 1-alpha_k) + t(n-1, 0.8)) * s / sqrt(n) <= distance, at the looks alone."""

    def reach(pairs: int, alpha: float) -> float:
        return (t.ppf(1 - alpha, pairs - 1) + t.ppf(0.8, pairs - 1)) / pairs**0.5

    five, eight = reach(5, 0.015), reach(8, 0.015)
    assert eight < five
    for sd, extra in ((0.99 / five, 2), (1.01 / five, 5), (0.99 / eight, 5)):
        at_one = {"train": one(spread(0.0, sd, 3), rule=LOOKS.rule_at(0, RULE))}
        assert forecast_looks(at_one, RULE, plan=LOOKS, look=0).extra_seeds == extra
    far = {"train": one(spread(0.0, 1.01 / eight, 3))}
    ahead = forecast_looks(far, RULE, plan=LOOKS, look=0)
    assert (ahead.extra_seeds, ahead.reason) == (None, "UNRESOLVABLE_AT_NMAX")


def test_rejection_is_forecast_at_its_share_of_the_level() -> None:
    rule = LOOKS.rule_at(0, RULE)
    reach = (t.ppf(1 - 0.0075, 4) + t.ppf(0.8, 4)) / 5**0.5
    for factor, extra in ((0.99, 2), (1.01, 5)):
        e = one(spread(2.0, factor / reach, 3), rule=rule, num_endpoints=2)
        assert forecast_looks({"train": e}, RULE, plan=LOOKS, look=0).extra_seeds == extra


def test_at_the_last_look_any_number_of_seeds_counts() -> None:
    rule = LOOKS.rule_at(2, RULE)
    e = one(spread(0.5, 0.8, 8), rule=rule)
    ahead = forecast_looks({"train": e}, RULE, plan=LOOKS, look=2)
    assert ahead.extra_seeds is not None
    total = 8 + ahead.extra_seeds
    reach = [(t.ppf(0.985, n - 1) + t.ppf(0.8, n - 1)) * 0.8 / n**0.5 for n in (total - 1, total)]
    assert reach[0] > 0.5 >= reach[1]
    hopeless = {"train": one(spread(0.95, 2.0, 8), rule=rule)}
    ahead = forecast_looks(hopeless, RULE, plan=LOOKS, look=2)
    assert (ahead.extra_seeds, ahead.reason) == (None, "UNRESOLVABLE_AT_NMAX")


def test_too_few_sound_pairs_wait_for_the_next_look() -> None:
    assert forecast_looks({}, RULE, plan=LOOKS, look=0).extra_seeds == 2
    two = {"train": one((0.1, 0.2))}
    assert forecast_looks(two, RULE, plan=LOOKS, look=0).extra_seeds == 2
    assert forecast_looks(two, RULE, plan=EVERY_SEED, look=0).extra_seeds == 1
    assert forecast_looks(two, RULE, plan=LOOKS, look=2).extra_seeds == 1


def test_the_always_valid_plan_needs_more() -> None:
    e = {"train": one(spread(0.0, 0.35, 3))}
    group = forecast_looks(e, RULE, plan=LOOKS, look=0).extra_seeds
    every = forecast_looks(e, RULE, plan=EVERY_SEED, look=0).extra_seeds
    assert group is not None
    assert every is None or every > group - 2


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("harness +sweep=precision", "harness +sweep=precision"),
        ("harness decision.looks=[3,5,8] device=cpu", "harness device=cpu"),
        ("harness 'decision.looks=[3, 6, 10]' device=cpu", "harness device=cpu"),
        ("harness other.decision.looks=[3]", "harness other.decision.looks=[3]"),
    ],
)
def test_the_command_replaces_its_looks(command: str, kept: str) -> None:
    assert looks_command(command, (3, 5, 14)) == f"{kept} 'decision.looks=[3,5,14]'"
    assert looks_command("", (3, 5, 14)) is None


def test_named_seeds_replace_a_number_of_seeds() -> None:
    command = settle_command("harness decision.seeds=3 device=cpu", seeds=(0, 1, 2), extra=1)
    assert command == "harness device=cpu seed=0,1,2,3"


def test_the_margin_that_is_named_would_accept() -> None:
    """Planted: with the margin from the sentence the same differences are accepted."""
    for mean, sd in ((0.5, 0.8), (0.97, 0.6), (1.6, 1.0), (0.2, 3.0)):
        e = one(spread(mean, sd, 5))
        (sentence,) = [
            s
            for s in settle_sentences({"train": e}, total=9, command=None, rule=RULE)
            if "margin=" in s
        ]
        margin = float(re.findall(r"decision\.margin=([0-9.e+-]+[0-9])", sentence)[0])
        wider = dataclasses.replace(e, margin=margin)
        assert non_inferiority({"train": wider}, rule=RULE).outcome == "accept"
        tight = dataclasses.replace(e, margin=0.98 * margin)
        assert non_inferiority({"train": tight}, rule=RULE).outcome != "accept"
        percent = float(re.findall(r"\(([0-9.e+-]+) % of what", sentence)[0])
        assert percent / 100 * e.progress == pytest.approx(margin, rel=0.01)
        assert accepting_margins({"train": e}) == {"train": e.ci_high}


def test_endpoints_in_two_units_share_a_percentage_only() -> None:
    both: dict[Endpoint, Estimate] = {
        "train": one(spread(0.5, 0.8, 5)),
        "held_out": dataclasses.replace(one(spread(0.5, 1.6, 5), unit="own units"), progress=50.0),
    }
    text = " ".join(settle_sentences(both, total=9, command=None, rule=RULE))
    high = both["held_out"].ci_high
    assert high is not None
    (percent,) = re.findall(r"decision\.margin='([0-9.]+) %'", text)
    assert 100 * high / 50.0 < float(percent) < 1.01 * 100 * high / 50.0
    assert "nats" not in text


def test_no_margin_is_named_where_the_other_candidates_have_a_say() -> None:
    sentences = settle_sentences(
        {"train": one(spread(0.5, 0.8, 5))},
        total=9,
        command=None,
        rule=DecisionRule(familywise=True),
    )
    assert not any("margin=" in s for s in sentences)


def test_seeds_beyond_the_plan_say_that_their_level_is_spent_again() -> None:
    estimates = {"train": one(spread(0.5, 0.8, 8))}
    for rule, expected in (
        (LOOKS.rule_at(2, RULE), "mean and spread, judged at level 0.015 once more: run it"),
        (EVERY_SEED.rule_at(5, RULE), "mean and spread: run it"),
    ):
        sentence = settle_sentences(estimates, total=9, command="run it", rule=rule)[0]
        assert sentence.endswith(expected)


def test_a_larger_held_out_set_is_named_where_it_alone_is_undecided() -> None:
    narrow, wide = one(spread(0.2, 0.05, 5)), one(spread(0.2, 1.0, 5))
    sentences = settle_sentences(
        {"train": narrow, "held_out": wide}, total=20, command="harness", rule=RULE
    )
    (sentence,) = [s for s in sentences if s.startswith("A larger held-out set")]
    assert wide.ci_high is not None
    factor = (wide.ci_high - 0.2) / 0.8
    assert f"{factor:.1f} times narrower" in sentence
    assert f"at least {factor**2:.1f} times as many items" in sentence
    for estimates in (
        {"train": wide, "held_out": wide},
        {"train": narrow, "held_out": one(spread(1.2, 1.0, 5))},
        {"train": wide},
    ):
        text = " ".join(settle_sentences(estimates, total=20, command=None, rule=RULE))  # type: ignore[arg-type]
        assert "A larger held-out set" not in text


def undecided(
    plan: SeedPlan | None,
    pairs: int,
    *,
    margins: Sequence[float],
    probe: SamePointRecord | None = None,
) -> Verdict:
    records = [make_record("fp32", seed, seed_sd=0.0) for seed in range(pairs)]
    records += [
        make_record("bf16", seed, seed_sd=0.0, offset=0.02 * margins[seed % len(margins)])
        for seed in range(pairs)
    ]
    findings = analyze_model(
        records,
        sweep_id="s",
        policies=["fp32", "bf16"],
        seeds=range(pairs if plan is None else plan.max_pairs),
        reference="fp32",
        rule=RULE,
        timings=None,
        speed_note="",
        command="python -m harness +sweep=precision",
        descriptions={},
        plan=plan,
        same_point={} if probe is None else {"bf16": probe},
    )
    (verdict,) = findings.verdicts
    assert verdict.outcome == "inconclusive"
    return verdict


def test_the_last_look_says_what_would_settle_it() -> None:
    verdict = undecided(LOOKS, 8, margins=(0.1, 1.3, 0.5, 0.9))
    assert verdict.extra_seeds is not None
    total = 8 + verdict.extra_seeds
    command = f"python -m harness +sweep=precision 'decision.looks=[3,5,{total}]'"
    assert verdict.settle_command == command
    assert verdict.settle[0].startswith(f"Seeds: {total} in all")
    assert verdict.settle[0].endswith(command)
    assert any("decision.margin=" in sentence for sentence in verdict.settle)
    assert set(verdict.accepting_margins) == {"train", "held_out"}


def test_no_margin_answers_a_failing_probe() -> None:
    # The mean lies outside the margin, so seeds may still reject; an acceptance is not to be had.
    margins = (0.6, 1.7, 1.3, 0.9)
    passing = undecided(LOOKS, 8, margins=margins, probe=make_same_point())
    assert any("decision.margin=" in sentence for sentence in passing.settle)
    failing = undecided(LOOKS, 8, margins=margins, probe=make_same_point(retention=0.2))
    assert failing.settle
    assert not any("decision.margin=" in sentence for sentence in failing.settle)


def test_an_earlier_look_just_goes_on() -> None:
    verdict = undecided(LOOKS, 3, margins=(-0.5, 0.6, 0.2))
    # A spread of 0.56 margins: (3.30 + 0.94) * 0.56 / sqrt(5) is beyond the margin, not with 8.
    assert (verdict.extra_seeds, verdict.settle) == (5, ())
    assert verdict.settle_command == "python -m harness +sweep=precision"


def test_a_fixed_plan_names_seeds_beyond_the_affordable_ones_too() -> None:
    verdict = undecided(None, 5, margins=(0.1, 1.3, 0.5, 0.9, 0.7))
    assert (verdict.extra_seeds, verdict.extra_seeds_reason) == (None, "UNRESOLVABLE_AT_NMAX")
    (seeds,) = re.findall(r"Seeds: (\d+) in all .*seed=([\d,]+)$", verdict.settle[0])
    assert seeds[1].split(",") == [str(k) for k in range(int(seeds[0]))]


def test_what_is_settled_or_gated_has_nothing_ahead(analysis: Any) -> None:
    records = [make_record("fp32", s) for s in range(3)]
    records += [make_record("bf16", s, offset=1.0) for s in range(3)]
    verdict = analysis.verdict(records)
    assert verdict.outcome == "reject"
    assert (verdict.settle, verdict.extra_seeds, verdict.settle_command) == ((), None, None)
