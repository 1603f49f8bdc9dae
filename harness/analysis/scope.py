"""What findings and verdicts speak for, and what they say nothing about, as phrases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.analysis.wording import listing, seeds_text
from harness.runs.record import RunRecord


def run_scope(record: RunRecord, *, emulated: Sequence[str] = ()) -> str:
    """Return the scope of runs like this one: steps, batch, device, and who was emulated."""
    parts = [f"the first {record.num_steps} steps of this schedule"]
    if record.samples_per_step:
        parts.append(f"batch {record.samples_per_step:g}")
    parts.append(f"on {record.environment.get('device_kind', 'an unknown device')}")
    scope = ", ".join(parts)
    return f"{scope}; {listing(emulated)} emulated" if emulated else scope


def verdict_scope(runs: Sequence[RunRecord]) -> str:
    """Return the scope of a verdict over these runs of one candidate."""
    if not runs:
        return "nothing yet: there is no finished run"
    scope = f"{run_scope(runs[0])}; {seeds_text(sorted(run.seed for run in runs))}"
    return f"{scope}; emulated" if any(run.execution == "emulated" for run in runs) else scope


def not_tested(
    environment: Mapping[str, object], num_steps: int, *, probed: bool = False
) -> tuple[str, ...]:
    """Return sentences on what the experiment says nothing about.

    Args:
        environment: Of the runs.
        num_steps: Of the runs.
        probed: Whether every candidate that may be trained in has a same-point probe.
    """
    sentences = [
        f"Training beyond step {num_steps}, and other batch sizes, learning rates, schedules or "
        "model sizes.",
        "Failures that are rare: see the failure-rate bound of each verdict.",
        "More than one device.",
    ]
    if not probed:
        sentences.insert(
            1,
            "The arithmetic at fixed weights (update retention, rounding noise and bias): harm "
            "that builds up over many more steps may not show in the loss yet.",
        )
    if environment.get("device_kind", "cpu") == "cpu":
        sentences.append(
            "A GPU: its kernels sum in another order and width, and its speed and memory are "
            "not those of a CPU."
        )
    return tuple(sentences)
