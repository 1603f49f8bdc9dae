"""From the state of a finished, diverged or crashed run to its record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from harness.runs.loop import TrainingRun
from harness.runs.record import ENDED_EARLY, CrashReport, Fingerprints, RunRecord, Status
from harness.runs.series import grid_of


def make_record(
    run: TrainingRun, crash: CrashReport | None, *, run_key: str, environment: dict[str, Any]
) -> RunRecord:
    """Return what the run measured until it ended."""
    series = run.series.series()
    sampled_steps, sampled = run.probes.sampled()
    execution, evaluator = run.execution, run.evaluator
    return RunRecord(
        run_key=run_key,
        workload=run.workload.name,
        policy=run.policy.name,
        policy_content=run.policy.content(),
        seed=run.settings.seed,
        status=_status(run, crash, series.get("loss", ())),
        num_steps=run.settings.steps,
        execution=execution.kind if execution is not None else "native",
        execution_detail=execution.detail if execution is not None else "",
        settings={
            "workload": dict(run.workload.settings),
            "train": dataclasses.asdict(run.settings),
        },
        environment={
            **environment,
            "backend_switches": dict(execution.switches) if execution is not None else {},
            "data_sha256": run.workload.data_sha256,
        },
        fingerprints=Fingerprints(
            init_sha256=run.init_sha256,
            batches=run.series.checksums("batches"),
            dropout=run.series.checksums("dropout"),
            held_out_sha256=evaluator.sha256 if evaluator is not None else None,
        ),
        series=series,
        sampled_steps=sampled_steps,
        sampled=sampled,
        histograms=run.probes.histograms(),
        held_out=evaluator.result() if evaluator is not None else None,
        final=_final(run),
        audit=run.audit.forward_formats,
        probes={**_audit(run), **run.probes.results()},
        loss_dtype=run.loss_dtype,
        loss_on_16bit_grid=grid_of(series.get("loss", ())),
        samples_per_step=run.samples,
        tokens_per_step=run.tokens,
        events=_events(run, series),
        crash=crash,
    )


def _status(run: TrainingRun, crash: CrashReport | None, losses: Sequence[float]) -> Status:
    if crash is not None:
        return "crashed"
    ended_badly = not losses or not math.isfinite(losses[-1])
    bad_weights = run.final.get("nonfinite_weights", 0.0) > 0
    ended = run.stopped_early or run.ended_early is not None
    return "diverged" if ended or ended_badly or bad_weights else "completed"


def _audit(run: TrainingRun) -> dict[str, dict[str, Any]]:
    return {} if run.audit_result is None else {"audit": run.audit_result}


def _final(run: TrainingRun) -> dict[str, float]:
    final = dict(run.final)
    share = run.probes.zero_share()
    if share is not None:
        final["zero_grad_share"] = share
    return final


def _events(run: TrainingRun, series: dict[str, tuple[float, ...]]) -> tuple[dict[str, Any], ...]:
    events = []
    losses = series.get("loss", ())
    bad = [step for step, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        events.append(
            _event(bad[0], "nonfinite_loss", f"{len(bad)} of {len(losses)} losses are not finite")
        )
    skipped = [step for step, flag in enumerate(series.get("skipped", ())) if flag]
    if skipped:
        message = f"{len(skipped)} steps skipped because a scaled gradient overflowed"
        events.append(_event(skipped[0], "skipped_step", message))
    if run.stopped_early:
        message = f"stopped after {run.series.nonfinite_streak} non-finite losses in a row"
        events.append(_event(len(losses), "stopped", message))
    if run.ended_early is not None:
        events.append(_event(len(losses), ENDED_EARLY, run.ended_early))
    events += [_event(0, "note", note) for note in sorted(run.notes)]
    return tuple(events)


def _event(step: int, kind: str, message: str) -> dict[str, Any]:
    return {"step": step, "kind": kind, "message": message}
