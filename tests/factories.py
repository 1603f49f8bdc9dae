"""Synthetic run records that imitate short trainings, for tests of analysis, report and tracking.

The reference curve is an exponential decay with step noise shared by all policies of a seed (the
same batches); a policy adds its own offset, slope and seed luck on top.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.runs.record import CrashReport, Fingerprints, HeldOut, RunRecord
from harness.runs.same_point.record import ModuleError, Point, SamePointRecord

_SCALED = LossScaleSettings(kind="dynamic")
POLICIES: dict[str, PrecisionPolicy] = {
    policy.name: policy
    for policy in (
        PrecisionPolicy(name="fp32", description="IEEE FP32 everywhere"),
        PrecisionPolicy(
            name="fp32_twin", perturbation=2.0**-8, description="FP32 from slightly moved weights"
        ),
        PrecisionPolicy(name="tf32", compute_format="tf32", description="TF32 matmul operands"),
        PrecisionPolicy(
            name="fp16",
            compute_format="fp16",
            loss_scale=_SCALED,
            description="FP16 autocast, scaled",
        ),
        PrecisionPolicy(name="bf16", compute_format="bf16", description="BF16 autocast"),
        PrecisionPolicy(
            name="bf16_fallback",
            compute_format="bf16",
            fp32_selectors=("normalization", "attention_scores", "output_head", "loss"),
            description="BF16 autocast with sensitive parts in FP32",
        ),
        PrecisionPolicy(
            name="bf16_pure",
            compute_format="bf16",
            param_format="bf16",
            description="BF16 weights and optimizer state",
        ),
        PrecisionPolicy(name="fp16_unscaled", compute_format="fp16", description="FP16, no scaler"),
    )
}


def make_record(
    policy: str | PrecisionPolicy = "fp32",
    seed: int = 0,
    *,
    num_steps: int = 120,
    start: float = 4.0,
    floor: float = 2.0,
    noise: float = 0.02,
    seed_sd: float = 0.01,
    offset: float = 0.0,
    held_out_offset: float | None = None,
    luck: float = 0.0,
    held_out: bool = True,
    held_out_unit: str = "nats",
    num_items: int | None = 4096,
    device_kind: str = "cpu",
    workload: str = "toy",
    **fields: Any,
) -> RunRecord:
    """Return one record of a run that learns from `start` to `floor`.

    Args:
        policy: A name of `POLICIES`, or a policy.
        seed: Fixes the fingerprints, the shared step noise and the seed's luck.
        num_steps: Length of all series.
        start: Loss before training.
        floor: Loss approached at the end.
        noise: Standard deviation of the step noise shared by all policies of the seed.
        seed_sd: Standard deviation of the seed's own level (same for all policies).
        offset: Added to the training loss, growing in over the first tenth of the run.
        held_out_offset: The same for the held-out loss; `offset` if None.
        luck: Standard deviation of a constant difference drawn per (policy, seed).
        held_out: Whether the run has held-out evaluations.
        held_out_unit: Unit of the held-out loss.
        num_items: Items of the held-out set.
        device_kind: `cpu` or `cuda`.
        workload: Model name.
        fields: Replace fields of the record.
    """
    chosen = POLICIES[policy] if isinstance(policy, str) else policy
    steps = np.arange(num_steps)
    shared = np.random.default_rng(seed)
    level = floor + seed_sd * shared.standard_normal()
    base = level + (start - level) * np.exp(-6.0 * steps / num_steps)
    base = base + noise * shared.standard_normal(num_steps) * min(1.0, (start - floor))
    own = luck * np.random.default_rng([seed, *chosen.name.encode()]).standard_normal()
    ramp = np.minimum(1.0, (steps + 1) / max(1, num_steps // 10))
    loss = base + (offset + own) * ramp
    scaled = chosen.loss_scale.kind != "none"
    sampled_steps = tuple(range(0, num_steps, 5))
    count = len(sampled_steps)
    record = RunRecord(
        run_key=f"{chosen.content_hash()}{seed:04d}",
        workload=workload,
        policy=chosen.name,
        policy_content=chosen.content(),
        seed=seed,
        status="completed",
        num_steps=num_steps,
        execution="emulated" if chosen.compute_format == "tf32" else "native",
        execution_detail="operands rounded to 10 mantissa bits"
        if chosen.compute_format == "tf32"
        else "all ops native",
        settings={"workload": {"name": workload, "batch_size": 64}, "train": {"steps": num_steps}},
        environment={"device_kind": device_kind, "device": device_kind, "torch": "2.13.0"},
        fingerprints=Fingerprints(
            init_sha256=f"{seed:064x}",
            batches=tuple(1000 * seed + k for k in range(num_steps)),
            dropout=tuple(7000 * seed + k for k in range(num_steps)),
            held_out_sha256="f" * 64 if held_out else None,
        ),
        series={
            "loss": tuple(float(x) for x in loss),
            "grad_norm": tuple(float(x) for x in 0.5 + np.exp(-3.0 * steps / num_steps)),
            "learning_rate": tuple(
                float(x) for x in 1e-3 * 0.5 * (1 + np.cos(math.pi * (steps + 1) / num_steps))
            ),
            "loss_scale": (65536.0 if scaled else 1.0,) * num_steps,
            "skipped": (0.0,) * num_steps,
            "nonfinite_grad": (0.0,) * num_steps,
            "step_time_s": (0.01,) * num_steps,
        },
        sampled_steps=sampled_steps,
        sampled={
            "grad_nonzero": (10_000.0,) * count,
            "grad_total": (10_100.0,) * count,
            "grad_flushed_fp16": (50.0,) * count,
            "grad_subnormal_fp16": (500.0,) * count,
            "grad_near_max_fp16": (0.0,) * count,
            "grad_overflow_fp16": (0.0,) * count,
            "grad_flushed_bf16": (0.0,) * count,
            "grad_subnormal_bf16": (0.0,) * count,
            "grad_near_max_bf16": (0.0,) * count,
            "grad_overflow_bf16": (0.0,) * count,
            "lost_update_bf16": (2_000.0,) * count,
            "update_total": (10_000.0,) * count,
        },
        histograms={
            name: tuple(int(1e4 * math.exp(-(((k - 110) / 6.0) ** 2))) for k in range(256))
            for name in ("grad/all", "grad/tail")
        },
        held_out=_held_out(
            base_start=start,
            level=level,
            shift=(offset if held_out_offset is None else held_out_offset) + own,
            num_steps=num_steps,
            unit=held_out_unit,
            num_items=num_items,
        )
        if held_out
        else None,
        final={
            "nonfinite_weights": 0.0,
            "nonfinite_buffers": 0.0,
            "moved_weight_share": 1.0,
            "zero_grad_share": 0.01,
            "num_parameters": 10_100.0,
        },
        audit={"linear": {chosen.compute_format: 4}},
        samples_per_step=64.0,
        peak_memory_bytes=100_000_000,
        peak_memory_source="process high-water mark",
        wall_time_s=1.0,
    )
    return dataclasses.replace(record, **fields)


def make_grid(
    policies: Mapping[str, Mapping[str, Any]] | Sequence[str],
    seeds: Iterable[int] = (0, 1, 2),
    **common: Any,
) -> list[RunRecord]:
    """Return the records of a grid: policy name -> keywords of `make_record` for that policy."""
    keywords = policies if isinstance(policies, Mapping) else {name: {} for name in policies}
    return [
        make_record(name, seed, **{**common, **own})
        for name, own in keywords.items()
        for seed in seeds
    ]


def with_series(record: RunRecord, **series: Sequence[float]) -> RunRecord:
    """Return the record with some series replaced."""
    return dataclasses.replace(
        record, series={**record.series, **{name: tuple(v) for name, v in series.items()}}
    )


def with_final(record: RunRecord, **final: float) -> RunRecord:
    """Return the record with some final scalars replaced."""
    return dataclasses.replace(record, final={**record.final, **final})


def diverged(record: RunRecord, *, at_step: int = 20, stop_after: int = 25) -> RunRecord:
    """Return the record with the loss NaN from `at_step` on, stopped `stop_after` steps later."""
    length = min(record.num_steps, at_step + stop_after)
    series = {name: values[:length] for name, values in record.series.items()}
    series["loss"] = tuple(
        x if k < at_step else math.nan for k, x in enumerate(record.series["loss"][:length])
    )
    held = record.held_out
    if held is not None:
        kept = [k for k, step in enumerate(held.steps) if step <= at_step]
        held = dataclasses.replace(
            held, steps=tuple(held.steps[k] for k in kept), loss=tuple(held.loss[k] for k in kept)
        )
    prints = record.fingerprints
    sampled = sum(step < length for step in record.sampled_steps)
    return dataclasses.replace(
        record,
        status="diverged",
        series=series,
        sampled_steps=record.sampled_steps[:sampled],
        sampled={name: values[:sampled] for name, values in record.sampled.items()},
        held_out=held,
        fingerprints=dataclasses.replace(
            prints, batches=prints.batches[:length], dropout=prints.dropout[:length]
        ),
        final={**record.final, "nonfinite_weights": 10_100.0},
    )


def crashed(
    record: RunRecord,
    *,
    at_step: int = 0,
    not_expressible: bool = False,
    sentence: str | None = None,
) -> RunRecord:
    """Return the record as it is left by an exception in `at_step`."""
    prints = record.fingerprints
    return dataclasses.replace(
        record,
        status="crashed",
        series={name: values[:at_step] for name, values in record.series.items()},
        sampled_steps=(),
        sampled={},
        histograms={},
        held_out=None,
        final={},
        fingerprints=dataclasses.replace(
            # The step that crashed had drawn only some of its masks.
            prints,
            batches=prints.batches[: at_step + 1],
            dropout=(*prints.dropout[:at_step], 123),
        ),
        crash=CrashReport(
            kind="RuntimeError",
            message="expected mat1 and mat2 to have the same dtype",
            sentence=sentence or "The matrix product in module 'op' met two different dtypes.",
            step=at_step,
            module="op",
            traceback="Traceback (most recent call last): ...",
            not_expressible=not_expressible,
        ),
    )


def _held_out(
    *,
    base_start: float,
    level: float,
    shift: float,
    num_steps: int,
    unit: str,
    num_items: int | None,
) -> HeldOut:
    tail_start = num_steps - -(-num_steps // 3)
    steps = (0, *(tail_start + k * (num_steps - tail_start) // 5 for k in range(1, 6)))
    curve = [level + (base_start - level) * math.exp(-6.0 * step / num_steps) for step in steps]
    return HeldOut(
        steps=steps,
        loss=tuple(
            float(x + (shift if step else 0.0)) for step, x in zip(steps, curve, strict=True)
        ),
        unit=unit,
        num_items=num_items,
    )


def make_point(
    *,
    step: int = 12,
    kind: Literal["trajectory", "final_rate"] = "trajectory",
    nu: float = 1e-4,
    beta: float = 0.0,
    eta: float = 1.0,
    retention: float = 1.0,
    signal: float = 4.0,
    num_batches: int = 16,
    **fields: float,
) -> Point:
    """Return the sums of a probe's point whose ratios are the given ones.

    The minibatch noise is 16 and the energy of the true gradient `signal`, in the same unit.
    """
    k, noise = num_batches, 16.0
    self_cross = k * (k - 1) * signal
    values: dict[str, Any] = {
        "step": step,
        "kind": kind,
        "learning_rate": 1e-3,
        "noise": noise,
        "mean_gradient_sq": signal + noise / k,
        "error_sq": nu * noise,
        "mean_error_sq": beta * signal,
        "error_noise": 0.0,
        "cross": eta * self_cross,
        "self_cross": self_cross,
        "retained": retention,
        "updated": 1.0,
    }
    return Point(**{**values, **fields})


def make_same_point(
    policy: str = "bf16",
    *,
    points: Sequence[Point] | None = None,
    modules: Sequence[ModuleError] = (),
    failed: str | None = None,
    num_batches: int = 16,
    final_rate: bool = True,
    **ratios: float,
) -> SamePointRecord:
    """Return a same-point record of four points (and the final rate's) with the given ratios."""
    if points is None:
        points = [make_point(step=s, num_batches=num_batches, **ratios) for s in (12, 40, 80, 116)]
        if final_rate:
            points.append(
                make_point(step=116, kind="final_rate", num_batches=num_batches, **ratios)
            )
    return SamePointRecord(
        workload="toy",
        policy=policy,
        policy_content=POLICIES[policy].content(),
        seed=0,
        num_batches=num_batches,
        points=() if failed else tuple(points),
        modules=tuple(modules),
        failed=failed,
    )


def with_norms(record: RunRecord, **modules: Mapping[str, float]) -> RunRecord:
    """Return the record with the norms probe: module -> metric -> its value at all three steps.

    A dot in a module's name is written as two underscores.
    """
    table = {
        name.replace("__", "."): {metric: [value] * 3 for metric, value in metrics.items()}
        for name, metrics in modules.items()
    }
    return with_probe(record, "norms", {"steps": [0, 50, 100], "modules": table})


def with_probe(record: RunRecord, name: str, found: Mapping[str, Any]) -> RunRecord:
    """Return the record with what one probe found."""
    return dataclasses.replace(record, probes={**record.probes, name: dict(found)})
