"""The same-point probe in words, and the evidence by module."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from factories import make_record
from probe_samples import GUILTY, MODULES, module_findings, probe_findings
from report_samples import make_findings, make_verdict

from harness.analysis.findings import ModelFindings
from harness.report.evidence import Evidence, gather
from harness.report.rounding_error import (
    MOST_ROWS,
    SHOWN,
    callout,
    module_tables,
    probe_columns,
    probe_rows,
    rounding_sentence,
    unprobed,
)


def _evidence(findings: ModelFindings) -> Evidence:
    policies = ["fp32", *(v.policy for v in findings.verdicts)]
    return gather(findings, [make_record(p) for p in policies])


@pytest.mark.parametrize(
    ("nu", "batch", "wanted"),
    [
        (
            0.002,
            64.0,
            "bf16's rounding error is 0.2 % of the sampling noise: like training with batch 63.9 "
            "instead of 64.",
        ),
        (1e-4, 64.0, "like training with batch 63.99 instead of 64."),
        # 64 / 1.25 = 51.2
        (0.25, 64.0, "is 25 % of the sampling noise: like training with batch 51.2 instead of 64."),
        (31.8, 64.0, "is 31.8 times the sampling noise: like training with batch 2.0 instead"),
        (0.002, None, "bf16's rounding error is 0.2 % of the sampling noise."),
        (0.0, 64.0, "like training with batch 64, to six digits, instead of 64."),
        (67156.0, 64.0, "like training with batch below 1 instead of 64."),
        (None, 64.0, "there is no noise to compare"),
        (math.nan, 64.0, "its gradients are not finite"),
        (math.inf, 64.0, "its gradients are not finite"),
    ],
)
def test_the_noise_ratio_reads_as_a_smaller_batch(
    nu: float | None, batch: float | None, wanted: str
) -> None:
    probe = dataclasses.replace(probe_findings("bf16"), noise_ratio=nu)
    assert wanted in rounding_sentence("bf16", probe, batch)


def test_the_probe_table_marks_exactly_the_failing_numbers() -> None:
    findings = make_findings(
        make_verdict("bf16", probe=probe_findings("bf16")),
        make_verdict("bf16_pure", "inconclusive", probe=probe_findings("bf16_pure")),
        make_verdict("tf32"),
    )
    assert probe_columns(findings) == (
        ("noise ratio", "at most 0.1"),
        ("bias", "at most 0.05"),
        ("descent", "within 1 \N{PLUS-MINUS SIGN}0.1"),
        ("retention", "at least 0.9"),
    )
    good, stalled = probe_rows(_evidence(findings))
    assert [c.fails for c in good.cells] == [False] * 4
    assert [c.fails for c in stalled.cells] == [False, False, False, True]
    assert stalled.cells[3].text == "0.190"
    assert "batch 63.9 instead of 64" in good.sentence
    assert unprobed(findings) == ("tf32",)


def test_a_rule_without_thresholds_leaves_the_headings() -> None:
    assert probe_columns(make_findings(rule={}))[0] == ("noise ratio", "")


def test_the_limits_of_a_measurement_are_said() -> None:
    probe = dataclasses.replace(
        probe_findings("bf16"),
        weak_signal=True,
        unseen=False,
        tests_final_rate=False,
        same_trajectory=False,
        notes=("FP64 was left out: too large.",),
    )
    (row,) = probe_rows(_evidence(make_findings(make_verdict(probe=probe))))
    assert len(row.notes) == 5
    assert row.notes[-1] == "FP64 was left out: too large"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"guilty_module": "dist", "guilty_sentence": "look at `dist`: bad."}, "Look at `dist`: "),
        ({"guilty_module": "dist"}, "Look at `dist`."),
        ({}, ""),
    ],
)
def test_callout(fields: dict[str, Any], wanted: str) -> None:
    assert callout(make_verdict(**fields)).startswith(wanted)
    assert bool(callout(make_verdict(**fields))) == bool(wanted)


def test_the_guilty_table_comes_first_and_holds_every_module() -> None:
    names = [f"layers.{k}.part" for k in range(200)]
    findings = make_findings(
        make_verdict("bf16", modules=module_findings(names, bad=False)),
        make_verdict(
            "bf16_pure",
            "reject",
            modules=module_findings([*names, GUILTY], bad=True),
            guilty_module=GUILTY,
            guilty_sentence=f"look at `{GUILTY}`: its local forward error is 0.41.",
        ),
    )
    first, second = module_tables(_evidence(findings))
    assert (first.policy, first.guilty, len(first.rows)) == ("bf16_pure", True, 201)
    name, _, suspicious, guilty, _ = first.rows[0]
    assert (name, suspicious, guilty) == (GUILTY, True, True)
    assert not any(g for *_, g, _ in first.rows[1:])
    # Where nothing is amiss the page holds the beginning of the list only.
    assert (len(second.rows), second.num_modules) == (SHOWN, 200)
    assert second.headline == "No module stands out."
    assert MOST_ROWS >= 201


def test_numbers_that_no_module_has_make_no_column() -> None:
    modules = tuple(
        dataclasses.replace(m, noise_ratio=None, zero_grad_share=None, formats=())
        for m in module_findings(MODULES, bad=False)
    )
    (table,) = module_tables(_evidence(make_findings(make_verdict(modules=modules))))
    assert "noise ratio" not in table.columns
    assert "zero gradients (FP32)" not in table.columns
    assert "formats" not in table.columns
    assert {"forward error", "gradient error"} <= set(table.columns)
    assert all(len(row[4]) == len(table.columns) for row in table.rows)


def test_an_accepted_candidate_may_have_a_conspicuous_module() -> None:
    modules = module_findings([GUILTY, "norm"], bad=True)
    (table,) = module_tables(_evidence(make_findings(make_verdict(modules=modules))))
    assert table.headline == f"Most conspicuous: `{GUILTY}`, local forward error 0.41."
    assert not table.guilty
