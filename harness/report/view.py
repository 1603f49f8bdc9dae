"""The findings arranged for the eye: the rows and lists that the HTML and the Markdown share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.analysis.findings import Estimate, ModelFindings, Reason, Verdict
from harness.analysis.wording import counted, margin_basis
from harness.report.costs import cost_notes, cost_rows
from harness.report.evidence import Evidence, trouble
from harness.report.evidence_view import evidence_context
from harness.report.phrases import (
    diagnostic_label,
    emulated_policies,
    margin_lines,
    own_margin_hint,
)
from harness.report.plan_view import (
    claim_rows,
    holm_line,
    look_rows,
    plan_line,
    savings_line,
    settle_lists,
)
from harness.report.rounding_error import callout
from harness.report.text import (
    ENDPOINT_LABELS,
    ENDPOINTS,
    NOT_AVAILABLE,
    code_explanations,
    difference_text,
    endpoints_in_words,
    flattened,
    in_margins,
    main_reason,
    margins_text,
    outcome_label,
    percent_text,
    ratio_text,
    shown_endpoints,
    signed,
    significant,
    used_codes,
)


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
        callout: The guilty module and why, in one sentence; empty where none is named.
        module: The guilty module's name; None likewise.
        fallback_of: The failed policy that it was tried for automatically; None for the others.
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
    callout: str
    module: str | None
    fallback_of: str | None


def verdict_views(evidence: Evidence) -> tuple[VerdictView, ...]:
    """Return one view per verdict: candidates in grid order, then controls."""
    ordered = sorted(evidence.findings.verdicts, key=lambda v: v.is_control)
    return tuple(_verdict_view(verdict, evidence.findings) for verdict in ordered)


def _verdict_view(verdict: Verdict, findings: ModelFindings) -> VerdictView:
    param_format = str(verdict.policy_content.get("param_format", "fp32"))
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
            (
                ENDPOINT_LABELS[e],
                tuple(_numbers(estimate, verdict.min_detectable_harm.get(e), findings)),
            )
            for e in ENDPOINTS
            if (estimate := verdict.estimates.get(e)) is not None
        ),
        notes=tuple(_notes(verdict)),
        diagnostics=tuple(
            (
                diagnostic_label(name, param_format=param_format),
                _diagnostic(name, ours),
                _diagnostic(name, theirs),
            )
            for name, (ours, theirs) in verdict.diagnostics.items()
        ),
        settle_command=None if verdict.is_control else verdict.settle_command,
        callout="" if verdict.is_control else callout(verdict),
        module=None if verdict.is_control else verdict.guilty_module,
        fallback_of=verdict.fallback_of,
    )


def _numbers(
    estimate: Estimate, detectable: float | None, findings: ModelFindings
) -> list[tuple[str, str]]:
    unit, margin = estimate.unit, estimate.margin

    def amount(value: float | None) -> str:
        if value is None:
            return NOT_AVAILABLE
        return f"{signed(value)} {unit} ({margins_text(in_margins(value, margin))} margins)"

    share = in_margins(estimate.mean_difference, estimate.progress)
    basis = margin_basis(estimate, findings.rule)
    numbers = [
        ("mean difference", amount(estimate.mean_difference)),
        ("of what the reference learned", percent_text(share)),
        ("interval", _interval(estimate)),
        ("how sure each end is", _certainty(estimate)),
        ("each seed", ", ".join(signed(d) for d in estimate.differences) or NOT_AVAILABLE),
        ("standard deviation", f"{significant(estimate.sd, 3)} {unit}"),
        ("margin", f"{significant(margin, 3)} {unit}: {basis}"),
        ("reference's tail loss", f"{significant(estimate.reference_loss)} {unit}"),
        ("reference learned", f"{significant(estimate.progress)} {unit}"),
        ("p-value of the acceptance test", significant(estimate.p_accept, 2)),
        ("p-value of the rejection test", significant(estimate.p_reject, 2)),
    ]
    if detectable is not None:
        numbers.append(("smallest harm detectable with 80 % power", amount(detectable)))
    return numbers


def _interval(estimate: Estimate) -> str:
    if estimate.ci_low is None or estimate.ci_high is None:
        return NOT_AVAILABLE
    return f"{signed(estimate.ci_low)} to {signed(estimate.ci_high)} {estimate.unit}"


def _certainty(estimate: Estimate) -> str:
    if estimate.ci_low is None or estimate.ci_high is None:
        return NOT_AVAILABLE
    low, high = 100 * estimate.alpha_reject, 100 * estimate.alpha_accept
    return (
        f"the true difference is below the lower end in at most {low:.3g} %, above the upper end "
        f"in at most {high:.3g} % of such experiments"
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
            f"p-value of the acceptance test over {endpoints_in_words(verdict)}: "
            f"{significant(verdict.p_accept, 2)}; {significant(verdict.p_accept_holm, 2)} after "
            "Holm's correction for all candidates."
        )
    if verdict.lag_steps is not None:
        lag = signed(verdict.lag_steps, 2)
        notes.append(f"As a delay of training: {lag} steps (display only).")
    if verdict.outcome == "inconclusive":
        notes.append(_settling(verdict))
    if verdict.step_time_ratio is None:
        notes.append(_no_step_time(verdict))
    return notes


def _no_step_time(verdict: Verdict) -> str:
    if verdict.execution == "emulated":
        return "It was emulated on this device, so there is no step time."
    note = verdict.speed_note.rstrip(".")
    return f"Step time was {note}." if note.startswith("not ") else f"Step time: {note}."


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


def context(evidence: Evidence) -> dict[str, Any]:
    """Return everything that both templates use."""
    findings = evidence.findings
    codes = code_explanations(used_codes(findings))
    verdicts = verdict_views(evidence)
    return {
        "findings": findings,
        "verdicts": verdicts,
        "endpoints": [ENDPOINT_LABELS[e] for e in shown_endpoints(findings)],
        "has_time": any(v.time != NOT_AVAILABLE for v in verdicts),
        "has_memory": any(v.memory != NOT_AVAILABLE for v in verdicts),
        "margins": margin_lines(findings),
        "own_margin": own_margin_hint(findings),
        "emulated": emulated_policies(findings),
        "plan": plan_line(findings),
        "savings": savings_line(findings),
        "looks": look_rows(findings),
        "claims": claim_rows(findings),
        "holm": holm_line(findings),
        "settle": settle_lists(findings),
        "trouble": trouble(evidence),
        "costs": cost_rows(evidence),
        "cost_notes": cost_notes(evidence),
        "codes": codes,
        "environment": list(flattened(findings.environment)),
        "settings": _settings(evidence),
        "rule": list(flattened(findings.rule)),
        "hashes": _hashes(evidence),
        **evidence_context(evidence),
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
