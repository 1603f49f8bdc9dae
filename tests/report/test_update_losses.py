"""Lost updates pooled over seeds and steps: sums first, then the share."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from factories import make_record
from report_samples import make_findings, make_verdict

from harness.report.evidence import gather
from harness.report.update_losses import PolicyUpdates, lost_updates
from harness.runs.record import RunRecord


def _record(policy: str, seed: int, modules: dict[str, Any], *, view: str) -> RunRecord:
    found = {"steps": [0, 5], "view": view, "modules": modules}
    return dataclasses.replace(make_record(policy, seed), probes={"lost_updates": found})


def _lost(records: list[RunRecord], *policies: str) -> tuple[PolicyUpdates, ...]:
    return lost_updates(gather(make_findings(*map(make_verdict, policies)), records))


def test_shares_pool_counts_and_the_worst_module_comes_first() -> None:
    slow = {"updates": [100, 300], "lost_bf16": [0, 200], "lost_fp16": [0, 0]}
    stuck = {
        "updates": [10, 0],
        "lost_bf16": [9, 0],
        "lost_fp16": [1, 0],
        "retained_nearest_bf16": [0.2, "NaN"],
        "retained_stochastic_bf16": [1.0, None],
    }
    records = [
        _record("fp32", 0, {"slow": slow, "stuck": stuck}, view="what_if"),
        _record("fp32", 1, {"slow": {"updates": [100], "lost_bf16": [50]}}, view="what_if"),
        _record("bf16", 0, {"slow": slow}, view="what_if"),
    ]
    (found,) = _lost(records, "bf16")
    assert (found.policy, found.observed) == ("fp32", False)
    first, second = found.modules
    assert first.module == "stuck"
    assert first.lost == {"bf16": pytest.approx(0.9), "fp16": pytest.approx(0.1)}
    assert (first.retained_nearest_bf16, first.retained_stochastic_bf16) == (0.2, 1.0)
    # 200 + 50 of 100 + 300 + 100; FP16 was counted in one seed only.
    assert second.lost == {"bf16": pytest.approx(0.5), "fp16": 0.0}


def test_policies_whose_weights_really_lose_stand_beside_the_what_if() -> None:
    table = {"a": {"updates": [4], "lost_bf16": [3]}}
    records = [
        _record("fp32", 0, table, view="what_if"),
        _record("bf16_pure", 0, table, view="observed"),
    ]
    assert [(u.policy, u.observed) for u in _lost(records, "bf16_pure")] == [
        ("fp32", False),
        ("bf16_pure", True),
    ]


def test_no_probe_or_no_update_is_no_row() -> None:
    idle = {"a": {"updates": [0, 0], "lost_bf16": [0, 0]}}
    assert _lost([make_record("fp32")], "bf16") == ()
    assert _lost([_record("fp32", 0, idle, view="what_if")], "bf16") == ()
    assert _lost([_record("fp32", 0, {"a": {"updates": None}}, view="what_if")], "bf16") == ()
