"""The matrix of op families and formats, and what is said beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from factories import make_record
from report_samples import make_findings, make_verdict

from harness.report.evidence import Evidence, gather
from harness.report.what_ran import is_low, what_ran
from harness.runs.record import RunRecord


def _row(family: str, direction: str, fmt: str, calls: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "module": "net",
        "family": family,
        "op": f"aten::{family}",
        "direction": direction,
        "format": fmt,
        "calls": calls,
        "flops": 0,
        **fields,
    }


def _audited(policy: str, *rows: dict[str, Any], **fields: Any) -> RunRecord:
    audit = {"rows": list(rows), "casts": [], "nonfinite": [], **fields}
    return dataclasses.replace(make_record(policy), probes={"audit": audit})


def _evidence(records: list[RunRecord]) -> Evidence:
    policies = [r.policy for r in records if r.policy != "fp32"]
    return gather(make_findings(*map(make_verdict, policies)), records)


def test_directions_stand_together_only_where_every_policy_treats_them_alike() -> None:
    records = [
        _audited(
            "fp32",
            _row("matmul", "forward", "fp32", 2, flops=8),
            _row("matmul", "backward", "fp32", 4, flops=16),
            _row("sum", "forward", "fp32"),
            _row("sum", "backward", "fp32"),
        ),
        _audited(
            "bf16",
            _row("matmul", "forward", "bf16", 2, flops=8),
            _row("matmul", "backward", "bf16", 3, flops=12),
            _row("matmul", "backward", "fp32", 1, flops=4),
            _row("sum", "forward", "fp32"),
            _row("sum", "backward", "fp32"),
        ),
    ]
    found = what_ran(_evidence(records))
    assert found.policies == ("fp32", "bf16")
    assert [(r.family, r.direction) for r in found.rows] == [
        ("matmul", "forward"),
        ("matmul", "backward"),
        ("sum", "both"),
    ]
    cells = [(c.format, c.calls, c.low) for c in found.rows[1].cells["bf16"]]
    assert cells == [("bf16", 3, True), ("fp32", 1, False)]
    assert found.rows[2].cells["fp32"][0].calls == 2


def test_shares_casts_and_what_stayed_in_fp32() -> None:
    record = _audited(
        "bf16",
        _row("matmul", "forward", "bf16", flops=30),
        _row("matmul", "forward", "fp32", flops=10, module="head"),
        _row("matmul", "backward", "fp32", flops=20, module=None),
        casts=[{"calls": 2, "elements": 1000}, {"calls": 1, "elements": 500}],
        low_precision_flop_share=0.5,
        nonfinite=[
            {"module": "scores", "op": "aten::bmm", "direction": "forward", "format": "fp16"}
        ]
        * 2,
    )
    (audit,) = what_ran(_evidence([record])).audits
    assert audit.low_precision_share == "50.0 %"
    assert audit.casts == "3 (1,500 elements)"
    assert audit.products_in_fp32 == ("outside of modules", "head")
    assert audit.nonfinite == (
        "a non-finite output from finite inputs in aten::bmm in `scores` (forward, fp16)."
    )


def test_a_policy_that_did_nothing_lists_no_modules() -> None:
    record = _audited(
        "bf16", _row("matmul", "forward", "fp32", flops=8), low_precision_flop_share=0.0
    )
    (audit,) = what_ran(_evidence([record])).audits
    assert audit.low_precision_share == "0 %"
    assert audit.products_in_fp32 == ()


def test_older_records_still_show_the_forward_pass() -> None:
    found = what_ran(_evidence([make_record("fp32"), make_record("bf16")]))
    assert found.forward_only
    assert found.rows[0].cells["bf16"][0].format == "bf16"


def test_nothing_audited() -> None:
    record = dataclasses.replace(make_record("fp32"), audit={})
    assert what_ran(_evidence([record])).rows == ()


@pytest.mark.parametrize(
    ("name", "low"),
    [("bf16", True), ("tf32", True), ("fp8_e4m3", True), ("fp32", False), ("complex64", False)],
)
def test_low_means_fewer_bits_than_fp32(name: str, low: bool) -> None:
    assert is_low(name) is low
