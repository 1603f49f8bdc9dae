"""The findings arranged for the eye: the rows and lists that the HTML and the Markdown share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.analysis.findings import Estimate, Reason, Verdict
from harness.report.evidence import Evidence, trouble, typical
from harness.report.text import (
    ENDPOINT_LABELS,
    ENDPOINTS,
    NOT_AVAILABLE,
    bytes_text,
    code_explanations,
    counted,
    difference_text,
    flattened,
    in_margins,
    main_reason,
    margins_text,
    outcome_label,
    percent_text,
    ratio_text,
    signed,
    significant,
    used_codes,
)

_MARGIN_TERMS = {
    "progress": "a share of what the reference learned",
    "loss": "a share of the reference's tail loss",
    "seed_sd": "a share of the reference's spread over seeds",
    "cap": "the cap, a larger share of what the reference learned",
    "user": "set by the user",
}


@dataclass(frozen=True, kw_only=True)
class VerdictView:
    """One policy's row in the verdict table and its details below.

    Attributes:
        policy: Name.
        description: One sentence on the policy.
        label: `accept`, `reject`, `inconclusive` or `control`.
        emulated: Whether this device only emulates the policy.
        differences: Endpoint label -> mean and interval in margins.
        time: Step-time ratio, or `n/a`.
        memory: Peak-memory ratio, or `n/a`.
        reason: The reason that decided; None for a control.
        reasons: All others.
        numbers: For each endpoint its label and (quantity, value) pairs.
        notes: Further sentences: seeds used and dropped, correction, lag, further seeds.
        diagnostics: (name, candidate, reference).
        settle_command: Command that adds the seeds which should settle it.
    """

    policy: str
    description: str
    label: str
    emulated: bool
    differences: dict[str, str]
    time: str
    memory: str
    reason: Reason | None
    reasons: tuple[Reason, ...]
    numbers: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    notes: tuple[str, ...]
    diagnostics: tuple[tuple[str, str, str], ...]
    settle_command: str | None


def verdict_views(evidence: Evidence) -> tuple[VerdictView, ...]:
    """Return one view per verdict: candidates in grid order, then controls."""
    ordered = sorted(evidence.findings.verdicts, key=lambda v: v.is_control)
    return tuple(_verdict_view(verdict) for verdict in ordered)


def _verdict_view(verdict: Verdict) -> VerdictView:
    return VerdictView(
        policy=verdict.policy,
        description=verdict.description,
        label=outcome_label(verdict),
        emulated=verdict.execution == "emulated",
        differences={
            ENDPOINT_LABELS[e]: difference_text(verdict.estimates.get(e)) for e in ENDPOINTS
        },
        time=ratio_text(verdict.step_time_ratio, interval=True),
        memory=ratio_text(verdict.peak_memory_ratio),
        reason=None if verdict.is_control else main_reason(verdict),
        reasons=verdict.reasons if verdict.is_control else verdict.reasons[1:],
        numbers=tuple(
            (ENDPOINT_LABELS[e], tuple(_numbers(estimate, verdict.min_detectable_harm.get(e))))
            for e in ENDPOINTS
            if (estimate := verdict.estimates.get(e)) is not None
        ),
        notes=tuple(_notes(verdict)),
        diagnostics=tuple(
            (name.replace("_", " "), _diagnostic(name, ours), _diagnostic(name, theirs))
            for name, (ours, theirs) in verdict.diagnostics.items()
        ),
        settle_command=None if verdict.is_control else verdict.settle_command,
    )


def _numbers(estimate: Estimate, detectable: float | None) -> list[tuple[str, str]]:
    unit, margin = estimate.unit, estimate.margin

    def amount(value: float | None) -> str:
        if value is None:
            return NOT_AVAILABLE
        return f"{signed(value)} {unit} ({margins_text(in_margins(value, margin))} margins)"

    share = in_margins(estimate.mean_difference, estimate.progress)
    term = _MARGIN_TERMS.get(estimate.margin_term, estimate.margin_term)
    numbers = [
        ("mean difference", amount(estimate.mean_difference)),
        ("of what the reference learned", percent_text(share)),
        ("interval", _interval(estimate)),
        ("each seed", ", ".join(signed(d) for d in estimate.differences) or NOT_AVAILABLE),
        ("standard deviation", f"{significant(estimate.sd, 3)} {unit}"),
        ("margin", f"{significant(margin, 3)} {unit}: {term}"),
        ("reference's tail loss", f"{significant(estimate.reference_loss)} {unit}"),
        ("reference learned", f"{significant(estimate.progress)} {unit}"),
        ("p (accept)", significant(estimate.p_accept, 2)),
        ("p (reject)", significant(estimate.p_reject, 2)),
    ]
    if detectable is not None:
        numbers.append(("smallest harm detectable with 80 % power", amount(detectable)))
    return numbers


def _interval(estimate: Estimate) -> str:
    if estimate.ci_low is None or estimate.ci_high is None:
        return NOT_AVAILABLE
    low, high = 100 * (1 - estimate.alpha_reject), 100 * (1 - estimate.alpha_accept)
    return (
        f"{signed(estimate.ci_low)} to {signed(estimate.ci_high)} {estimate.unit} "
        f"(ends at one-sided {low:.4g} % and {high:.4g} %)"
    )


def _notes(verdict: Verdict) -> list[str]:
    used = counted(len(verdict.seeds_used), "pair")
    notes = [f"Compared in {used} (seeds {', '.join(map(str, verdict.seeds_used)) or 'none'})."]
    if verdict.seeds_dropped:
        notes.append(f"Seeds dropped: {', '.join(map(str, verdict.seeds_dropped))}.")
    if verdict.is_control:
        return notes
    if verdict.p_accept_holm is not None:
        notes.append(
            f"p (accept) over both endpoints {significant(verdict.p_accept, 2)}; "
            f"{significant(verdict.p_accept_holm, 2)} after Holm's correction for all candidates."
        )
    if verdict.lag_steps is not None:
        lag = signed(verdict.lag_steps, 2)
        notes.append(f"As a delay of training: {lag} steps (display only).")
    if verdict.outcome == "inconclusive":
        notes.append(_settling(verdict))
    if verdict.step_time_ratio is None:
        notes.append(f"Step time: {verdict.speed_note.rstrip('.')}.")
    return notes


def _settling(verdict: Verdict) -> str:
    lean = f"The means lean towards {verdict.lean}."
    if verdict.lean == "unclear":
        lean = "The means lean to neither side."
    if verdict.extra_seeds is not None:
        return f"{lean} {counted(verdict.extra_seeds, 'further seed')} should settle it."
    if verdict.extra_seeds_reason == "UNRESOLVABLE_AT_NMAX":
        return f"{lean} No number of seeds up to the limit would settle it."
    return lean


def _diagnostic(name: str, value: float | None) -> str:
    return percent_text(value) if "share" in name else significant(value)


def cost_rows(evidence: Evidence) -> tuple[dict[str, str], ...]:
    """Return what each policy cost, as measured during training: reference first."""
    ratios = {v.policy: v for v in evidence.findings.verdicts}
    rows = []
    for policy, runs in evidence.runs.items():
        times = [t for r in runs if (t := typical(r, "step_time_s")) is not None and t > 0]
        time = min(times) if times else None
        peaks = [r.peak_memory_bytes for r in runs if r.peak_memory_bytes is not None]
        verdict = ratios.get(policy)
        time_ratio = memory_ratio = "1"
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
                "time ratio": time_ratio,
                "memory ratio": memory_ratio,
            }
        )
    return tuple(rows)


def cost_notes(evidence: Evidence) -> tuple[str, ...]:
    """Return what the cost table does and does not mean."""
    records = [r for runs in evidence.runs.values() for r in runs]
    sources = dict.fromkeys(r.peak_memory_source for r in records)
    notes = [
        "Step time here is the median of the fastest seed as it trained, beside whatever else ran "
        "on the machine; only the ratios come from a measurement of their own.",
        *(f"Peak memory counts: {source}." for source in sources),
    ]
    details = {r.policy: r.execution_detail for r in records if r.execution == "emulated"}
    notes += [f"{policy} is emulated: {detail.rstrip('.')}." for policy, detail in details.items()]
    return tuple(notes)


def _rate(per_step: float | None, step_time_s: float | None) -> str:
    if per_step is None or step_time_s is None:
        return NOT_AVAILABLE
    return significant(per_step / step_time_s, 3)


def context(evidence: Evidence) -> dict[str, Any]:
    """Return everything that both templates use."""
    findings = evidence.findings
    codes = code_explanations(used_codes(findings))
    return {
        "findings": findings,
        "verdicts": verdict_views(evidence),
        "endpoints": [ENDPOINT_LABELS[e] for e in ENDPOINTS],
        "trouble": trouble(evidence),
        "costs": cost_rows(evidence),
        "cost_notes": cost_notes(evidence),
        "codes": codes,
        "environment": list(flattened(findings.environment)),
        "settings": _settings(evidence),
        "rule": list(flattened(findings.rule)),
        "hashes": _hashes(evidence),
        "num_emulated": sum(v.execution == "emulated" for v in findings.verdicts),
    }


def _settings(evidence: Evidence) -> list[tuple[str, str]]:
    """Return the settings all runs share; what differs between them (the seed) is left out."""
    records = [r for runs in evidence.runs.values() for r in runs]
    tables: list[Mapping[str, str]] = [dict(flattened(r.settings)) for r in records]
    if not tables:
        return []
    first = tables[0]
    return [(k, v) for k, v in first.items() if all(t.get(k) == v for t in tables)]


def _hashes(evidence: Evidence) -> list[tuple[str, str, str]]:
    """Return (seed, hash of initial weights, of held-out data) of the reference's runs."""
    runs = evidence.runs[evidence.findings.reference_policy]
    return [
        (
            str(record.seed),
            record.fingerprints.init_sha256,
            record.fingerprints.held_out_sha256 or NOT_AVAILABLE,
        )
        for record in runs
    ]
