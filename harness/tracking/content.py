"""What of a record MLflow shows: tags, params and metric points, as plain values without MLflow.

Steps on the x axis count completed updates: the training loss at step k and the held-out loss at
step k are of the same weights.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from harness.runs.record import RunRecord

MAX_KEY_LENGTH = 250
MAX_PARAM_LENGTH = 6000
MAX_TAG_LENGTH = 8000
_FORBIDDEN = re.compile(r"[^\w\-. /:]", re.ASCII)

Point = tuple[str, int, float]
"""Metric name, step, finite value."""

# Series of the record that are logged as they are, on every step.
_STEP_METRICS = {"loss": "loss/train", "grad_norm": "grad_norm/global"}
_SCALER_METRICS = {"loss_scale": "loss_scale/value", "skipped": "loss_scale/skipped"}
# Shares on sampled steps: metric, counted elements, of which elements.
_SHARE_METRICS = (
    ("underflow/grad_fp16", "grad_flushed_fp16", "grad_nonzero"),
    ("underflow/grad_bf16", "grad_flushed_bf16", "grad_nonzero"),
    ("overflow/grad_fp16", "grad_overflow_fp16", "grad_nonzero"),
    ("lost_update/bf16", "lost_update_bf16", "update_total"),
)


def run_name(record: RunRecord) -> str:
    """Return the name shown in MLflow's run list, e.g. `bf16 seed 1`."""
    return f"{record.policy} seed {record.seed}"


def tags(record: RunRecord, *, sweep_id: str) -> dict[str, str]:
    """Return the tags to filter and group by; every value is a non-empty string."""
    values: dict[str, object] = {
        "kind": "run",
        "sweep_id": sweep_id,
        "workload": record.workload,
        "policy": record.policy,
        "seed": record.seed,
        "status": record.status,
        "execution": record.execution,
        "run_key": record.run_key,
        "mlflow.source.name": "harness",
        "mlflow.source.type": "LOCAL",
    }
    if (step := first_nonfinite_step(record)) is not None:
        values["first_nonfinite_step"] = step
    if record.crash is not None:
        values["crash"] = record.crash.sentence or record.crash.kind
    return {key: _shortened(str(value), MAX_TAG_LENGTH) for key, value in values.items()}


def params(record: RunRecord) -> dict[str, str]:
    """Return every setting, flattened with dots: `settings.*`, `policy.*`, `environment.*`.

    Characters that MLflow refuses in names become `_`; if that makes two names equal, the later
    one gets a number. Long values are cut and end in `...`: the full record is an artifact.
    """
    nested: dict[str, Any] = {
        "workload": record.workload,
        "policy": {"name": record.policy, **record.policy_content},
        "seed": record.seed,
        "num_steps": record.num_steps,
        "execution_detail": record.execution_detail,
        "settings": record.settings,
        "environment": record.environment,
    }
    found: dict[str, str] = {}
    for name, value in _flattened("", nested):
        key = unique = safe_name(name)
        count = 1
        while unique in found:
            count += 1
            unique = f"{key[: MAX_KEY_LENGTH - 8]}_{count}"
        found[unique] = _shortened(_text(value), MAX_PARAM_LENGTH)
    return found


def safe_name(name: str) -> str:
    """Return `name` with what MLflow refuses in a param or metric name replaced by `_`."""
    cleaned = _FORBIDDEN.sub("_", name)[:MAX_KEY_LENGTH]
    if cleaned.startswith((".", "/")) or posixpath.normpath(cleaned) != cleaned:
        # MLflow refuses what would be another path when taken as a file name: `a//b`, `a/../b`.
        cleaned = cleaned.replace("/", "_").replace(".", "_")
    return cleaned or "_"


def first_nonfinite_step(record: RunRecord) -> int | None:
    """Return the first step with a NaN or infinite loss or gradient norm, or None.

    A gradient norm on a step that the loss scaler skipped does not count: overflow there is how a
    dynamic loss scale works.
    """
    rows = zip_longest(
        record.series.get("loss", ()),
        record.series.get("grad_norm", ()),
        record.series.get("skipped", ()),
        fillvalue=0.0,
    )
    for step, (loss, norm, skipped) in enumerate(rows):
        if not math.isfinite(loss) or (not skipped and not math.isfinite(norm)):
            return step
    return None


def points(record: RunRecord) -> Iterator[Point]:
    """Yield every finite metric point, one metric after the other.

    Non-finite values are left out, since SQLite stores an infinity as 1.8e308 and the curves would
    be drawn to it; the metric `first_nonfinite_step` says where they begin.
    """
    for name, step, value in _all_points(record):
        if math.isfinite(value):
            yield name, step, value


def _all_points(record: RunRecord) -> Iterator[Point]:
    names = dict(_STEP_METRICS)
    if record.policy_content.get("loss_scale", {}).get("kind", "none") != "none":
        names |= _SCALER_METRICS
    for key, metric in names.items():
        yield from _every_step(metric, record.series.get(key, ()))
    yield from _shares(record)
    yield from _throughput(record)
    if record.held_out is not None:
        for step, loss in zip(record.held_out.steps, record.held_out.loss, strict=True):
            yield "loss/held_out", step, loss
    last = max(len(record.series.get("loss", ())) - 1, 0)
    if record.peak_memory_bytes is not None:
        yield "memory/peak_bytes", last, float(record.peak_memory_bytes)
    if (first := first_nonfinite_step(record)) is not None:
        yield "first_nonfinite_step", first, float(first)


def _every_step(metric: str, values: Sequence[float]) -> Iterator[Point]:
    return ((metric, step, value) for step, value in enumerate(values))


def _shares(record: RunRecord) -> Iterator[Point]:
    for metric, count_name, total_name in _SHARE_METRICS:
        counts = record.sampled.get(count_name, ())
        totals = record.sampled.get(total_name, ())
        # Not strict: a crash can leave one count more than the other.
        for step, count, total in zip(record.sampled_steps, counts, totals, strict=False):
            if total > 0:
                yield metric, step, count / total


def _throughput(record: RunRecord) -> Iterator[Point]:
    times = record.series.get("step_time_s", ())
    rates = (
        ("throughput/samples_per_s", record.samples_per_step),
        ("throughput/tokens_per_s", record.tokens_per_step),
    )
    yield from _every_step("throughput/step_time_ms", [1000.0 * t for t in times])
    for metric, per_step in rates:
        if per_step is not None:
            yield from ((metric, s, per_step / t) for s, t in enumerate(times) if t > 0)


def _flattened(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flattened(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return str(value)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def folder_name(experiment: str) -> str:
    """Return a name that is one plain folder: anything but `A-Za-z0-9_.-` becomes `_`."""
    return re.sub(r"[^\w\-.]", "_", experiment, flags=re.ASCII).lstrip(".") or "_"


def description(markdown: str) -> str:
    """Return `markdown`, cut at the end of a line if it is longer than a tag may be."""
    if len(markdown) <= MAX_TAG_LENGTH:
        return markdown
    note = "\n\n(Shortened: the whole report is `report.md` among the artifacts.)\n"
    kept = markdown[: MAX_TAG_LENGTH - len(note)]
    return kept.rpartition("\n")[0] + note
