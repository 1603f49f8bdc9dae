"""The whole analyzer: torch-free, strict on its input, complete in its output."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from factories import crashed, make_grid, make_record

from harness.analysis.analyzer import analyze_model
from harness.analysis.rule import DecisionRule


def test_importing_the_analyzer_imports_nothing_heavy() -> None:
    code = (
        "import sys, harness.analysis.analyzer; "
        "print(sorted({'torch', 'mlflow', 'hydra', 'omegaconf', 'scipy', 'matplotlib'} "
        "& set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_findings_describe_the_grid(analysis: Any) -> None:
    findings = analysis.findings(make_grid({"fp32": {}, "bf16": {"luck": 1e-3}}, num_steps=120))
    assert (findings.workload, findings.device, findings.reference_policy) == ("toy", "cpu", "fp32")
    assert (findings.num_steps, findings.tail_start, findings.seeds) == (120, 80, (0, 1, 2))
    assert findings.scope == "the first 120 steps of this schedule, batch 64, on cpu"
    assert findings.rule == DecisionRule().as_mapping()
    assert findings.command.endswith("seed=0,1,2")
    assert [v.policy for v in findings.verdicts] == ["bf16"]


def test_verdicts_come_in_grid_order_with_their_descriptions(analysis: Any) -> None:
    records = make_grid(["fp16", "fp32", "bf16"])
    findings = analyze_model(
        records,
        sweep_id="s",
        policies=["fp16", "fp32", "bf16"],
        seeds=[0, 1, 2],
        reference="fp32",
        rule=DecisionRule(),
        timings=None,
        speed_note="not measured",
        command="",
        descriptions={"bf16": "BF16 autocast"},
    )
    assert [(v.policy, v.description) for v in findings.verdicts] == [
        ("fp16", ""),
        ("bf16", "BF16 autocast"),
    ]


def test_records_outside_the_grid_are_ignored(analysis: Any) -> None:
    records = make_grid(["fp32", "bf16"])
    stray = [make_record("fp16", 0), make_record("bf16", 9, offset=5.0)]
    policies = ["fp32", "bf16"]
    assert analysis.findings([*records, *stray], policies=policies) == analysis.findings(records)


def test_bad_grids_are_refused(analysis: Any) -> None:
    with pytest.raises(ValueError, match="reference='fp32' is not in the grid: bf16"):
        analysis.findings(make_grid(["bf16"]), policies=["bf16"])
    with pytest.raises(ValueError, match="no seeds"):
        analysis.findings(make_grid(["fp32"]), seeds=())


def test_a_grid_without_any_record_fails_in_words(analysis: Any) -> None:
    findings = analysis.findings([], policies=["fp32", "bf16"])
    assert findings.failed == "The reference fp32 has no finished run for seeds 0, 1 and 2."
    assert findings.choice.sentence.startswith("No recommendation for")
    assert findings.choice.sentence.endswith("the FP32 runs are incomplete.")


def test_a_policy_without_any_run_is_undecided(analysis: Any) -> None:
    findings = analysis.findings(make_grid(["fp32"]), policies=["fp32", "bf16"])
    (verdict,) = findings.verdicts
    assert (verdict.outcome, verdict.main_reason.code) == ("inconclusive", "RUN_MISSING")
    assert verdict.estimates == {}


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_the_shortest_runs_are_analyzed(analysis: Any, num_steps: int) -> None:
    findings = analysis.findings(make_grid(["fp32", "bf16", "fp16"], num_steps=num_steps))
    assert len(findings.verdicts) == 2


def test_everything_may_be_missing_from_a_record(analysis: Any) -> None:
    bare = {
        "final": {},
        "sampled": {},
        "sampled_steps": (),
        "audit": {},
    }
    records = make_grid(
        ["fp32", "bf16"], **bare, environment={}, settings={}, peak_memory_bytes=None
    )
    records = [crashed(r) if r.seed == 1 and r.policy == "bf16" else r for r in records]
    findings = analysis.findings(records)
    assert findings.verdicts[0].outcome == "reject"
    assert findings.verdicts[0].peak_memory_ratio is None


def test_memory_ratio_needs_one_way_of_counting(analysis: Any) -> None:
    spec = {"fp32": {}, "bf16": {"peak_memory_bytes": 60_000_000}}
    ratio = analysis.verdict(make_grid(spec, device_kind="cuda")).peak_memory_ratio
    assert ratio is not None
    assert ratio.value == pytest.approx(0.6)
    rounded = {**spec, "bf16": {**spec["bf16"], "execution": "emulated"}}
    assert analysis.verdict(make_grid(rounded, device_kind="cuda")).peak_memory_ratio is None
    spec["bf16"]["peak_memory_source"] = "another way"
    assert analysis.verdict(make_grid(spec, device_kind="cuda")).peak_memory_ratio is None


def test_memory_of_a_whole_process_has_no_ratio(analysis: Any) -> None:
    spec = {"fp32": {}, "bf16": {"peak_memory_bytes": 60_000_000}}
    assert analysis.verdict(make_grid(spec, device_kind="cpu")).peak_memory_ratio is None
