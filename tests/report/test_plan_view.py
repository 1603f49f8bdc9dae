"""Looks, savings and what a verdict could not have seen, as pages and terminal show them."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest
from factories import diverged, make_record
from report_samples import estimate, make_findings, make_verdict
from rich.console import Console

from harness.analysis.findings import LookSummary, ModelFindings, Reason, Savings, Verdict
from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan
from harness.report import evidence as ev
from harness.report.phrases import margin_lines
from harness.report.plan_view import (
    claim_rows,
    holm_line,
    look_rows,
    plan_line,
    savings_line,
    short_claims,
    smallest_harm,
    unseen_failures,
)
from harness.report.terminal import print_findings
from harness.report.writer import write_report
from harness.runs.record import ENDED_EARLY

LOOKS = SeedPlan.of(DecisionRule(), seeds_given=None)
FIXED = SeedPlan.of(DecisionRule(), seeds_given=3)
ALWAYS = SeedPlan.of(DecisionRule(always_valid=True), seeds_given=None)
SEEDS = tuple(range(8))


def look(index: int, stop: str, **fields: Any) -> LookSummary:
    values: dict[str, Any] = {
        "index": index,
        "of": 3,
        "pairs": LOOKS.looks[index - 1],
        "alpha": LOOKS.alphas[index - 1],
        "settled": stop not in ("went_on", "last_look", "unfinished"),
        "stop": stop,
        "sentence": f"Sentence of look {index}.",
        "intervals": {"train": (-0.5, 0.1, 0.8), "held_out": (-1.5, 0.2, 1.25)},
    }
    return LookSummary(**{**values, **fields})


def judged(policy: str, outcome: str, *looks: LookSummary, **fields: Any) -> Verdict:
    return make_verdict(policy, outcome, looks=looks, look=looks[-1], **fields)  # type: ignore[arg-type]


SETTLE = ("Seeds: 12 in all should settle it: python -m harness seed=0,1", "A longer run.")
HARMED = judged(
    "bf16_pure",
    "reject",
    look(1, "gate", intervals={}),
    reasons=(Reason(code="NONFINITE", message="NaN at step 3.", kind="gate"),),
    estimates={},
    seeds_used=(0,),
    min_detectable_harm={},
    min_detectable_harm_note="No pair to judge by.",
    failure_rate_bound=None,
    failure_rate_note="A run failed.",
    p_accept_holm=None,
)


@pytest.fixture(scope="module")
def adaptive() -> ModelFindings:
    return make_findings(
        judged("tf32", "accept", look(1, "accepted")),
        judged(
            "bf16",
            "inconclusive",
            *(look(1, "went_on"), look(2, "went_on"), look(3, "last_look")),
            seeds_used=SEEDS,
            settle=SETTLE,
            failure_rate_bound=0.312,
        ),
        HARMED,
        make_verdict("fp32_twin", is_control=True),
        plan=LOOKS,
        seeds=SEEDS,
        savings=Savings(
            runs=12,
            full_runs=40,
            seconds=60.0,
            full_seconds=200.0,
            by_policy={"tf32": 5, "bf16_pure": 7},
            sentence="12 of 40 runs were not needed: about 60 s of 200 s.",
        ),
    )


def test_every_look_at_every_candidate_is_a_row(adaptive: ModelFindings) -> None:
    rows = look_rows(adaptive)
    assert [(r.policy, r.look, r.seeds, r.level, r.decision) for r in rows] == [
        ("tf32", "1 of 3", "3", "0.02", "accepted"),
        ("bf16", "1 of 3", "3", "0.02", "undecided, went on"),
        ("bf16", "2 of 3", "5", "0.015", "undecided, went on"),
        ("bf16", "3 of 3", "8", "0.015", "undecided"),
        ("bf16_pure", "1 of 3", "3", "0.02", "rejected by a gate"),
    ]
    assert [r.first for r in rows] == [True, True, False, False, True]
    assert rows[0].intervals == {
        "training loss": "+0.10 [-0.50, +0.80]",
        "held-out loss": "+0.20 [-1.50, +1.25]",
    }
    assert set(rows[-1].intervals.values()) == {"n/a"}
    assert [r.sentence for r in rows] == ["", "", "", "", "Sentence of look 1."]


def test_a_fixed_plan_has_no_looks_but_says_what_it_is() -> None:
    findings = make_findings(judged("tf32", "accept", look(1, "accepted")), plan=FIXED)
    assert look_rows(findings) == ()
    assert savings_line(findings) == ""
    assert plan_line(findings) == (
        "Fixed plan: every policy on 3 seeds, judged once at level 0.05."
    )
    assert plan_line(dataclasses.replace(findings, plan=None)) == ""


def test_plans_with_looks_say_what_they_may_err(adaptive: ModelFindings) -> None:
    line = plan_line(adaptive)
    assert "Looks at 3, 5 and 8 seeds, which may err with probability 0.02, 0.015 and 0.015" in line
    assert "together at most 0.05" in line
    assert "after every seed from 3 to 8" in plan_line(dataclasses.replace(adaptive, plan=ALWAYS))
    assert savings_line(adaptive).endswith("Not run: tf32 5 and bf16_pure 7.")


def test_a_gate_that_voids_the_comparison_is_no_rejection() -> None:
    void = judged("tf32", "inconclusive", look(1, "gate"))
    (row,) = look_rows(make_findings(void, plan=LOOKS))
    assert row.decision == "no verdict possible"


def test_a_policy_that_only_holm_holds_back_says_so_in_its_row() -> None:
    plain = judged("tf32", "inconclusive", look(1, "last_look"))
    holm = Reason(code="HOLM_NOT_MET", message="p = 0.04 is above 0.015.", kind="test")
    held = dataclasses.replace(plain, reasons=(holm, *plain.reasons))
    rows = look_rows(make_findings(plain, held, plan=LOOKS))
    assert [row.sentence for row in rows] == ["", "Sentence of look 1."]


def test_one_look_has_one_level() -> None:
    plan = SeedPlan(kind="looks", looks=(3,), alphas=(0.05,))
    line = plan_line(make_findings(plan=plan))
    assert line == "One look at 3 seeds, which may err with probability 0.05."


def test_every_verdict_says_what_it_could_not_have_seen(adaptive: ModelFindings) -> None:
    rows = {row.policy: row for row in claim_rows(adaptive)}
    assert list(rows) == ["tf32", "bf16", "bf16_pure"]
    # 0.03 and 0.04 nats at a margin of 0.02.
    assert rows["tf32"].harm == (
        "1.50 margins (0.03 nats) in training loss; 2.00 margins (0.04 nats) in held-out loss"
    )
    assert rows["tf32"].failures == "up to 63.2 % (none in 3 runs)"
    assert rows["bf16"].failures == "up to 31.2 % (none in 8 runs)"
    assert rows["bf16_pure"].harm == "No pair to judge by."
    assert rows["bf16_pure"].failures == "A run failed."
    assert (rows["tf32"].adjusted, rows["bf16_pure"].adjusted) == ("0.050", "n/a")


def test_a_harm_that_one_endpoint_lacks_is_explained() -> None:
    verdict = make_verdict(
        min_detectable_harm={"train": 0.03}, min_detectable_harm_note="Too few pairs."
    )
    assert smallest_harm(verdict) == "1.50 margins (0.03 nats) in training loss. Too few pairs."
    assert smallest_harm(make_verdict(min_detectable_harm={})) == "n/a"
    assert unseen_failures(make_verdict(failure_rate_bound=None)) == "n/a"


def test_holm_says_whether_it_binds(adaptive: ModelFindings) -> None:
    assert "over 3 candidates" in holm_line(adaptive)
    assert "not binding" in holm_line(adaptive)
    bound = dataclasses.replace(adaptive, rule=DecisionRule(familywise=True).as_mapping())
    assert "was binding" in holm_line(bound)
    assert holm_line(make_findings(make_verdict(p_accept_holm=None))) == ""


def test_short_claims_take_the_worse_endpoint_and_group_the_rates(adaptive: ModelFindings) -> None:
    harm, rates = short_claims(adaptive)
    assert harm.endswith("in margins: tf32: 2.00, bf16: 2.00, bf16_pure: none.")
    assert rates.endswith("up to: 63.2 %: tf32; 31.2 %: bf16.")


def test_margins_of_different_looks_are_told_apart() -> None:
    wide = {"train": estimate((0.01, 0.02, 0.01), margin=0.02)}
    narrow = {"train": estimate((0.01, 0.02, 0.01), margin=0.018)}
    first = judged("tf32", "accept", look(1, "accepted"), estimates=wide)
    last = judged("bf16", "accept", look(3, "accepted"), estimates=narrow)
    lines = margin_lines(make_findings(first, last, plan=LOOKS))
    assert [line[:38] for line in lines] == [
        "1 margin at 3 seeds = 0.02 nats: 1 % o",
        "1 margin at 8 seeds = 0.018 nats: 1 % ",
    ]
    (line,) = margin_lines(make_findings(first, plan=LOOKS))
    assert line.startswith("1 margin = 0.02 nats")


def _evidence(findings: ModelFindings, *records: Any) -> ev.Evidence:
    return ev.gather(findings, list(records))


def test_runs_that_no_look_asked_for_are_not_missing(adaptive: ModelFindings) -> None:
    runs = {"fp32": 8, "fp32_twin": 8, "tf32": 3, "bf16": 7, "bf16_pure": 1}
    records = [make_record(p, s, workload="char_gpt") for p, n in runs.items() for s in range(n)]
    assert ev.trouble(_evidence(adaptive, *records)) == ("bf16 seed 7: there is no run",)


def test_a_run_that_ended_itself_says_why(adaptive: ModelFindings) -> None:
    record = diverged(make_record("bf16_pure", 0, workload="char_gpt"))
    event = {"step": 45, "kind": ENDED_EARLY, "message": "the loss is not finite at step 20"}
    record = dataclasses.replace(record, events=(event,))
    lines = ev.trouble(_evidence(adaptive, make_record("fp32", 0, workload="char_gpt"), record))
    assert (
        "bf16_pure seed 0: ended itself after 45 of 120 steps: the loss is not finite at step 20"
        in lines
    )


def test_page_markdown_and_terminal_show_looks_savings_and_limits(
    adaptive: ModelFindings, tmp_path: Path
) -> None:
    fallback = dataclasses.replace(adaptive.verdicts[0], fallback_of="bf16_pure")
    findings = dataclasses.replace(adaptive, verdicts=(fallback, *adaptive.verdicts[1:]))
    records = [
        make_record(p, 0, workload="char_gpt") for p in ("fp32", "tf32", "bf16", "bf16_pure")
    ]
    write_report(findings, records, tmp_path)
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    page = " ".join(re.sub("<[^>]+>", " ", (tmp_path / "report.html").read_text()).split())
    for text in (
        "tf32 (emulated) (tried automatically for bf16_pure)",
        "## Why each policy stopped",
        "12 of 40 runs were not needed",
        "| bf16 | 3 of 3 | 8 | +0.10 [-0.50, +0.80] |",
        "## What each verdict could not have seen",
        "up to 63.2 % (none in 3 runs)",
        "What would settle bf16:",
        "- A longer run.",
    ):
        assert text in markdown
    for text in (
        "tried automatically for bf16_pure",
        "Why each policy stopped",
        "12 of 40 runs were not needed",
        "undecided, went on",
        "rejected by a gate Sentence of look 1.",
        "What each verdict could not have seen",
        "No pair to judge by.",
        "What would settle bf16",
        "A longer run.",
    ):
        assert text in page
    console = Console(file=io.StringIO(), width=120)
    print_findings(findings, console, report_path=Path("report.html"))
    printed = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    for text in (
        "tf32 * (for bf16_pure)",
        "bf16: Sentence of look 3.",
        "12 of 40 runs were not needed",
        "What would settle bf16: Seeds: 12 in all",
        "Failure rate that would have gone unseen, up to: 63.2 %",
    ):
        assert text in printed
