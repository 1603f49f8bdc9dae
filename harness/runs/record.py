"""What one run measured: a versioned value, stored as one strict-JSON file and read back.

Torch-free: the analyzer and the report read records on machines without torch. The file is the
truth; MLflow holds a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.runs.record_files import stored_number, strict_json, versioned_fields, write_atomically

SCHEMA_VERSION = 2
# Version 1 had no `probes`.
READABLE_VERSIONS = (1, 2)
RECORD_FILE = "record.json"
# Kind of the event of a run that ended itself because its verdict could no longer change.
ENDED_EARLY = "ended_early"
Status = Literal["completed", "diverged", "crashed"]


@dataclass(frozen=True, kw_only=True)
class Fingerprints:
    """What must agree between two runs for them to be a pair.

    Attributes:
        init_sha256: SHA-256 of the initial FP32 weights and buffers, taken before any cast or
            perturbation.
        batches: One order-sensitive checksum per batch, in step order.
        dropout: One order-sensitive checksum per step over all dropout masks of that step;
            0 where the step drew none.
        held_out_sha256: SHA-256 of the held-out batches, or None without a held-out set.
    """

    init_sha256: str
    batches: tuple[int, ...]
    dropout: tuple[int, ...]
    held_out_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out evaluations of one run, weights evaluated in FP32 arithmetic.

    Attributes:
        steps: Number of completed steps at each evaluation; the first is 0 (before training).
        loss: Held-out loss at each of them (or the workload's own `eval_fn` value); NaN allowed.
        unit: What `loss` is in: `nats` or the workload's own unit.
        num_items: Predicted items in the set (examples or tokens); None when the workload does
            not say.
    """

    steps: tuple[int, ...]
    loss: tuple[float, ...]
    unit: str = "nats"
    num_items: int | None = None


