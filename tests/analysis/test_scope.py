"""What every verdict states, whatever it is: its scope, and the harm and rate it could not see."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from factories import crashed, diverged, make_grid, make_record, with_series

from harness.analysis.endpoints import OWN_UNIT
from harness.analysis.findings import ModelFindings, Reason
from harness.analysis.rule import DecisionRule
from harness.report.decision_json import decision_document
from harness.runs.record import RunRecord

Records = list[RunRecord]


def _planted(change: Callable[[RunRecord], RunRecord], policy: str = "bf16") -> Records:
    records = make_grid({"fp32": {}, "bf16": {"luck": 1e-4}})
    return [change(r) if r.policy == policy else r for r in records]


def _unpaired(record: RunRecord) -> RunRecord:
    marks = dataclasses.replace(record.fingerprints, init_sha256="0" * 64)
    return dataclasses.replace(record, fingerprints=marks)


CASES: dict[str, Records] = {
    "NONINFERIOR": _planted(lambda r: r),
    "INFERIOR_TRAIN": make_grid({"fp32": {}, "bf16": {"offset": 0.05, "luck": 0.003}}),
    "GROSS_DEGRADATION": make_grid({"fp32": {}, "bf16": {"offset": 0.5}}),
    "CI_SPANS_MARGIN": [
        *make_grid(["fp32"]),
        *(make_record("bf16", seed, offset=0.01 * seed) for seed in range(3)),
    ],
    "CRASHED": _planted(crashed),
    "NONFINITE": _planted(lambda r: diverged(r)),
    "PAIRING_BROKEN": _planted(_unpaired),
    "REFERENCE_UNSTABLE": _planted(lambda r: diverged(r), "fp32"),
    "REFERENCE_NOT_LEARNING": make_grid(["fp32", "bf16"], floor=3.99, noise=0.0),
    "TOO_FEW_SEEDS": make_grid(["fp32", "bf16"], seeds=(0, 1)),
    "RUN_MISSING": make_grid({"fp32": {}}),
    "LOSS_LOGGED_LOW_PRECISION": [
        dataclasses.replace(r, loss_on_16bit_grid="bf16")
        for r in make_grid({"fp32": {}, "bf16": {"luck": 1e-4}}, held_out=False)
    ],
}


@pytest.mark.parametrize("code", CASES)
def test_every_verdict_states_what_it_could_not_see(analysis: Any, code: str) -> None:
    records = CASES[code]
    seeds = sorted({r.seed for r in records})
    findings = analysis.findings(records, seeds=seeds, policies=["fp32", "bf16"])
    (verdict,) = findings.verdicts
    assert verdict.main_reason.code == code
    (stored,) = decision_document(findings)["verdicts"]
    assert stored["scope"] == verdict.scope
    wanted = "nothing yet" if code == "RUN_MISSING" else "the first 120 steps of this schedule"
    assert verdict.scope.startswith(wanted)
    assert (stored["failure_rate_bound"] is None) == (stored["failure_rate_note"] is not None)
    lacking = not verdict.estimates or set(verdict.estimates) != set(stored["min_detectable_harm"])
    assert lacking == (stored["min_detectable_harm_note"] is not None)
    assert all(x is not None for x in stored["min_detectable_harm"].values())


def test_scope_names_the_seeds_and_emulation(analysis: Any) -> None:
    verdict = analysis.verdict(make_grid(["fp32", "tf32"]), "tf32")
    assert verdict.scope == (
        "the first 120 steps of this schedule, batch 64, on cpu; seeds 0, 1 and 2; emulated"
    )


def test_a_failed_run_leaves_no_bound(analysis: Any) -> None:
    verdict = analysis.verdict(CASES["NONFINITE"])
    assert verdict.failure_rate_bound is None
    assert verdict.failure_rate_note.startswith("A run failed")
    nan = [
        with_series(r, loss=(*r.series["loss"][:-1], math.nan))
        if (r.policy, r.seed) == ("bf16", 1)
        else r
        for r in make_grid(["fp32", "bf16"], held_out=False)
    ]
    assert "not a number" in analysis.verdict(nan).min_detectable_harm_note


def _caveat(findings: ModelFindings) -> Reason:
    (found,) = [c for c in findings.caveats if c.code == "USER_MARGIN"]
    assert found.kind == "caveat"
    return found


def test_a_margin_of_ones_own_is_said_with_what_the_formula_gives(analysis: Any) -> None:
    records = make_grid({"fp32": {}, "bf16": {"luck": 1e-4}})
    formula = analysis.findings(records)
    assert not [c for c in formula.caveats if c.code == "USER_MARGIN"]
    size = formula.verdicts[0].estimates["train"].margin
    findings = analysis.findings(records, rule=DecisionRule(margin=0.5))
    assert _caveat(findings).message == f"The margin is yours: 0.5 nats (formula: {size:.3g} nats)."
    for e in findings.verdicts[0].estimates.values():
        assert (e.margin, e.margin_term, e.formula_margin) == (0.5, "user", size)
    assert formula.verdicts[0].estimates["train"].formula_margin is None


def test_where_a_margin_of_ones_own_is_not_used_is_said(analysis: Any) -> None:
    records = make_grid({"fp32": {}, "bf16": {"luck": 1e-4}}, held_out_unit=OWN_UNIT)
    message = _caveat(analysis.findings(records, rule=DecisionRule(margin="0.5 own"))).message
    assert message.startswith("decision.margin=0.5 own is yours. Training loss: the formula's 0.0")
    assert "; held-out loss: 0.5 own units (formula: 0.0" in message
    message = _caveat(analysis.findings(records, rule=DecisionRule(margin="3 %"))).message
    assert "formula's" not in message
    same = make_grid({"fp32": {}, "bf16": {"luck": 1e-4}})
    message = _caveat(analysis.findings(same, rule=DecisionRule(margin="0.5 own"))).message
    assert "Training loss and held-out loss: the formula's" in message
