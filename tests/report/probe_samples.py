"""What the probes would store and find in the plausible sweep: synthetic, in the stored layouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.analysis.findings import Verdict
from harness.analysis.probe_findings import LossScaleWindow, ModuleFinding, ProbeFindings
from harness.runs.record import RunRecord

GUILTY = "blocks.1.attention.scores"
LONG = "encoder.layers.11.self_attention.output_projection"
MODULES = (
    "embedding",
    "blocks.0.norm1",
    "blocks.0.attention",
    "blocks.0.attention.scores",
    "blocks.0.attention.output",
    "blocks.0.feed_forward.0",
    "blocks.0.feed_forward.2",
    "blocks.1.norm1",
    "blocks.1.attention",
    GUILTY,
    "blocks.1.attention.output",
    "blocks.1.feed_forward.0",
    "blocks.1.feed_forward.2",
    "norm",
    "head",
    LONG,
)
_KIND_CENTRES = {
    "weights": -5.0,
    "inputs": -1.0,
    "output_gradients": -17.0,
    "weight_gradients": -13.0,
    "updates": -12.0,
}
_FORMATS = {"fp32": "fp32", "fp32_twin": "fp32", "tf32": "tf32", "fp16_unscaled": "fp16"}
_FAMILIES = ("matmul", "normalization", "softmax", "elementwise", "loss")


def with_probes(record: RunRecord) -> RunRecord:
    """Return the record with what every probe would have stored."""
    probes = {
        "audit": _audit(record.policy),
        "exponents": _exponents(record),
        "lost_updates": _lost_updates(record),
        "norms": _norms(),
        "memory": _memory(record.policy),
    }
    if record.policy == "fp16_unscaled" and record.status == "diverged":
        probes["triage"] = triage()
    return dataclasses.replace(record, probes=probes)


def triage() -> dict[str, Any]:
    """Return where an overflow in the attention scores began."""
    return {
        "trigger": "nonfinite_loss",
        "step": 140,
        "cause": "layer",
        "module": GUILTY,
        "op": "aten::bmm",
        "direction": "forward",
        "kind": "output of",
        "format": "fp16",
        "value": 71300.0,
        "limit": 65504.0,
        "fp32_max": 98000.0,
        "sentence": f"step 140: output of `{GUILTY}` reached 71,300 > 65,504 (FP16); FP32 max "
        "9.8e4",
        "findings": [
            {"sentence": "The batch is finite and no larger than the ones before."},
            {"sentence": "From the same weights FP32's step is finite: not the learning rate."},
        ],
    }


def _audit(policy: str) -> dict[str, Any]:
    low = _FORMATS.get(policy, "fp16" if policy == "fp16" else "bf16")
    rows, casts = [], []
    for module in MODULES:
        kept = policy == "bf16_fallback" and module in ("head", GUILTY)
        for direction in ("forward", "backward"):
            for family in _FAMILIES:
                plain = family != "matmul" or kept
                rows.append(
                    {
                        "module": module,
                        "family": family,
                        "op": f"aten::{family}",
                        "direction": direction,
                        "format": "fp32" if plain else low,
                        "calls": 2 if direction == "forward" else 4,
                        "flops": 1_000_000 if family == "matmul" else 0,
                    }
                )
        if low not in ("fp32", "tf32"):
            casts.append(
                {
                    "module": module,
                    "direction": "forward",
                    "from": "fp32",
                    "to": low,
                    "calls": 3,
                    "elements": 40_000,
                }
            )
    nonfinite = []
    if policy == "fp16_unscaled":
        nonfinite = [
            {"module": GUILTY, "op": "aten::bmm", "direction": "forward", "format": "fp16"}
        ]
    kept_share = 2 / len(MODULES) if policy == "bf16_fallback" else 0.0
    return {
        "rows": rows,
        "casts": casts,
        "flops": sum(row["flops"] for row in rows),
        "low_precision_flop_share": 0.0 if low == "fp32" else 1.0 - kept_share,
        "nonfinite": nonfinite,
    }


def _exponents(record: RunRecord) -> dict[str, Any]:
    modules: dict[str, Any] = {}
    for index, module in enumerate(MODULES):
        kinds = {}
        for kind, centre in _KIND_CENTRES.items():
            shift = centre - 0.4 * (index % 4)
            if module == GUILTY and kind == "inputs":
                shift = 13.0
            if module == LONG and kind == "output_gradients":
                shift = -24.0
            bins = {
                str(k): int(1e5 * math.exp(-(((k - 127 - shift) / 3.0) ** 2)))
                for k in range(90, 160)
            }
            kinds[kind] = {
                "bins": {k: n for k, n in bins.items() if n},
                "elements": sum(bins.values()) + 10,
                "zeros": 10,
                "nonfinite": 0,
            }
        modules[module] = kinds
    steps = list(range(0, len(record.series["loss"]), 5))
    drift = [round(2.0 * step / max(record.num_steps, 1)) for step in steps]
    return {
        "steps": steps[::10],
        "modules": modules,
        "weight_gradient_steps": steps,
        "windows": {
            "fp16": {
                "low": [None if k == 4 else 6.0 + d for k, d in enumerate(drift)],
                "high": [17.0 - 2 * d for d in drift],
            },
            "fp8_e5m2": {"low": [2.0 + d for d in drift], "high": [15.0 - 2 * d for d in drift]},
            "bf16": {"low": [-100.0 for _ in steps], "high": [120.0 for _ in steps]},
        },
    }


def _lost_updates(record: RunRecord) -> dict[str, Any]:
    steps = list(record.sampled_steps)
    observed = record.policy == "bf16_pure"
    modules = {}
    for index, module in enumerate(MODULES):
        share = min(0.99, 0.1 + 0.06 * index)
        modules[module] = {
            "updates": [1000] * len(steps),
            "lost_bf16": [int(1000 * share)] * len(steps),
            "lost_fp16": [int(400 * share)] * len(steps),
            "retained_nearest_bf16": [1 - 0.8 * share] * len(steps),
            "retained_stochastic_bf16": ["NaN" if index == 3 else 1.0] * len(steps),
        }
        if observed:
            modules[module]["lost_fp16"] = []
    return {"steps": steps, "view": "observed" if observed else "what_if", "modules": modules}


def _norms() -> dict[str, Any]:
    return {
        "steps": [0, 25],
        "modules": {
            module: {
                "weight_rms": [0.1, 0.12],
                "grad_rms": [0.01, 0.02],
                "update_to_weight": [1e-3, 2e-3],
                "input_max": [3.0, 4.0],
                "output_max": [5.0, 98_000.0 if module == GUILTY else 6.0],
                "attention_logit_max": [8.0, 9.0] if "scores" in module else [None, None],
            }
            for module in MODULES
        },
    }


def _memory(policy: str) -> dict[str, Any]:
    halved = 2 if policy == "bf16_pure" else 1
    copies = 20_000_000 if policy in ("bf16", "fp16", "bf16_fallback", "fp16_unscaled") else 0
    parts = {
        "weights": 40_000_000 // halved,
        "gradients": 40_000_000 // halved,
        "optimizer_state": 80_000_000 // halved,
        "activations": 90_000_000 if policy.startswith("fp32") else 50_000_000,
        "low_precision_copies": copies,
        "loss_scaler": 8 if policy == "fp16" else 0,
    }
    total = sum(parts.values())
    share = round(100 * parts["optimizer_state"] / total)
    return {
        "step": 1,
        **parts,
        "total": total,
        "largest": f"Adam's state is {share} % of it",
    }


def profiles() -> dict[str, dict[str, Any]]:
    """Return where the time of two policies' steps goes."""
    return {
        policy: {
            "steps": 3,
            "families": {"matmul": 0.2, "elementwise": 0.61, "cast": cast, "softmax": 0.19 - cast},
            "ops": (("aten::mul", 0.4), ("aten::addmm", 0.2), ("aten::add", 0.2)),
            "low_precision_share": 0.2,
            "cast_share": cast,
            "fp32_elementwise_share": 0.61,
            "sentence": f"{policy} spends 61 % of its time in FP32 element-wise ops.",
        }
        for policy, cast in (("fp32", 0.0), ("bf16", 0.08))
    }


