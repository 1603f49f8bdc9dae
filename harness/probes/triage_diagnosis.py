"""From what a replay saw to a cause and the sentences that tell it: `RunRecord.probes["triage"]`.

Every sentence names a step, a module, a number and the limit it passed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from harness.numerics.formats import get_format
from harness.probes.triage import FLUSHED, OVERFLOWED, Cause, Evidence, OpEvent, Pass, Trouble
from harness.probes.triage_entry import triage_entry
from harness.probes.triage_places import listed, number, place, singular, upper

# How much larger than anything before a batch must be to be called an outlier.
_OUTLIER = 30.0
# How far weights or an FP32 loss must have grown to be called blown up.
_BLOWN_UP = 30.0
_DEAD, _ALIVE = 0.999, 0.9
_MAX_FINDINGS = 5


def diagnose(trouble: Trouble, seen: Evidence) -> dict[str, Any] | None:
    """Return what `RunRecord.probes["triage"]` holds; None if FP32 shows the same and all is well.

    Keys: `trigger`, `step`, `cause` (`data`, `learning_rate`, `loss_scale`, `layer`, `silent`,
    `unknown`), where it happened (`module`, `op`, `direction`, `kind`), the range that was left
    (`format`, `value`, `limit`, `fp32_max`), `sentence`, and `findings`: a list of {`sentence`}
    with what else was seen, most telling first. What does not apply is null.
    """
    if trouble.trigger == "zero_gradients" and not _dead_modules(seen):
        return None
    event = _event(trouble, seen)
    checks = (_data, _learning_rate, _loss_scale, _layer, _silent)
    for check in checks:
        found = check(trouble, seen, event)
        if found is not None:
            cause, sentence = found
            break
    else:
        cause, sentence = "unknown", _unknown(seen)
    return _result(trouble, seen, event, cause, sentence)


def _event(trouble: Trouble, seen: Evidence) -> OpEvent | None:
    overflows = [e for e in seen.low.events if e.kind == OVERFLOWED]
    flushes = [e for e in seen.low.events if e.kind == FLUSHED]
    if trouble.trigger == "zero_gradients":
        # An infinity inside of a module explains zeros; one in a gradient that is finite in the
        # end does not.
        inside = [e for e in overflows if e.direction == "forward"]
        return next(iter([*inside, *_backward_first(flushes)]), None)
    if overflows:
        return overflows[0]
    return seen.low.passed_on


def _backward_first(flushes: Sequence[OpEvent]) -> list[OpEvent]:
    """Return those in backward first: they are what empties gradients."""
    return sorted(flushes, key=lambda event: event.direction != "backward")


def _data(trouble: Trouble, seen: Evidence, event: OpEvent | None) -> tuple[Cause, str] | None:
    size, before = seen.batch_max, seen.earlier_batch_max
    if size is None or trouble.trigger == "zero_gradients":
        return None
    if not math.isfinite(size):
        return "data", f"step {seen.step}: the batch itself holds NaN or infinite values"
    if not before or size <= _OUTLIER * before:
        return None
    sentence = (
        f"step {seen.step}: the batch holds {number(size)}, {number(size / before)} times the "
        "largest magnitude of all batches before"
    )
    return "data", _joined(sentence, _happened(seen, event), _buffers(seen))


def _learning_rate(
    trouble: Trouble, seen: Evidence, event: OpEvent | None
) -> tuple[Cause, str] | None:
    if seen.step == 0 or trouble.trigger == "zero_gradients":
        return None
    reference = seen.fp32 or seen.low
    grown = seen.weights_max / seen.first_weights_max if seen.first_weights_max else 1.0
    reasons = []
    if seen.fp32 is not None and not _finite(seen.fp32):
        reasons.append("the step is not finite in FP32 either, at the same weights and batch")
    if seen.first_loss and math.isfinite(reference.loss):
        rise = reference.loss / abs(seen.first_loss)
        if rise > _BLOWN_UP:
            reasons.append(f"the FP32 loss there is {number(rise)} times the first step's")
    if not grown <= _BLOWN_UP:
        reasons.append(
            f"the largest weight grew from {number(seen.first_weights_max)} to "
            f"{number(seen.weights_max)}"
        )
    if seen.fp32 is None and not _finite(seen.low) and not reasons:
        reasons.append("the run computes in FP32, so no low format is to blame")
    if not reasons:
        return None
    rate = seen.learning_rate
    at = f" at a learning rate of {number(rate)}" if math.isfinite(rate) else ""
    sentence = f"step {seen.step}: the training itself blew up{at}: {'; '.join(reasons)}"
    return "learning_rate", _joined(sentence, _happened(seen, event))


def _loss_scale(
    trouble: Trouble, seen: Evidence, event: OpEvent | None
) -> tuple[Cause, str] | None:
    if event is None or event.direction != "backward":
        return None
    if event.kind == FLUSHED and not seen.has_scaler:
        sentence = f"step {seen.step}: {_happened(seen, event)}; no loss scale lifts it"
        return "loss_scale", _joined(sentence, _dead(seen))
    if event.kind == OVERFLOWED and seen.unscaled_finite:
        sentence = f"step {seen.step}: {_happened(seen, event)}"
        return "loss_scale", _joined(sentence, "without the scale the gradient is finite")
    return None


def _layer(trouble: Trouble, seen: Evidence, event: OpEvent | None) -> tuple[Cause, str] | None:
    if trouble.trigger == "zero_gradients":
        return None
    if event is not None and event.finite_inputs:
        sentence = f"step {seen.step}: {_happened(seen, event)}"
        return "layer", _joined(sentence, _buffers(seen))
    if seen.bad_weights:
        sentence = (
            f"step {seen.step}: the weights of {listed(seen.bad_weights)} are not finite before "
            "it: the update of the step before made them so"
        )
        return "layer", sentence
    if event is not None:
        return "layer", f"step {seen.step}: {_happened(seen, event)}"
    return None


def _silent(trouble: Trouble, seen: Evidence, event: OpEvent | None) -> tuple[Cause, str] | None:
    if trouble.trigger == "zero_gradients":
        first = _happened(seen, event) or _dead(seen)
        sentence = f"step {seen.step}: {first}"
        more = _dead(seen) if event is not None else ""
        return "silent", _joined(sentence, _silenced(seen), more, "no loss is NaN")
    if seen.bad_buffers:
        return "silent", f"step {seen.step}: {_buffers(seen)}"
    return None


def _unknown(seen: Evidence) -> str:
    if not seen.reproduced:
        return f"step {seen.step}: a replay of the run did not give its losses again"
    return (
        f"step {seen.step}: no op of its forward and backward pass left the range of its format, "
        "and the same step in FP32 is as finite"
    )


def _happened(seen: Evidence, event: OpEvent | None) -> str:
    """Return what an op did, as a clause that names place, number and limit."""
    if event is None:
        return ""
    where = place(event)
    at = ""
    if event.direction == "backward" and seen.scale != 1:
        at = f" at loss scale {number(seen.scale)}"
    if event.kind == FLUSHED:
        smallest = get_format(event.format).min_subnormal
        return (
            f"{where} is flushed to zero{at}: its FP32 maximum {number(event.value)} is below "
            f"what {upper(event.format)} resolves ({number(smallest)})"
            if event.value is not None and event.value < smallest
            else f"{where} is mostly flushed to zero in {upper(event.format)}{at}"
        )
    if text := singular(event):
        return text
    limit, value = event.limit, event.value
    if not event.finite_inputs:
        return f"{where} is the first result that is not finite{at}; so are its inputs"
    if value is not None and math.isinf(value):
        return f"{where} is infinite, in FP32 too{at}"
    if value is not None and limit is not None and value > limit:
        text = f"{where} reached {number(value)} > {number(limit)} ({upper(event.format)}){at}"
    else:
        text = f"{where} is not finite in {upper(event.format)} though its inputs are{at}"
    if event.fp32_max is not None and math.isfinite(event.fp32_max):
        text += f"; FP32 max {number(event.fp32_max)}"
    return text


def _buffers(seen: Evidence) -> str:
    if not seen.bad_buffers:
        return ""
    return f"{listed(seen.bad_buffers)} became non-finite in this step and stay so"


def _dead_modules(seen: Evidence) -> list[str]:
    if seen.fp32 is None:
        return []
    return [
        name
        for name, share in seen.low.zero_shares.items()
        if share > _DEAD and seen.fp32.zero_shares.get(name, 0.0) < _ALIVE
    ]


def _dead(seen: Evidence) -> str:
    names = _dead_modules(seen)
    if not names:
        return ""
    return f"all gradients of {listed(names)} are exactly zero, and in FP32 they are not"


def _silenced(seen: Evidence) -> str:
    """Return which module returns nothing but zeros where FP32's does not."""
    if seen.fp32 is None:
        return ""
    theirs = seen.fp32.outputs
    for name, output in seen.low.outputs.items():
        if output.zero_share == 1.0 and name in theirs and theirs[name].zero_share < _ALIVE:
            return (
                f"the output of `{name}` is all zeros, and reaches {number(theirs[name].largest)} "
                "in FP32"
            )
    return ""


