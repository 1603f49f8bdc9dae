"""Norms by module: largest over the run or mean over the samples, and what FP16 cannot hold."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from factories import make_record
from report_samples import make_findings, make_verdict

from harness.report.evidence import gather
from harness.report.evidence_view import evidence_context
from harness.report.tensor_norms import module_norms
from harness.runs.record import RunRecord


def _record(seed: int, modules: dict[str, Any]) -> RunRecord:
    return dataclasses.replace(make_record(seed=seed), probes={"norms": {"modules": modules}})


def test_maxima_are_the_run_s_and_rms_values_are_means() -> None:
    records = [
        _record(0, {"a": {"weight_rms": [1.0, "NaN"], "output_max": [2.0, 65_519.0]}}),
        _record(1, {"a": {"weight_rms": [3.0], "output_max": ["NaN", 5.0]}}),
        make_record(seed=2),
    ]
    (row,) = module_norms(records)
    assert row.values["weight_rms"] == 2.0
    assert row.values["output_max"] == row.largest == 65_519.0
    assert row.values["attention_logit_max"] is None
    # FP16 rounds 65519 down to 65504 and 65520 up to infinity.
    assert not row.beyond_fp16


def test_what_fp16_cannot_hold_comes_first_and_is_named() -> None:
    modules = {
        "small": {"output_max": [1.0]},
        "large": {"input_max": [65_520.0]},
        "broken": {"output_max": ["Infinity"]},
        "silent": {},
    }
    rows = module_norms([_record(0, modules)])
    assert [r.module for r in rows] == ["broken", "large", "small", "silent"]
    assert [r.beyond_fp16 for r in rows] == [True, True, False, False]
    assert math.isinf(rows[0].largest)
    evidence = gather(make_findings(make_verdict()), [_record(0, modules)])
    values = evidence_context(evidence)
    assert values["norms_beyond"] == ("broken", "large")
    assert values["norm_listing"].rows[1][1][3] == "65520"


def test_without_the_probe_there_are_no_rows() -> None:
    assert module_norms([make_record()]) == ()