def with_evidence(verdict: Verdict) -> Verdict:
    """Return the verdict with what the probes found by module."""
    if verdict.is_control:
        return verdict
    bad = verdict.policy in ("bf16_pure", "fp16_unscaled")
    sentence = f"look at `{GUILTY}`: its local forward error is 0.41, 105 times the median's."
    return dataclasses.replace(
        verdict,
        probe=probe_findings(verdict.policy),
        modules=module_findings(MODULES, bad=bad),
        guilty_module=GUILTY if bad else None,
        guilty_sentence=sentence if bad else None,
        triage=triage() if verdict.policy == "fp16_unscaled" else None,
        loss_scale_window=window() if verdict.policy == "fp16" else None,
        memory_note="Adam's state is 32 % of it",
    )


def window() -> LossScaleWindow:
    """Return a window that the scale used lies in."""
    return LossScaleWindow(
        fmt="fp16",
        low=8.0,
        high=13.0,
        used=(15.0, 16.0),
        sentence="Loss scales 2^8 to 2^13 were safe at every sampled step; it used 2^15 to 2^16.",
    )


def probe_findings(policy: str) -> ProbeFindings:
    """Return a passing probe, or that of weights that stall."""
    stalls = policy == "bf16_pure"
    broken = policy == "fp16_unscaled"
    return ProbeFindings(
        noise_ratio=math.nan if broken else (0.002 if policy != "tf32" else 3e-6),
        rounding_bias=math.nan if broken else 1.3e-5,
        descent=None if policy == "tf32" else (math.nan if broken else 1.0004),
        retention=0.19 if stalls else 0.9998,
        retention_step=194,
        retention_kind="trajectory",
        weak_signal=policy == "tf32",
        failing=("PROBE_STAGNATION",)
        if stalls
        else (("PROBE_ROUNDING_NOISE", "PROBE_DESCENT_LOSS") if broken else ()),
        relative_error=0.004,
        cosine=0.99999,
        tests_final_rate=True,
        unseen=policy != "bf16_fallback",
        same_trajectory=True,
        steps=(30, 99, 201, 291),
        num_batches=16,
    )


