"""What the same-point probe measured of one candidate, as a stored value; needs no torch.

Sums, not ratios: the analyzer pools them over points before it divides. With f_j the FP32 gradient
and c_j the candidate's gradient of batch j at the same weights, e_j = c_j - f_j, K batches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.runs.record_files import (
    read_if_there,
    strict_json,
    versioned_fields,
    with_numbers,
    write_atomically,
)

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of the FP32 trajectory.

    Attributes:
        step: Completed steps of the FP32 run at the point.
        kind: `final_rate` is a trajectory point visited once more with the planned final learning
            rate: it counts for the retention of updates only.
        learning_rate: Of the first parameter group in the update measured here.
        noise: sum_j |f_j - mean f|^2 / (K-1), the trace of the minibatch gradient covariance.
        mean_gradient_sq: |mean f|^2.
        error_sq: mean_j |e_j|^2.
        mean_error_sq: |mean e|^2.
        error_noise: sum_j |e_j - mean e|^2 / (K-1).
        cross: sum over i != j of <c_i, f_j>.
        self_cross: sum over i != j of <f_i, f_j>.
        retained: sum_j <dw_c, dw_f> over the weight changes actually stored by one optimizer step
            from copies of the same state.
        updated: sum_j |dw_f|^2.
    """

    step: int
    kind: Literal["trajectory", "final_rate"]
    learning_rate: float
    noise: float
    mean_gradient_sq: float
    error_sq: float
    mean_error_sq: float
    error_noise: float
    cross: float
    self_cross: float
    retained: float
    updated: float


@dataclass(frozen=True, kw_only=True)
class ModuleError:
    """One module's share, pooled over the points; None where it does not apply.

    Attributes:
        module: Dotted name; `(model)` for the root, that is for the whole model.
        kind: Class name of the module.
        local_forward_error: Normwise relative error of the module's output when it is given the
            FP32 run's own input: largest over the points. None for a module without
            floating-point outputs. Infinite where the candidate's output is not finite.
        local_output_max: Largest magnitude of that output in FP32.
        integer_input_max: Largest magnitude among inputs (FP32 run) that hold whole numbers only,
            and among integers that the module itself casts, which were rounded to other whole
            numbers by the candidate's format; None if there are none.
        gradient_error: sqrt(sum |e|^2 / sum |f|^2) over the module's own parameters.
        cosine: Of c and f over the same.
        sign_agreement: Share of elements whose signs agree, of those not zero in FP32.
        sqnr_db: 10 log10(sum |f|^2 / sum |e|^2).
        flushed_share: Share of elements that are zero in c, of those not zero in f.
        noise_ratio: sum mean_j |e_j|^2 / sum noise, the module's own nu.
        fp64_error: Relative error of the candidate's gradient against FP64.
        fp32_fp64_error: Relative error of FP32's gradient against FP64.
    """

    module: str
    kind: str
    local_forward_error: float | None = None
    local_output_max: float | None = None
    integer_input_max: float | None = None
    gradient_error: float | None = None
    cosine: float | None = None
    sign_agreement: float | None = None
    sqnr_db: float | None = None
    flushed_share: float | None = None
    noise_ratio: float | None = None
    fp64_error: float | None = None
    fp32_fp64_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class SamePointRecord:
    """The same-point probe of one candidate on one model.

    Attributes:
        policy: Name of the candidate.
        policy_content: Its content.
        seed: Of the FP32 trajectory.
        num_batches: K.
        points: Trajectory points in order, then the `final_rate` point.
        modules: The whole model first, then modules in the model's order.
        unseen: Whether the batches were not trained on; False where the workload has no more.
        same_trajectory: Whether the FP32 trajectory of the probe repeated the stored reference
            run's losses bit for bit; None if not compared.
        failed: Why there is no measurement, in one sentence; then `points` is empty.
        notes: Sentences on what was left out.
        seconds: Wall time of this candidate's measurements, the FP32 run's own left out.
    """

    schema_version: int = SCHEMA_VERSION
    workload: str
    policy: str
    policy_content: dict[str, Any]
    seed: int
    num_batches: int
    points: tuple[Point, ...] = ()
    modules: tuple[ModuleError, ...] = ()
    unseen: bool = True
    same_trajectory: bool | None = None
    failed: str | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> str:
        """Return strict JSON; NaN and infinities become the strings `NaN`, `Infinity`, ..."""
        return strict_json(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> SamePointRecord:
        """Read a record back.

        Raises:
            ValueError: Not such a record, or of a schema version this release does not know.
        """
        data = versioned_fields(text, kind="same-point record", readable=(SCHEMA_VERSION,))
        try:
            data["points"] = tuple(Point(**with_numbers(p)) for p in data["points"])
            data["modules"] = tuple(ModuleError(**with_numbers(m)) for m in data["modules"])
            data["notes"] = tuple(data["notes"])
            return cls(**data)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"same-point record is incomplete: {error}") from None


def write_same_point(record: SamePointRecord, path: Path) -> None:
    """Write a record (its folder is created if needed), atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, record.to_json())


def read_same_point(path: Path) -> SamePointRecord | None:
    """Read a record back; None when there is none.

    Raises:
        ValueError: The file is not a record of this release; the message names it.
    """
    return read_if_there(path, SamePointRecord.from_json)
