"""Memory by part and time by op family, read from records and findings."""

from __future__ import annotations

import dataclasses
from typing import Any

from factories import make_record
from probe_samples import profiles
from report_samples import make_findings, make_verdict

from harness.report.evidence import Evidence, gather
from harness.report.resources import (
    memory_parts,
    memory_sentences,
    profile_sentences,
    time_parts,
)
from harness.runs.record import RunRecord


def _with_memory(policy: str, **parts: Any) -> RunRecord:
    return dataclasses.replace(make_record(policy), probes={"memory": parts})


def _evidence(*records: RunRecord) -> Evidence:
    return gather(make_findings(make_verdict("bf16")), list(records))


def test_memory_parts_leave_out_what_is_empty() -> None:
    found = memory_parts(
        _evidence(
            _with_memory("fp32", weights=4, gradients=4, optimizer_state=8, loss_scaler=0),
            _with_memory("bf16", weights=2, gradients="NaN", total=99),
        )
    )
    assert found == {
        "fp32": {"weights": 4.0, "gradients": 4.0, "optimizer state": 8.0},
        "bf16": {"weights": 2.0},
    }


def test_equal_sentences_on_memory_stand_once() -> None:
    said = "AdamW's state is 60 % of it."
    found = memory_sentences(
        _evidence(_with_memory("fp32", largest=said), _with_memory("bf16", largest=said))
    )
    assert found == ("fp32, bf16: AdamW's state is 60 % of it.",)


def test_profiles_give_parts_and_sentences() -> None:
    findings = make_findings(profiles=profiles())
    assert list(time_parts(findings)["fp32"]) == ["matmul", "elementwise", "softmax"]
    assert "cast" in time_parts(findings)["bf16"]
    assert profile_sentences(findings)[1] == (
        "bf16 spends 61 % of its time in FP32 element-wise ops. "
        "Most of the time: aten::mul, aten::addmm, aten::add."
    )


def test_nothing_measured() -> None:
    assert memory_parts(_evidence(make_record("fp32"))) == {}
    assert memory_sentences(_evidence(make_record("fp32"))) == ()
    assert time_parts(make_findings()) == {}
    assert profile_sentences(make_findings()) == ()
