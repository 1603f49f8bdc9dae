"""Histograms by module pooled over runs, against brute force; windows of safe loss scales."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from factories import make_record

from harness.report.exponent_ranges import (
    always_safe,
    histograms,
    range_losses,
    shares,
    window,
)
from harness.runs.record import RunRecord


def _record(seed: int = 0, **exponents: Any) -> RunRecord:
    return dataclasses.replace(make_record(seed=seed), probes={"exponents": exponents})


def _stored(values: list[float]) -> dict[str, Any]:
    """Return one histogram in the stored layout, by brute force."""
    bins: dict[str, int] = {}
    for value in values:
        if value and math.isfinite(value):
            key = str(math.frexp(value)[1] - 1 + 127)
            bins[key] = bins.get(key, 0) + 1
    zeros = sum(v == 0 for v in values)
    bad = sum(not math.isfinite(v) for v in values)
    return {"bins": bins, "elements": len(values), "zeros": zeros, "nonfinite": bad}


def test_counts_add_up_over_seeds() -> None:
    records = [
        _record(0, modules={"a": {"weights": _stored([1.0, 2.0, 0.0])}}),
        _record(1, modules={"a": {"weights": _stored([1.5, math.inf])}, "b": {"unknown": {}}}),
        make_record(seed=2),
    ]
    tables = histograms(records)
    assert list(tables) == ["weights"]
    table = tables["weights"]["a"]
    assert table[127] == 2
    assert table[128] == 1
    assert (table[0], table[255]) == (1, 1)
    found = shares(tables["weights"].values())
    assert found is not None
    np.testing.assert_allclose(found[126:128], [2 / 3, 1 / 3])


def test_losses_are_shares_of_the_nonzero_elements() -> None:
    # Half the smallest FP16 subnormal is 2^-25; 2^-30 is flushed, 2^-20 kept, 2^17 overflows.
    values = [2.0**-30, 2.0**-20, 1.0, 2.0**17, 0.0]
    (row,) = range_losses(histograms([_record(modules={"a": {"inputs": _stored(values)}})]))
    assert row.flushed["fp16"] == 0.25
    assert row.overflow["fp16"] == 0.25
    assert row.flushed["bf16"] == row.overflow["bf16"] == 0
    # E4M3: subnormals end at 2^-9, the largest value is 448.
    assert row.flushed["fp8_e4m3"] == 0.5
    assert row.overflow["fp8_e4m3"] == 0.25
    assert (row.low, row.high) == (-30, 18)


def test_the_module_that_loses_most_comes_first() -> None:
    modules = {
        "fine": {"inputs": _stored([1.0] * 9)},
        "tiny": {"output_gradients": _stored([2.0**-40] * 5 + [1.0] * 5)},
        "broken": {"inputs": _stored([1.0, math.nan])},
        "empty": {"inputs": _stored([0.0, 0.0])},
    }
    rows = range_losses(histograms([_record(modules=modules)]))
    assert [row.module for row in rows] == ["broken", "tiny", "fine"]
    assert rows[0].nonfinite == 1


def test_the_window_is_what_every_seed_survives() -> None:
    steps = [0, 5, 10]
    records = [
        _record(
            0,
            weight_gradient_steps=steps,
            windows={"fp16": {"low": [2.0, 3.0, None], "high": [15, 14, 13]}},
        ),
        _record(
            1,
            weight_gradient_steps=steps[:2],
            windows={"fp16": {"low": [4.0, "NaN"], "high": [12, 16]}},
        ),
    ]
    found = window(records, "fp16")
    assert found is not None
    assert found.steps.tolist() == steps
    assert found.low.tolist()[:2] == [4.0, 3.0]
    assert math.isnan(found.low[2])
    assert found.high.tolist() == [12.0, 14.0, 13.0]
    assert always_safe(found) == (4, 12)
    assert window(records, "fp8_e5m2") is None


def test_crossing_ends_leave_no_safe_scale() -> None:
    record = _record(
        weight_gradient_steps=[0, 5],
        windows={"fp16": {"low": [2.0, 14.0], "high": [9.0, 16.0]}},
    )
    found = window([record], "fp16")
    assert found is not None
    assert always_safe(found) is None


def test_runs_without_the_probe_have_nothing() -> None:
    records = [make_record(), _record(modules=None, windows=7)]
    assert histograms(records) == {}
    assert range_losses({}) == ()
    assert window(records, "fp16") is None
    assert shares([np.zeros(256)]) is None
