"""What the triage found, run by run."""

from __future__ import annotations

import dataclasses
from typing import Any

from factories import make_record
from probe_samples import GUILTY, triage
from report_samples import make_findings, make_verdict

from harness.report.evidence import gather
from harness.report.trouble_causes import Cause, causes
from harness.runs.record import RunRecord


def _record(policy: str, seed: int, found: Any) -> RunRecord:
    return dataclasses.replace(make_record(policy, seed), probes={"triage": found})


def _causes(*records: RunRecord) -> tuple[Cause, ...]:
    return causes(gather(make_findings(make_verdict("fp16")), list(records)))


def test_equal_sentences_of_a_policy_stand_once_with_all_seeds() -> None:
    late = {"sentence": "step 9: elsewhere", "cause": "data", "findings": []}
    found = _causes(
        _record("fp16", 0, triage()), _record("fp16", 1, triage()), _record("fp16", 2, late)
    )
    assert [c.runs for c in found] == ["fp16 (seeds 0, 1)", "fp16 (seed 2)"]
    assert found[0].sentence.startswith(f"Step 140: output of `{GUILTY}` reached 71,300 > 65,504")
    assert found[0].cause == "one layer"
    assert len(found[0].findings) == 2
    assert (found[1].cause, found[1].findings) == ("the data", ())


def test_the_same_place_with_other_numbers_stands_once() -> None:
    other = {**triage(), "step": 150, "sentence": "step 150: it reached 72,000"}
    elsewhere = {**triage(), "module": "head"}
    found = _causes(
        _record("fp16", 0, triage()), _record("fp16", 1, other), _record("fp16", 2, elsewhere)
    )
    assert [c.runs for c in found] == ["fp16 (seeds 0, 1; numbers of seed 0)", "fp16 (seed 2)"]
    assert found[0].sentence.startswith("Step 140")


def test_so_does_the_same_op_outside_of_every_module() -> None:
    loss = {**triage(), "module": None, "op": "log"}
    other = {**loss, "step": 150, "sentence": "step 150: it reached 72,000"}
    found = _causes(_record("fp16", 0, loss), _record("fp16", 1, other))
    assert [c.runs for c in found] == ["fp16 (seeds 0, 1; numbers of seed 0)"]


def test_odd_or_absent_triage_is_no_cause() -> None:
    assert _causes(make_record("fp16", 0), _record("fp16", 1, {"step": 3})) == ()
    odd = {"sentence": "it broke", "cause": "gremlins", "findings": [3, {"sentence": "it broke"}]}
    (cause,) = _causes(_record("fp16", 0, odd))
    assert (cause.sentence, cause.cause, cause.findings) == ("It broke", "not found", ())
