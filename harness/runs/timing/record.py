"""What the timing stage measured: step times by policy, and their ratios; needs no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.runs.record_files import (
    read_if_there,
    strict_json,
    versioned_fields,
    write_atomically,
)

SCHEMA_VERSION = 2
# Version 1 had no `profiles`.
READABLE_VERSIONS = (1, 2)
TIMING_FILE = "timing.json"
_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class TimeRatio:
    """A candidate's step time over the reference's, with a two-sided 95 % interval."""

    value: float
    ci_low: float | None
    ci_high: float | None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a policy's training steps went; shares of the time inside ops.

    Attributes:
        steps: Profiled steps.
        families: Op family -> share, largest first; the optimizer's ops are a family of their own.
        ops: The ops that together make 80 % of the time, each with its share, largest first.
        low_precision_share: Of ops whose first operand is FP16, BF16 or FP8, or under TF32 a
            product of FP32 operands.
        cast_share: Of conversions between formats.
        fp32_elementwise_share: Of FP32 ops of the families `elementwise` and `optimizer`.
        sentence: What that means for the policy's measured gain.
    """

    steps: int
    families: dict[str, float]
    ops: tuple[tuple[str, float], ...]
    low_precision_share: float
    cast_share: float
    fp32_elementwise_share: float
    sentence: str

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Profile:
        """Return a profile from its stored fields.

        Raises:
            TypeError, KeyError: A field is missing or unknown.
        """
        ops = tuple((str(name), float(share)) for name, share in data["ops"])
        return cls(**{**data, "ops": ops})


@dataclass(frozen=True, kw_only=True)
class TimingRecord:
    """The timing stage of one model.

    Attributes:
        workload: Model name.
        device: `cpu` or `cuda`.
        reference: Name of the policy that ratios are relative to.
        steps_per_block: Timed steps per block; a block's time is their mean.
        step_time_s: Policy -> seconds per step, one per block, blocks aligned over policies.
        ratios: Policy -> ratio to the reference; only candidates that ran natively.
        excluded: Policy -> why it has no ratio.
        note: How the times were taken and what they do not say.
        profiles: Policy -> where the time of its steps goes; natively run policies only.
    """

    schema_version: int = SCHEMA_VERSION
    workload: str
    device: str
    reference: str
    steps_per_block: int
    step_time_s: dict[str, tuple[float, ...]]
    ratios: dict[str, TimeRatio] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    note: str = ""
    profiles: dict[str, Profile] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return strict JSON."""
        return strict_json(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> TimingRecord:
        """Read a record back.

        Raises:
            ValueError: Not a timing record, or of a schema version this release does not know.
        """
        data = versioned_fields(text, kind="timing record", readable=READABLE_VERSIONS)
        try:
            data["schema_version"] = SCHEMA_VERSION
            data["step_time_s"] = {k: tuple(v) for k, v in data["step_time_s"].items()}
            data["ratios"] = {k: TimeRatio(**v) for k, v in data["ratios"].items()}
            profiles = data.get("profiles", {})
            data["profiles"] = {k: Profile.from_dict(v) for k, v in profiles.items()}
            return cls(**data)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"timing record is incomplete: {error}") from None


def time_ratio(candidate: Sequence[float], reference: Sequence[float]) -> TimeRatio:
    """Return the ratio of median block times, with a 95 % bootstrap interval over blocks.

    Blocks are resampled in pairs (percentile bootstrap, Efron and Tibshirani 1993, chapter 13),
    2000 times with a fixed seed. One block has no interval.

    Args:
        candidate: Seconds per step, one per block, all > 0.
        reference: The same blocks under the reference.

    Raises:
        ValueError: No blocks, or unequal numbers of them.
    """
    if len(candidate) != len(reference) or not candidate:
        raise ValueError(f"unequal or no blocks: {len(candidate)} and {len(reference)}")
    ours, theirs = np.asarray(candidate), np.asarray(reference)
    value = float(np.median(ours) / np.median(theirs))
    if len(ours) == 1:
        return TimeRatio(value=value, ci_low=None, ci_high=None)
    chosen = np.random.default_rng(0).integers(0, len(ours), size=(_RESAMPLES, len(ours)))
    resampled = np.median(ours[chosen], axis=1) / np.median(theirs[chosen], axis=1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    assert math.isfinite(value)
    return TimeRatio(value=value, ci_low=float(low), ci_high=float(high))


def write_timing(record: TimingRecord, folder: Path) -> Path:
    """Write `timing.json` into `folder` (created if needed), atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TIMING_FILE
    write_atomically(path, record.to_json())
    return path


def read_timing(folder: Path) -> TimingRecord | None:
    """Return the timing record of a folder; None when the stage was not run.

    Raises:
        ValueError: The file is not a timing record of this release; the message names it.
    """
    return read_if_there(folder / TIMING_FILE, TimingRecord.from_json)
