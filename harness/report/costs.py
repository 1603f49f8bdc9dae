"""What each policy cost, as a table, and what that table does not mean."""

from __future__ import annotations

from harness.report.evidence import Evidence, typical
from harness.report.phrases import emulation_sentence
from harness.report.text import NOT_AVAILABLE, bytes_text, ratio_text, significant


def cost_rows(evidence: Evidence) -> tuple[dict[str, str], ...]:
    """Return what each policy cost, as measured during training: reference first.

    A quantity that no candidate has is left out.
    """
    ratios = {v.policy: v for v in evidence.findings.verdicts}
    reference = evidence.findings.reference_policy
    rows: list[dict[str, str]] = []
    for policy, runs in evidence.runs.items():
        times = [t for r in runs if (t := typical(r, "step_time_s")) is not None and t > 0]
        time = min(times) if times else None
        peaks = [r.peak_memory_bytes for r in runs if r.peak_memory_bytes is not None]
        verdict = ratios.get(policy)
        time_ratio = memory_ratio = "1.00x"
        if verdict is not None:
            time_ratio = ratio_text(verdict.step_time_ratio, interval=True)
            memory_ratio = ratio_text(verdict.peak_memory_ratio)
        rows.append(
            {
                "policy": policy,
                "step time": NOT_AVAILABLE if time is None else f"{significant(1e3 * time, 3)} ms",
                "samples/s": _rate(runs[0].samples_per_step if runs else None, time),
                "tokens/s": _rate(runs[0].tokens_per_step if runs else None, time),
                "peak memory": bytes_text(max(peaks)) if peaks else NOT_AVAILABLE,
                f"step time / {reference}": time_ratio,
                f"memory / {reference}": memory_ratio,
            }
        )
    compared = [row for row in rows if row["policy"] != reference] or rows
    empty = {key for key in rows[0] if all(row[key] == NOT_AVAILABLE for row in compared)}
    return tuple({k: text for k, text in row.items() if k not in empty} for row in rows)


def cost_notes(evidence: Evidence) -> tuple[str, ...]:
    """Return what the cost table does and does not mean."""
    records = [r for runs in evidence.runs.values() for r in runs]
    sources = dict.fromkeys(r.peak_memory_source for r in records)
    notes = [
        "Step time here is the median of the fastest seed as it trained, beside whatever else ran "
        "on the machine; only the ratios come from a measurement of their own.",
        *(_memory_note(source) for source in sources),
    ]
    timed = [v.speed_note.rstrip(".") for v in evidence.findings.verdicts if v.step_time_ratio]
    notes[1:1] = [f"The ratios were measured in {note}." for note in dict.fromkeys(timed)]
    if any(v.step_time_ratio and v.step_time_ratio.ci_low for v in evidence.findings.verdicts):
        notes.append(
            "The 95 % intervals of the ratios are a bootstrap over blocks of steps: single steps "
            "follow each other and are no replicates."
        )
    details = {r.policy: r.execution_detail for r in records if r.execution == "emulated"}
    notes += [
        f"{policy} is emulated: {emulation_sentence(detail)}." for policy, detail in details.items()
    ]
    return tuple(notes)


def _memory_note(source: str) -> str:
    """Return a record's `what: how` of its peak memory as a sentence."""
    what, _, how = source.rstrip(".").partition(": ")
    if what == "not measured":
        return f"Peak memory was not measured{f', because {how}' if how else ''}."
    return f"Peak memory is the {how}; it counts the {what}." if how else f"Peak memory: {what}."


def _rate(per_step: float | None, step_time_s: float | None) -> str:
    if per_step is None or step_time_s is None:
        return NOT_AVAILABLE
    return significant(per_step / step_time_s, 3)