@dataclass(frozen=True, kw_only=True)
class CrashReport:
    """Why a run crashed.

    Attributes:
        kind: Exception type name.
        message: First line of the exception.
        sentence: One plain sentence for the report: what happened and where.
        step: Batch index at which it happened; None before the first step.
        module: Dotted name of the innermost module that was running, if known.
        traceback: The full traceback.
        not_expressible: True when the policy asks for something torch cannot do (complex
            gradients under a loss scaler, a closure under one), rather than a bug.
    """

    kind: str
    message: str
    sentence: str
    step: int | None
    module: str | None
    traceback: str
    not_expressible: bool = False


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything one seeded run under one policy measured.

    All step series are aligned by batch index; a step that a loss scaler skipped keeps its place.
    A run that stopped early has shorter series.

    Attributes:
        run_key: Hash of everything that can change the numbers.
        workload: Model name.
        policy: Policy name (a label).
        policy_content: `PrecisionPolicy.content()`.
        seed: Seed of weights, batches and dropout masks.
        status: `completed`; `diverged` when the loss or a weight became non-finite for good,
            or when the run ended itself (an event `ended_early` says why); `crashed` when an
            exception ended it.
        num_steps: Planned steps.
        execution: `native`, or `emulated` when any op was computed by rounding in FP32 storage.
        execution_detail: One sentence on what was emulated and what that does not model.
        settings: Resolved workload and training settings.
        environment: Versions, device, threads, backend switches as read back, data hashes.
        fingerprints: Proof of pairing.
        series: Name -> one float per step. `loss` (as returned by the workload, in FP32),
            `grad_norm` (global L2, after unscaling, before clipping), `learning_rate`,
            `loss_scale`, `skipped` (0 or 1), `nonfinite_grad` (count of elements),
            `step_time_s` (wall time of the step on this machine, whatever else ran on it).
        sampled_steps: Batch indices at which the counts of `sampled` were taken.
        sampled: Name -> one number per sampled step: `grad_nonzero` (the denominator),
            `grad_total`, `grad_flushed_<format>`, `grad_subnormal_<format>`,
            `grad_near_max_<format>`, `grad_overflow_<format>` for fp16 and bf16 (what the unscaled
            gradient would lose in that format), `lost_update_bf16` and `update_total` (non-zero
            updates).
        histograms: Name -> 256 counts by biased FP32 exponent: `grad/all`, `grad/tail`.
        held_out: None when the workload has no held-out data and no `eval_fn`.
        final: Scalars after the last step: `nonfinite_weights`, `nonfinite_buffers`,
            `moved_weight_share` (share of weights that differ from their start),
            `unmoved_tensors` (parameters none of whose elements differs),
            `unmoved_buffers` (floating ones, likewise),
            `zero_grad_share` (share of gradient elements exactly zero, mean over sampled steps),
            `num_parameters`.
        audit: Op name -> format it really ran in -> calls, in one traced forward pass.
        probes: Probe name -> what it found, plain JSON values in the layout that the probe's module
            documents (`audit`: `StepAudit.result`; `triage`: `triage_diagnosis.diagnose`); a probe
            that was off is absent. `not_applicable` in any of them: what it could not look at.
        loss_dtype: Dtype in which the workload returned the loss.
        loss_on_16bit_grid: Format name (`bf16` or `fp16`) when every logged loss is exactly a value
            of it, else None.
        samples_per_step: Leading dimension of a batch; None when unknown.
        tokens_per_step: Tokens in a batch; None when the workload has none.
        peak_memory_bytes: None where it cannot be measured.
        peak_memory_source: What `peak_memory_bytes` counts.
        events: Notable moments: `{"step": int, "kind": str, "message": str}`.
        crash: Set exactly when `status` is `crashed`.
        wall_time_s: Whole run, evaluation and set-up included.
    """

    schema_version: int = SCHEMA_VERSION
    run_key: str
    workload: str
    policy: str
    policy_content: dict[str, Any]
    seed: int
    status: Status
    num_steps: int
    execution: Literal["native", "emulated"]
    execution_detail: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    fingerprints: Fingerprints
    series: dict[str, tuple[float, ...]]
    sampled_steps: tuple[int, ...] = ()
    sampled: dict[str, tuple[float, ...]] = field(default_factory=dict)
    histograms: dict[str, tuple[int, ...]] = field(default_factory=dict)
    held_out: HeldOut | None = None
    final: dict[str, float] = field(default_factory=dict)
    audit: dict[str, dict[str, int]] = field(default_factory=dict)
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)
    loss_dtype: str = "float32"
    loss_on_16bit_grid: str | None = None
    samples_per_step: float | None = None
    tokens_per_step: float | None = None
    peak_memory_bytes: int | None = None
    peak_memory_source: str = "not measured"
    events: tuple[dict[str, Any], ...] = ()
    crash: CrashReport | None = None
    wall_time_s: float = 0.0

    def to_json(self) -> str:
        """Return strict JSON; NaN and infinities become the strings `NaN`, `Infinity`, ..."""
        return strict_json(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Read a record back.

        Raises:
            ValueError: Not JSON, not a record, or a schema version this release does not know.
        """
        data = versioned_fields(text, kind="run record", readable=READABLE_VERSIONS)
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"run record has an unknown field {unknown[0]!r}")
        try:
            return cls(**_decode_fields(data))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"run record is incomplete: {error}") from None


def _decode_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(data)
    prints = dict(values["fingerprints"])
    prints["batches"] = tuple(prints["batches"])
    prints["dropout"] = tuple(prints["dropout"])
    values["fingerprints"] = Fingerprints(**prints)
    for name in ("series", "sampled"):
        values[name] = {k: tuple(_number(x) for x in v) for k, v in values[name].items()}
    values["histograms"] = {k: tuple(v) for k, v in values["histograms"].items()}
    values["sampled_steps"] = tuple(values["sampled_steps"])
    values["final"] = {k: _number(v) for k, v in values["final"].items()}
    values["events"] = tuple(values["events"])
    if values["held_out"] is not None:
        held = dict(values["held_out"])
        held["steps"] = tuple(held["steps"])
        held["loss"] = tuple(_number(x) for x in held["loss"])
        values["held_out"] = HeldOut(**held)
    if values["crash"] is not None:
        values["crash"] = CrashReport(**values["crash"])
    return values


def _number(value: Any) -> float:
    number = stored_number(value)
    if number is None:
        raise TypeError(f"{value!r} is no number")
    return number


def write_record(record: RunRecord, folder: Path) -> Path:
    """Write `record.json` into `folder` (created if needed), atomically and synced to disk."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RECORD_FILE
    write_atomically(path, record.to_json())
    return path


def read_record(folder: Path) -> RunRecord:
    """Read the record of a run folder.

    Raises:
        FileNotFoundError: The run has left no record.
        ValueError: The file is not a record of this release; the message names the file.
    """
    path = folder / RECORD_FILE
    try:
        return RunRecord.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
