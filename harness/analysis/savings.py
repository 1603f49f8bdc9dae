"""What stopping early saved: runs that no verdict needed, and their time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from harness.analysis.findings import Savings, Verdict
from harness.analysis.seed_plan import SeedPlan
from harness.runs.record import RunRecord


def savings(
    runs: Mapping[str, Mapping[int, RunRecord]],
    verdicts: Sequence[Verdict],
    *,
    plan: SeedPlan,
    seeds: Sequence[int],
) -> Savings | None:
    """Return what was saved against running every policy on all seeds of the plan.

    Runs that are missing because nothing is settled yet are not saved: those of an unfinished
    candidate, and as long as there is one, those of the reference and the controls. Runs that
    exist beyond a settled look were paid for, so they are not saved either.

    Args:
        runs: Policy -> seed -> run, the reference and the controls among them.
        verdicts: Of all candidates and controls.
        plan: When candidates are judged.
        seeds: All seeds of the plan.

    Returns:
        None for a fixed plan.
    """
    if not plan.adaptive:
        return None
    wanted = seeds[: plan.max_pairs]
    open_ones = {v.policy for v in verdicts if v.look is not None and v.look.stop == "unfinished"}
    judged = {v.policy for v in verdicts if not v.is_control}
    missing = {
        policy: sum(seed not in by_seed for seed in wanted) for policy, by_seed in runs.items()
    }
    saved = {
        policy: count
        for policy, count in missing.items()
        if count and policy not in open_ones and (policy in judged or not open_ones)
    }
    times = {policy: _mean_time(by_seed.values()) for policy, by_seed in runs.items()}
    known = [t for t in times.values() if t is not None]
    typical = float(np.mean(known)) if known else None
    seconds = full_seconds = None
    if typical is not None:
        each = {policy: typical if t is None else t for policy, t in times.items()}
        seconds = sum(count * each[policy] for policy, count in saved.items())
        full_seconds = sum(len(wanted) * t for t in each.values())
    full_runs = len(wanted) * len(runs)
    return Savings(
        runs=sum(saved.values()),
        full_runs=full_runs,
        seconds=seconds,
        full_seconds=full_seconds,
        by_policy=saved,
        sentence=_sentence(sum(saved.values()), full_runs, seconds, full_seconds),
    )


def _mean_time(records: Collection[RunRecord]) -> float | None:
    times = [record.wall_time_s for record in records if record.wall_time_s > 0]
    return float(np.mean(times)) if times else None


def _sentence(runs: int, full_runs: int, seconds: float | None, full_seconds: float | None) -> str:
    if not runs:
        return f"All {full_runs} runs of the full plan were needed or may still be."
    text = f"{runs} of {full_runs} runs were not needed"
    if seconds is None or full_seconds is None:
        return f"{text}."
    return f"{text}: about {_duration(seconds)} of {_duration(full_seconds)} of run time."


def _duration(seconds: float) -> str:
    """Return a time with the unit that leaves one to three digits before the point."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
