"""Triage of a finished run: is there trouble, where did it begin, what does a replay say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from harness.precision.module_names import owner
from harness.precision.policy import PrecisionPolicy
from harness.probes.triage import Trouble, find_trouble
from harness.probes.triage_diagnosis import diagnose
from harness.probes.triage_entry import diagnose_unmoved, not_replayed
from harness.runs.record import RunRecord
from harness.runs.settings import Progress, RunSettings
from harness.runs.triage.replay import ReplayedRun, replay
from harness.workloads.base import Workload


def triaged(
    record: RunRecord,
    workload: Workload,
    policy: PrecisionPolicy,
    settings: RunSettings,
    *,
    on_progress: Callable[[Progress], None] | None = None,
) -> RunRecord:
    """Return the record with `probes["triage"]` and an event, if the run ended in trouble.

    A run without trouble, or whose zeros FP32 has too, is returned as it is. At most one run's
    steps are made. What goes wrong in a replay is told in the entry, never raised.

    Args:
        record: Of a run that has just ended.
        workload: The workload it was made of.
        policy: Its policy.
        settings: Its settings.
        on_progress: As for training.
    """
    trouble = find_trouble(
        status=record.status,
        series=record.series,
        final=record.final,
        sampled_steps=record.sampled_steps,
        sampled=record.sampled,
        computes_in_fp32=policy.computes_in_fp32,
        stores_fp32=policy.param_format == "fp32",
    )
    if trouble is None:
        return record

    def again(with_policy: PrecisionPolicy) -> ReplayedRun:
        return replay(
            workload,
            with_policy,
            settings,
            record=record,
            trouble=trouble,
            on_progress=on_progress,
        )

    try:
        entry = _entry(trouble, policy, record, again)
    except Exception as error:  # noqa: BLE001 - the run itself is over and has its record
        lines = str(error).splitlines() or [""]
        entry = not_replayed(trouble, f"the replay ended with {type(error).__name__}: {lines[0]}")
    if entry is None:
        return record
    event = {"step": entry["step"] or 0, "kind": "triage", "message": entry["sentence"]}
    return dataclasses.replace(
        record, probes={**record.probes, "triage": entry}, events=(*record.events, event)
    )


def _entry(
    trouble: Trouble,
    policy: PrecisionPolicy,
    record: RunRecord,
    again: Callable[[PrecisionPolicy], ReplayedRun],
) -> dict[str, Any] | None:
    if trouble.trigger == "unmoved_weights":
        return _unmoved(trouble, policy, record, again)
    run = again(policy)
    if run.evidence is not None:
        return diagnose(trouble, run.evidence)
    if run.bad_at is not None:
        step, names = run.bad_at
        named = ", ".join(f"`{name}`" for name in names[:4])
        sentence = f"step {step}: {named} became non-finite, with a finite loss and gradient"
        return not_replayed(trouble, sentence, step=step) | {
            "cause": "layer",
            "module": owner(names[0]),
        }
    return not_replayed(trouble, "a replay of the run did not show the trouble again")


def _unmoved(
    trouble: Trouble,
    policy: PrecisionPolicy,
    record: RunRecord,
    again: Callable[[PrecisionPolicy], ReplayedRun],
) -> dict[str, Any] | None:
    assert trouble.step is not None
    steps = trouble.step + 1
    ours = again(policy).moved
    theirs = again(PrecisionPolicy(name="fp32")).moved
    return diagnose_unmoved(
        trouble,
        {name: (ours.get(name, 0.0), share) for name, share in theirs.items()},
        steps=steps,
        count=int(record.final["unmoved_tensors"]),
        format_name=policy.param_format,
    )