def _result(
    trouble: Trouble, seen: Evidence, event: OpEvent | None, cause: Cause, sentence: str
) -> dict[str, Any]:
    others = [e for e in seen.low.events if e is not event and e.kind == OVERFLOWED]
    findings: list[str] = [_happened(seen, e) for e in _one_per_module(others, event)]
    findings = [f"then {text}" for text in findings][: _MAX_FINDINGS - 2]
    if seen.low.first_nan is not None and seen.low.first_nan != event:
        findings.append(f"{place(seen.low.first_nan)} is the first to hold NaN")
    if not seen.reproduced:
        findings.append("the replay did not give the losses of the run again")
    entry = triage_entry(trouble, seen.step, cause, sentence, findings)
    if event is not None:
        kind = "output of" if event.direction == "forward" else "gradient of"
        entry |= {
            "module": event.module,
            "op": event.op,
            "direction": event.direction,
            "kind": kind,
            "format": event.format,
            "value": event.value,
            "limit": event.limit,
            "fp32_max": event.fp32_max,
        }
    return entry


def _one_per_module(events: Iterable[OpEvent], first: OpEvent | None) -> list[OpEvent]:
    seen = {None if first is None else (first.module, first.direction)}
    kept = []
    for event in events:
        if (event.module, event.direction) not in seen:
            seen.add((event.module, event.direction))
            kept.append(event)
    return kept


def _finite(result: Pass) -> bool:
    return math.isfinite(result.loss) and result.gradient_finite


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
