"""Kinds of failure that people met in practice, rebuilt small: each has one right answer."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
import yaml

from harness.analysis.analyzer import analyze_model
from harness.analysis.findings import ModelFindings, Verdict
from harness.analysis.rule import DecisionRule
from harness.config import CONF
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.trainer import RunSettings, train
from harness.workloads.registry import make_workload

pytestmark = pytest.mark.slow

WORKLOADS = Path(__file__).parent / "workloads"
SEEDS = (0, 1, 2)


def policy(name: str, /, **changes: object) -> PrecisionPolicy:
    """Return a built-in policy, as its YAML has it, with some fields changed."""
    data = yaml.safe_load((CONF / "policy" / f"{name}.yaml").read_text(encoding="utf-8"))
    return dataclasses.replace(PrecisionPolicy.from_mapping(data), **changes)


def kept(base: str, module: str) -> PrecisionPolicy:
    return policy(base, name=f"{base}_{module}_fp32", fp32_modules=(module,))


def trained(path: Path, chosen: PrecisionPolicy, seed: int) -> RunRecord:
    workload = make_workload({"kind": "custom", "file": str(path)})
    return train(
        workload,
        chosen,
        RunSettings(steps=workload.default_steps, seed=seed, device="cpu", num_threads=1),
        run_key=f"{chosen.name}-{seed}",
        environment={"device_kind": "cpu"},
    )


def judged(
    path: Path, candidates: list[PrecisionPolicy], seeds: tuple[int, ...] = SEEDS
) -> tuple[ModelFindings, dict[str, list[RunRecord]]]:
    policies = [policy("fp32"), *candidates]
    runs = {p.name: [trained(path, p, seed) for seed in seeds] for p in policies}
    findings = analyze_model(
        [record for records in runs.values() for record in records],
        sweep_id="planted",
        policies=[p.name for p in policies],
        seeds=seeds,
        reference="fp32",
        rule=DecisionRule(),
        timings=None,
        speed_note="not measured",
        command="none",
        descriptions={},
    )
    return findings, runs


@functools.cache
def case(file: str, *candidates: PrecisionPolicy):
    """Judge a planted case once; returns verdicts by policy, the findings and the runs."""
    findings, runs = judged(WORKLOADS / file, list(candidates))
    return {v.policy: v for v in findings.verdicts}, findings, runs


def shown(verdict: Verdict) -> str:
    return f"{verdict.policy}: {[(r.code, r.message) for r in verdict.reasons]}"


def assert_accepted(verdicts: dict[str, Verdict], *names: str) -> None:
    for name in names:
        assert verdicts[name].outcome == "accept", shown(verdicts[name])


def assert_rejected(verdict: Verdict, *codes: str) -> None:
    assert verdict.outcome == "reject", shown(verdict)
    assert verdict.main_reason.code in codes, shown(verdict)


def codes(verdict: Verdict) -> set[str]:
    return {reason.code for reason in verdict.reasons}


def test_mask_below_the_range_of_fp16_with_an_empty_row():
    in_fp32 = kept("fp16", "pool")
    verdicts, _, runs = case("padded_sets.py", policy("bf16"), policy("fp16"), in_fp32)
    assert_accepted(verdicts, "bf16", in_fp32.name)
    assert_rejected(verdicts["fp16"], "NONFINITE")
    assert "step 0" in verdicts["fp16"].main_reason.message
    assert {run.status for run in runs["fp16"]} == {"diverged"}


def test_feed_forward_sum_beyond_the_range_of_fp16():
    in_fp32 = kept("fp16", "1.down")
    verdicts, findings, _ = case("wide_feedforward.py", policy("bf16"), policy("fp16"), in_fp32)
    assert_accepted(verdicts, "bf16", in_fp32.name)
    assert_rejected(verdicts["fp16"], "NONFINITE")
    assert "LOSS_SCALE_COLLAPSE" in codes(verdicts["fp16"])
    assert findings.choice.policy == "bf16"


def test_home_made_norm_goes_dead_only_when_every_op_is_in_fp16():
    in_fp32 = kept("fp16_all_ops", "unit_length")
    verdicts, _, runs = case(
        "dead_norm.py", policy("bf16"), policy("fp16"), policy("fp16_all_ops"), in_fp32
    )
    # Autocast computes `pow` in FP32, so the same model is fine under it.
    assert_accepted(verdicts, "bf16", "fp16", in_fp32.name)
    assert_rejected(verdicts["fp16_all_ops"], "GROSS_DEGRADATION")
    assert "ZERO_GRADIENTS" in codes(verdicts["fp16_all_ops"])
    # Nothing that looks only for NaN sees this fault.
    assert {run.status for run in runs["fp16_all_ops"]} == {"completed"}


def test_tiny_gradients_need_a_scaler():
    verdicts, _, runs = case(
        "tiny_gradients.py", policy("bf16"), policy("fp16"), policy("fp16_unscaled")
    )
    assert_accepted(verdicts, "bf16", "fp16")
    assert_rejected(verdicts["fp16_unscaled"], "GROSS_DEGRADATION", "INFERIOR_TRAIN")
    assert {"ZERO_GRADIENTS", "UNDERFLOW_OBSERVED"} <= codes(verdicts["fp16_unscaled"])
    assert all(run.final["moved_weight_share"] < 0.5 for run in runs["fp16_unscaled"])


def test_clipping_before_unscaling():
    wrong = policy("fp16", name="fp16_clipped_scaled", clip_before_unscale=True)
    verdicts, _, runs = case("clipped_sgd.py", policy("bf16"), policy("fp16"), wrong)
    assert_accepted(verdicts, "bf16", "fp16")
    assert_rejected(verdicts[wrong.name], "GROSS_DEGRADATION", "INFERIOR_TRAIN")
    # The logged norm is the unscaled one, so policies can be compared; 2 % is far above what
    # FP16 changes in it at equal weights and far below a scale of 65536.
    norms = [runs[name][0].series["grad_norm"][0] for name in ("fp32", "fp16")]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_pure_bf16_weights_at_a_small_learning_rate():
    verdicts, _, runs = case("fine_tuning.py", policy("bf16"), policy("fp16"), policy("bf16_pure"))
    assert_accepted(verdicts, "bf16", "fp16")
    assert_rejected(verdicts["bf16_pure"], "GROSS_DEGRADATION", "INFERIOR_TRAIN")
    assert {"WEIGHTS_NOT_MOVING", "LOST_UPDATES"} <= codes(verdicts["bf16_pure"])
    assert all(run.final["moved_weight_share"] > 0.95 for run in runs["fp32"])


def test_whole_numbers_that_bf16_cannot_hold_but_fp16_can():
    in_fp32 = kept("bf16", "project")
    verdicts, findings, _ = case("day_numbers.py", policy("bf16"), policy("fp16"), in_fp32)
    assert_accepted(verdicts, "fp16", in_fp32.name)
    assert_rejected(verdicts["bf16"], "GROSS_DEGRADATION", "INFERIOR_TRAIN")
    assert findings.choice.policy in ("fp16", in_fp32.name)


def test_cancellation_in_distances_is_seen_in_tf32_already():
    in_fp32 = kept("tf32", "distances")
    verdicts, findings, _ = case("point_distances.py", policy("tf32"), policy("bf16"), in_fp32)
    assert_accepted(verdicts, in_fp32.name)
    for name in ("tf32", "bf16"):
        assert_rejected(verdicts[name], "GROSS_DEGRADATION", "INFERIOR_TRAIN")
    assert findings.choice.policy == in_fp32.name


def test_batchnorm_statistics_poisoned_by_one_batch():
    in_fp32 = policy("fp16", name="fp16_front_fp32", fp32_modules=("sensor", "norm"))
    verdicts, _, runs = case("outlier_batch.py", policy("bf16"), policy("fp16"), in_fp32)
    assert_accepted(verdicts, "bf16", in_fp32.name)
    assert_rejected(verdicts["fp16"], "NONFINITE")
    assert "NONFINITE_BUFFERS" in codes(verdicts["fp16"])
    # One skipped step, then training goes on as in FP32: its tail alone would be accepted.
    assert {sum(run.series["skipped"]) for run in runs["fp16"]} == {1.0}
    tail = verdicts["fp16"].estimates["train"]
    assert tail.ci_high is not None
    assert tail.ci_high < tail.margin
    assert all(run.final["nonfinite_buffers"] > 0 for run in runs["fp16"])


def test_complex_weights_cannot_be_unscaled():
    verdicts, _, runs = case(
        "complex_filter.py", policy("bf16"), policy("fp16"), policy("fp16_unscaled")
    )
    assert_accepted(verdicts, "bf16", "fp16_unscaled")
    assert_rejected(verdicts["fp16"], "NOT_EXPRESSIBLE")
    assert "response" in verdicts["fp16"].main_reason.message
    assert {run.status for run in runs["fp16"]} == {"crashed"}


def test_autograd_function_that_autocast_does_not_reach():
    in_bf16, in_fp16 = kept("bf16", "mixing"), kept("fp16", "mixing")
    verdicts, findings, runs = case(
        "unaware_function.py", policy("bf16"), policy("fp16"), in_bf16, in_fp16
    )
    assert_accepted(verdicts, in_bf16.name, in_fp16.name)
    for name in ("bf16", "fp16"):
        assert_rejected(verdicts[name], "CRASHED")
        crash = runs[name][0].crash
        assert crash is not None
        assert (crash.module, crash.step) == ("mixing", 0)
        assert "mixing" in verdicts[name].main_reason.message
        assert "unaware_function.py" in crash.traceback
    assert findings.failed is None


def test_healthy_model_is_accepted_everywhere():
    verdicts, findings, runs = case(
        "tied_healthy.py", policy("bf16"), policy("fp16"), policy("tf32")
    )
    assert_accepted(verdicts, "bf16", "fp16", "tf32")
    assert all(set(v.estimates) == {"train", "held_out"} for v in verdicts.values())
    assert findings.choice.policy == "bf16"
    model = make_workload({"kind": "custom", "file": str(WORKLOADS / "tied_healthy.py")})
    weights = {id(p): p.numel() for p in model.build_model(0).parameters()}
    assert runs["bf16"][0].final["num_parameters"] == sum(weights.values())
    masks = {name: records[0].fingerprints.dropout for name, records in runs.items()}
    assert len(set(masks.values())) == 1
    assert all(masks["fp32"])


def test_reference_that_diverges_judges_nobody():
    verdicts, findings, _ = case("diverging.py", policy("bf16"), policy("fp16"))
    assert {v.outcome for v in verdicts.values()} == {"inconclusive"}
    assert {v.main_reason.code for v in verdicts.values()} == {"REFERENCE_UNSTABLE"}
    assert findings.choice.policy is None
    assert findings.failed is None


FAULTY_PAIRS = {
    # What a file does against the rule that all follows from the seed -> what must be named.
    "the initial weights differ": (
        "    torch.manual_seed(seed)\n",
        "    torch.manual_seed(__import__('time').perf_counter_ns() % 2**31)\n",
    ),
    "batch 0 differs": (
        "torch.Generator().manual_seed(seed)",
        "torch.Generator().manual_seed(__import__('time').perf_counter_ns())",
    ),
    "batch 7 differs": (
        "        x = torch.randn(32, 4, generator=g)\n",
        "        x = torch.randn(32, 4, generator=g)\n"
        "        if _ == 7:\n"
        "            x[3, 2] = __import__('time').perf_counter()\n",
    ),
    "the held-out sets differ": (
        "batches(77, 64)",
        "batches(__import__('time').perf_counter_ns() % 2**31, 64)",
    ),
    "the dropout masks of step 0 differ": (
        "nn.LayerNorm(16)",
        "nn.Sequential(nn.LayerNorm(16), *([nn.Dropout(0.2)] if SEEDS.append(0) else []), "
        "nn.Dropout(0.1 if len(SEEDS) % 2 else 0.2))",
    ),
}


@pytest.mark.parametrize("named", FAULTY_PAIRS)
def test_what_does_not_follow_from_the_seed_breaks_the_pair(named, tmp_path):
    old, new = FAULTY_PAIRS[named]
    text = (WORKLOADS / "tiny.py").read_text(encoding="utf-8")
    assert text.count(old) == 1
    text = text.replace(old, new).replace("SEEDS = 40, (0, 1, 2)", "SEEDS = 10, [0]")
    path = tmp_path / "unpaired.py"
    path.write_text(text, encoding="utf-8")
    findings, _ = judged(path, [policy("bf16")], seeds=(0,))
    (verdict,) = findings.verdicts
    assert verdict.outcome == "inconclusive", shown(verdict)
    assert verdict.main_reason.code == "PAIRING_BROKEN", shown(verdict)
    assert named in verdict.main_reason.message


def test_untouched_file_of_the_pairing_tests_is_a_pair():
    findings, _ = judged(WORKLOADS / "tiny.py", [policy("bf16")])
    assert "PAIRING_BROKEN" not in codes(findings.verdicts[0])


def test_judging_leaves_the_process_as_it_was():
    state = torch.get_rng_state(), torch.get_num_threads(), torch.is_grad_enabled()
    judged(WORKLOADS / "tiny.py", [policy("fp16")], seeds=(0,))
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == state[1:]
