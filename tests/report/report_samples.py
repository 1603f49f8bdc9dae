"""Findings and records of a plausible sweep: seven policies, one rejected, one diverged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from factories import POLICIES, diverged, make_record
from probe_samples import profiles, with_evidence, with_probes

from harness.analysis.findings import (
    Choice,
    Endpoint,
    Estimate,
    ModelFindings,
    Outcome,
    Ratio,
    Reason,
    Verdict,
)
from harness.analysis.rule import DecisionRule
from harness.runs.record import RunRecord

STEPS = 300
SEEDS = (0, 1, 2)
GRID = ("fp32_twin", "tf32", "fp16", "bf16", "bf16_fallback", "bf16_pure", "fp16_unscaled")
_EFFECTS = {
    "fp32_twin": (0.0004, 0.0012),
    "tf32": (0.0001, 0.0006),
    "fp16": (0.0002, 0.0009),
    "bf16": (0.001, 0.0016),
    "bf16_fallback": (0.0005, 0.004),
    "bf16_pure": (0.32, 0.01),
    "fp16_unscaled": (0.0, 0.001),
}


def realistic_record(policy: str, seed: int, *, workload: str = "char_gpt") -> RunRecord:
    """Return a run with drift, gradient noise, growing underflow and a bell of exponents."""
    effect, luck = _EFFECTS.get(policy, (0.0, 0.0))
    record = make_record(
        policy, seed, num_steps=STEPS, workload=workload, offset=effect, luck=luck, noise=0.05
    )
    rng = np.random.default_rng([seed, *policy.encode(), 1])
    steps = np.arange(STEPS)
    loss = np.asarray(record.series["loss"])
    if policy != "fp32":
        walk = np.cumsum(rng.standard_normal(STEPS)) * 4e-4
        loss = loss + walk - walk.mean() + 0.004 * rng.standard_normal(STEPS)
    shared = np.random.default_rng([seed, 5])
    norm = (0.4 + 2 * np.exp(-steps / 30)) * np.exp(0.15 * shared.standard_normal(STEPS))
    norm = norm * (1 + 0.01 * rng.standard_normal(STEPS))
    scale = np.full(STEPS, 1.0)
    skipped = np.zeros(STEPS)
    if policy == "fp16":
        scale = np.where(steps < 3, 65536.0, 32768.0)
        skipped[3 + seed] = 1
        norm[3 + seed] = math.inf
    samples = np.asarray(record.sampled_steps)
    growth = np.exp(samples / 120.0)
    centre = -14.0 - 3 * (policy == "bf16_pure")
    histogram = tuple(int(1e7 * math.exp(-(((k - 127 - centre) / 5.0) ** 2))) for k in range(256))
    return dataclasses.replace(
        record,
        series={
            **record.series,
            "loss": tuple(loss),
            "grad_norm": tuple(norm),
            "loss_scale": tuple(scale),
            "skipped": tuple(skipped),
            "step_time_s": tuple(0.021 + 0.002 * rng.random(STEPS)),
        },
        sampled={
            **record.sampled,
            "grad_flushed_fp16": tuple(50 * growth * (1 + 0.1 * rng.random(len(samples)))),
            "grad_flushed_bf16": tuple(0.0 * growth),
            "lost_update_bf16": tuple(
                1e4 * (1 - 0.6 * np.cos(samples / STEPS * 1.5)) * (0.9 + 0.02 * seed)
            ),
        },
        histograms={"grad/all": histogram, "grad/tail": histogram},
        tokens_per_step=4096.0,
        peak_memory_bytes=int(3.1e8 if policy == "fp32" else 2.7e8),
    )


def realistic_records(workload: str = "char_gpt") -> list[RunRecord]:
    """Return the whole grid; the FP16 run without a scaler diverges in seed 1 and lacks seed 2."""
    records = [
        realistic_record(policy, seed, workload=workload)
        for policy in ("fp32", *GRID)
        for seed in SEEDS
    ]
    records = [r for r in records if (r.policy, r.seed) != ("fp16_unscaled", 2)]
    ended = [
        diverged(r, at_step=140) if (r.policy, r.seed) == ("fp16_unscaled", 1) else r
        for r in records
    ]
    return [with_probes(record) for record in ended]


def _tail(record: RunRecord, endpoint: Endpoint) -> float:
    if endpoint == "train":
        return float(np.mean(record.series["loss"][STEPS - STEPS // 3 :]))
    assert record.held_out is not None
    return float(np.mean(record.held_out.loss[1:]))


def estimate(differences: Sequence[float], *, margin: float = 0.02) -> Estimate:
    """Return the estimate of three paired differences: t quantiles for 2 degrees of freedom."""
    mean, sd = float(np.mean(differences)), float(np.std(differences, ddof=1))
    error = sd / math.sqrt(len(differences))
    return Estimate(
        unit="nats",
        mean_difference=mean,
        sd=sd,
        ci_low=mean - 4.303 * error,
        ci_high=mean + 2.920 * error,
        confidence=0.925,
        alpha_accept=0.05,
        alpha_reject=0.025,
        num_pairs=len(differences),
        margin=margin,
        margin_term="progress",
        progress=2.0,
        reference_loss=2.0,
        differences=tuple(differences),
        p_accept=0.011,
        p_reject=0.99,
    )


def make_verdict(policy: str = "bf16", outcome: Outcome = "accept", **fields: object) -> Verdict:
    """Return an accepted verdict with two estimates; keywords replace fields."""
    settings = POLICIES.get(policy)
    values: dict[str, object] = {
        "policy": policy,
        "policy_content": settings.content() if settings else {},
        "description": settings.description if settings else "a policy of the user",
        "outcome": outcome,
        "execution": "emulated" if policy == "tf32" else "native",
        "reasons": (
            Reason(
                code="NONINFERIOR",
                message="Both intervals end below the margin.",
                value=0.4,
                threshold=1.0,
            ),
        ),
        "estimates": {
            "train": estimate((0.001, 0.002, 0.0015)),
            "held_out": estimate((0.002, 0.0, 0.001)),
        },
        "seeds_used": SEEDS,
        "peak_memory_ratio": Ratio(value=0.87),
        "failure_rate_bound": 0.632,
        "min_detectable_harm": {"train": 0.03, "held_out": 0.04},
        "p_accept": 0.012,
        "p_accept_holm": 0.05,
        "diagnostics": {"zero_grad_share": (0.012, 0.011), "grad_norm_ratio": (1.01, None)},
    }
    return Verdict(**{**values, **fields})  # type: ignore[arg-type]


def make_findings(*verdicts: Verdict, **fields: object) -> ModelFindings:
    """Return findings with these verdicts; keywords replace fields."""
    values: dict[str, object] = {
        "sweep_id": "precision-1a2b3c4d",
        "workload": "char_gpt",
        "device": "cpu",
        "reference_policy": "fp32",
        "seeds": SEEDS,
        "num_steps": STEPS,
        "tail_start": STEPS - STEPS // 3,
        "verdicts": verdicts,
        "choice": Choice(
            policy="bf16",
            sentence=(
                "Train char_gpt in bf16: over the first 300 steps its loss stays within the margin "
                "of fp32 (at worst +0.31 margins, 3 seeds)."
            ),
            speed_basis="assumed, not measured",
            reasons=(
                "bf16_fallback is undecided: 2 further seeds should settle it.",
                "bf16_pure is rejected; its updates are lost to rounding, so keep FP32 weights.",
            ),
        ),
        "scope": "the first 300 steps of this schedule, batch 64, on cpu; tf32 emulated",
        "not_tested": (
            "Anything after step 300, at larger scale, or at another learning rate.",
            "Step time on a GPU: a CPU says nothing about it.",
            "The same-point probe of arithmetic is not part of this release.",
        ),
        "caveats": (
            Reason(
                code="PROBE_MISSING",
                message="No probe compared the arithmetic at the same weights.",
                kind="caveat",
            ),
        ),
        "environment": {
            "torch": "2.13.0",
            "python": "3.11.9",
            "device_kind": "cpu",
            "num_threads": 1,
            "switches": {"cuda.matmul": "ieee", "cudnn.conv": "ieee"},
        },
        "command": "python -m harness +sweep=precision workload=char_gpt",
        "rule": DecisionRule().as_mapping(),
    }
    return ModelFindings(**{**values, **fields})  # type: ignore[arg-type]


def realistic_findings(records: Sequence[RunRecord], workload: str = "char_gpt") -> ModelFindings:
    """Return findings whose estimates are computed from the records."""
    by_key: Mapping[tuple[str, int], RunRecord] = {(r.policy, r.seed): r for r in records}
    verdicts = []
    for policy in GRID:
        if policy == "fp16_unscaled":
            continue
        estimates = {
            endpoint: estimate(
                [
                    _tail(by_key[policy, s], endpoint) - _tail(by_key["fp32", s], endpoint)
                    for s in SEEDS
                ]
            )
            for endpoint in ("train", "held_out")
        }
        extra: dict[str, object] = {"estimates": estimates, "is_control": policy == "fp32_twin"}
        if policy == "bf16_pure":
            extra["outcome"] = "reject"
            extra["reasons"] = (
                Reason(
                    code="GROSS_DEGRADATION",
                    message="Every seed is worse by more than 3 margins (+15.9 margins).",
                    value=15.9,
                    threshold=3.0,
                    kind="gate",
                ),
                Reason(
                    code="WEIGHTS_NOT_MOVING",
                    message="41 % of the weight updates were rounded away.",
                    value=0.41,
                    threshold=0.2,
                    kind="warning",
                ),
            )
        if policy == "bf16_fallback":
            extra |= {
                "outcome": "inconclusive",
                "extra_seeds": 2,
                "lean": "acceptable",
                "settle_command": "python -m harness +sweep=precision workload=char_gpt "
                "policy=fp32,bf16_fallback seed=0,1,2,3,4",
                "reasons": (
                    Reason(
                        code="CI_SPANS_MARGIN",
                        message="The held-out interval spans the margin (ends at +1.21).",
                        value=1.21,
                        threshold=1.0,
                    ),
                ),
            }
        if policy == "bf16":
            extra["step_time_ratio"] = Ratio(value=1.42, ci_low=1.38, ci_high=1.47)
        verdicts.append(make_verdict(policy, **extra))
    verdicts.append(
        make_verdict(
            "fp16_unscaled",
            "reject",
            reasons=(
                Reason(
                    code="NONFINITE",
                    message="Seed 1 has a non-finite loss from step 140 on; FP32 has none.",
                    value=140.0,
                    kind="gate",
                ),
            ),
            estimates={
                "train": dataclasses.replace(
                    estimate((0.01, 0.01, 0.01)),
                    mean_difference=math.nan,
                    sd=None,
                    ci_low=None,
                    ci_high=None,
                    differences=(0.01, math.nan),
                )
            },
            seeds_used=(0, 1),
            seeds_dropped=(2,),
        )
    )
    return make_findings(*map(with_evidence, verdicts), workload=workload, profiles=profiles())
