"""Gates on the reference: FP32 itself must be stable and must learn, or nothing can be judged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.analysis import statistics
from harness.analysis.endpoints import Level, head_loss, held_out_by_step
from harness.analysis.findings import Endpoint, Reason
from harness.analysis.rule import DecisionRule
from harness.analysis.run_memory import once_per_run
from harness.analysis.wording import ENDPOINT_NAMES, number
from harness.runs.record import RunRecord


@once_per_run
def unstable_reason(record: RunRecord, rule: DecisionRule) -> str | None:
    """Return why an FP32 run cannot serve as a reference (non-finite or diverged), or None."""
    losses = record.series.get("loss", ())
    if (step := first_nonfinite(losses)) is not None:
        return f"its loss is not finite at step {step}"
    if record.final.get("nonfinite_weights", 0.0) > 0:
        return "its final weights are not finite"
    if any(not math.isfinite(x) for x in held_out_by_step(record).values()):
        return "its held-out loss is not finite"
    if record.status == "diverged" or len(losses) < record.num_steps:
        return f"it ended after {len(losses)} of {record.num_steps} steps"
    if _relapsed(record, rule):
        return "its loss went back up and stayed there"
    return None


def _relapsed(record: RunRecord, rule: DecisionRule) -> bool:
    end, lowest = smoothed_end(record, rule)
    start = head_loss(record, rule)
    gain = start - lowest
    relapsed = end > lowest + rule.relapse_share * gain and gain > rule.relapse_min_gain * abs(
        start
    )
    head = record.series["loss"][: max(1, rule.head_min_steps)]
    return relapsed or end > max(head)


def reference_unstable(
    unstable: Mapping[int, str], *, num_seeds: int, rule: DecisionRule
) -> Reason | None:
    """Return REFERENCE_UNSTABLE if more than `1 / unstable_seed_divisor` of the seeds are."""
    if not unstable or len(unstable) * rule.unstable_seed_divisor <= num_seeds:
        return None
    first = min(unstable)
    message = (
        f"FP32 itself failed in {len(unstable)} of {num_seeds} seeds (seed {first}: "
        f"{unstable[first]}), so nothing here can be blamed on precision."
    )
    limit = num_seeds / rule.unstable_seed_divisor
    return gate_reason("REFERENCE_UNSTABLE", message, float(len(unstable)), limit)


def reference_not_learning(levels: Mapping[Endpoint, Level], rule: DecisionRule) -> Reason | None:
    """Return REFERENCE_NOT_LEARNING if FP32 learned too little for harm to show.

    D <= 0, or the learned share of the loss before training (of its absolute value: a figure in
    own units may be negative) below `not_learning_share` or below `not_learning_se` of its
    standard errors over seeds.
    """
    for endpoint, level in levels.items():
        noise = rule.not_learning_se * (level.learned_se or 0.0)
        least = max(rule.not_learning_share, noise)
        if level.progress > 0 and level.learned >= least:
            continue
        change = "fell by only" if level.progress > 0 else "did not fall but rose by"
        beyond = (
            ", not beyond its spread over seeds" if level.learned > rule.not_learning_share else ""
        )
        message = (
            f"FP32's {ENDPOINT_NAMES[endpoint]} {change} {number(abs(level.progress))} from "
            f"{number(level.start)} {level.unit}{beyond}: this run cannot show harm."
        )
        return gate_reason("REFERENCE_NOT_LEARNING", message, level.learned, least)
    return None


@once_per_run
def smoothed_end(record: RunRecord, rule: DecisionRule) -> tuple[float, float]:
    """Return the smoothed loss over the end of the run (mean) and its minimum over the run."""
    smoothed = statistics.exponential_average(record.series["loss"], decay=rule.ema_decay)
    window = max(1, math.ceil(rule.divergence_window * len(smoothed)))
    return float(smoothed[-window:].mean()), float(smoothed.min())


def first_nonfinite(values: Sequence[float]) -> int | None:
    """Return the index of the first NaN or infinity, or None."""
    return next((k for k, value in enumerate(values) if not math.isfinite(value)), None)


def gate_reason(code: str, message: str, value: float | None, threshold: float | None) -> Reason:
    """Return a reason of kind `gate`."""
    return Reason(code=code, message=message, value=value, threshold=threshold, kind="gate")
