"""What the probes stored is drawn together by module; anything may be absent or not finite."""

from __future__ import annotations

from typing import Any

from factories import POLICIES, make_record, make_same_point, with_norms, with_probe

from harness.analysis.module_evidence import Sides, module_findings
from harness.analysis.probe_values import finite_numbers
from harness.runs.record import RunRecord
from harness.runs.same_point.record import ModuleError


def look(ours: Any, theirs: Any, policy: str = "bf16", probe: Any = None) -> dict[str, Any]:
    found = module_findings(Sides(ours=(ours,), theirs=(theirs,)), probe, POLICIES[policy])
    return {m.module: m for m in found}


def test_all_sources_meet_in_one_row() -> None:
    ours = with_norms(
        make_record("bf16_pure"), net__0={"grad_zero_share": 0.5, "update_to_weight": 1e-3}
    )
    ours = with_probe(
        ours,
        "lost_updates",
        {"modules": {"net.0": {"updates": [100, 300], "lost_bf16": [10, 90]}}},
    )
    rows = [
        {"module": "net.0", "format": "bf16", "calls": 3, "op": "mm", "direction": "forward"},
        {"module": "net.0", "format": "fp32", "calls": 1, "op": "sum", "direction": "forward"},
    ]
    ours = with_probe(ours, "audit", {"rows": rows})
    theirs = with_norms(make_record("fp32"), net__0={"grad_zero_share": 0.1})
    probe = make_same_point(
        "bf16_pure", modules=[ModuleError(module="net.0", kind="Linear", cosine=0.9)]
    )
    row = look(ours, theirs, "bf16_pure", probe)["net.0"]
    assert (row.kind, row.cosine) == ("Linear", 0.9)
    assert row.zero_grad_share == (0.5, 0.1)
    assert row.update_to_weight == (1e-3, None)
    assert row.lost_update_share == 0.25
    assert row.formats == (("bf16", 0.75), ("fp32", 0.25))


def test_a_skipped_step_does_not_move_what_is_typical() -> None:
    table = {"modules": {"a": {"grad_zero_share": ["NaN", 0.2, 0.2, None, 1.0]}}}
    row = look(with_probe(make_record("fp16"), "norms", table), make_record("fp32"), "fp16")["a"]
    assert row.zero_grad_share == (0.2, None)


def test_stored_values_survive_a_round_trip_through_json() -> None:
    record = with_norms(make_record("bf16"), a={"grad_zero_share": float("inf")})
    back = RunRecord.from_json(record.to_json())
    assert look(back, make_record("fp32"))["a"].zero_grad_share is None


def test_records_without_probes_have_no_modules() -> None:
    assert look(make_record("bf16"), make_record("fp32")) == {}


def test_malformed_parts_are_passed_over() -> None:
    record = with_probe(make_record("bf16"), "norms", {"modules": ["?"]})
    record = with_probe(record, "audit", {"rows": {"module": "a"}, "nonfinite": [None]})
    assert look(record, make_record("fp32")) == {}


def test_numbers() -> None:
    assert finite_numbers([1, None, "NaN", "-Infinity", 2.5]) == [1.0, 2.5]
    assert finite_numbers("12") == []