def module_findings(modules: Sequence[str], *, bad: bool) -> tuple[ModuleFinding, ...]:
    """Return findings in order of suspicion; `bad` makes one module far worse than the rest."""
    rng = np.random.default_rng(len(modules))
    found = []
    for module in modules:
        guilty = bad and module == GUILTY
        scale = float(rng.uniform(0.5, 2.0))
        found.append(
            ModuleFinding(
                module=module,
                kind="Linear" if "output" in module or "feed" in module else "Module",
                suspicion=4.1 if guilty else 0.04 * scale,
                evidence="local forward error 0.41" if guilty else "",
                local_forward_error=0.41 if guilty else 0.0039 * scale,
                gradient_error=0.3 if guilty else 0.006 * scale,
                noise_ratio=0.31 if guilty else 0.0012 * scale,
                cosine=0.94 if guilty else 0.99998,
                flushed_share=0.0 if module != "embedding" else 0.02,
                zero_grad_share=(0.01, 0.009),
                lost_update_share=0.2 * scale,
                update_to_weight=(1.1e-3 * scale, 1.05e-3 * scale),
                nonfinite=("output of aten::bmm in FP16",) if guilty else (),
                formats=(("fp32", 0.4), ("bf16", 0.6)),
            )
        )
    return tuple(sorted(found, key=lambda m: -m.suspicion))
