"""Local rounding error against sampling noise: the same-point probe in words, and by module."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.analysis.findings import ModelFindings, Verdict
from harness.analysis.probe_findings import ModuleFinding, ProbeFindings
from harness.analysis.wording import percent
from harness.report.evidence import Evidence
from harness.report.text import (
    NOT_AVAILABLE,
    candidates,
    outcome_label,
    percent_text,
    safe_name,
    significant,
)

SHOWN = 15
# Beyond these a page of many candidates would grow to megabytes; `decision.json` has every module.
MOST_ROWS = 300
# Constant of the rule and code of the threshold, for each column of the probe table.
_COLUMNS = {
    "noise ratio": ("probe_noise_ratio", "PROBE_ROUNDING_NOISE", "at most"),
    "bias": ("probe_rounding_bias", "PROBE_ROUNDING_BIAS", "at most"),
    "descent": ("probe_descent", "PROBE_DESCENT_LOSS", "within 1 \N{PLUS-MINUS SIGN}"),
    "retention": ("probe_retention", "PROBE_STAGNATION", "at least"),
}


@dataclass(frozen=True, kw_only=True)
class ProbeCell:
    """One number of the probe table and whether it exceeds its threshold."""

    text: str
    fails: bool


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """The same-point probe of one candidate.

    Attributes:
        cells: One for each of the table's columns.
        sentence: What the numbers mean, for a reader who has never met them.
        notes: What limits the measurement.
    """

    policy: str
    passes: bool
    cells: tuple[ProbeCell, ...]
    sentence: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ModuleTable:
    """What the probes say about one candidate by module, the most suspicious first.

    Attributes:
        columns: Headings of the numbers; quantities that no module has are left out.
        rows: (module, kind, suspicious, guilty, numbers), one per module: all of them where
            something is amiss, else the first few, so that the page stays small.
        num_modules: How many modules there are.
        headline: The guilty module in one sentence, or that none stands out.
        guilty: Whether a module is named.
    """

    policy: str
    label: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, str, bool, bool, tuple[str, ...]], ...]
    num_modules: int
    headline: str
    guilty: bool


def probe_columns(findings: ModelFindings) -> tuple[tuple[str, str], ...]:
    """Return (heading, threshold in words) for the columns of the probe table."""
    return tuple(
        (name, f"{words} {limit:g}" if words[-1].isalpha() else f"{words}{limit:g}")
        if isinstance(limit := findings.rule.get(constant), (int, float))
        else (name, "")
        for name, (constant, _, words) in _COLUMNS.items()
    )


def probe_rows(evidence: Evidence) -> tuple[ProbeRow, ...]:
    """Return one row for each candidate that was probed at the same weights, in grid order."""
    return tuple(
        _probe_row(verdict, verdict.probe, _batch_size(evidence, verdict.policy))
        for verdict in candidates(evidence.findings)
        if verdict.probe is not None
    )


def unprobed(findings: ModelFindings) -> tuple[str, ...]:
    """Return the candidates without a measurement at the same weights."""
    return tuple(v.policy for v in candidates(findings) if v.probe is None)


def _batch_size(evidence: Evidence, policy: str) -> float | None:
    sizes = [r.samples_per_step for r in evidence.runs.get(policy, ())]
    return next((size for size in sizes if size is not None), None)


def _probe_row(verdict: Verdict, probe: ProbeFindings, batch: float | None) -> ProbeRow:
    values = (probe.noise_ratio, probe.rounding_bias, probe.descent, probe.retention)
    cells = tuple(
        ProbeCell(text=_ratio_text(value), fails=code in probe.failing)
        for value, (_, code, _) in zip(values, _COLUMNS.values(), strict=True)
    )
    return ProbeRow(
        policy=verdict.policy,
        passes=probe.passes,
        cells=cells,
        sentence=rounding_sentence(verdict.policy, probe, batch),
        notes=_probe_notes(probe),
    )


def _ratio_text(value: float | None) -> str:
    if value is not None and 0 < abs(value) < 1e-4:
        return f"{value:.1e}"
    return significant(value, 3)


def rounding_sentence(policy: str, probe: ProbeFindings, batch: float | None) -> str:
    """Return the size of the rounding error beside the sampling noise, and what it amounts to.

    Args:
        policy: Name of the candidate.
        probe: Its measurement; a ratio that is missing or not finite gets a sentence of its own.
        batch: Items in a batch; None when unknown, then the comparison with a smaller batch is
            left out.
    """
    nu = probe.noise_ratio
    if nu is None:
        return f"{policy}: the batches' gradients do not differ, so there is no noise to compare."
    if not math.isfinite(nu):
        return f"{policy}: at FP32's own weights its gradients are not finite."
    size = f"{percent(nu)} of" if nu < 1 else f"{nu:.3g} times"
    share = f"{policy}'s rounding error is {size} the sampling noise"
    if batch is None or not batch > 0:
        return f"{share}."
    return f"{share}: like training with batch {_like_batch(batch, nu)} instead of {batch:g}."


def _like_batch(batch: float, nu: float) -> str:
    smaller = batch / (1 + nu)
    if smaller < 1 <= batch:
        return "below 1"
    for digits in range(1, 7):
        text = f"{smaller:.{digits}f}"
        # As many digits as it takes to tell the two batch sizes apart.
        if float(text) < batch:
            return text
    return f"{batch:g}, to six digits,"


def _probe_notes(probe: ProbeFindings) -> tuple[str, ...]:
    notes = []
    if probe.weak_signal:
        notes.append("the mean gradient is hardly resolved from its noise, so descent is not told")
    if not probe.unseen:
        notes.append("on batches that had been trained on")
    if not probe.tests_final_rate:
        notes.append("the planned final learning rate was not tried")
    if probe.same_trajectory is False:
        notes.append("the probe's FP32 run did not repeat the stored one bit for bit")
    return (*notes, *(note.rstrip(".") for note in probe.notes))


def rounding_name(policy: str) -> str:
    """Return the name of the drawing of a policy's rounding errors."""
    return f"rounding-{safe_name(policy)}"


def module_tables(evidence: Evidence) -> tuple[ModuleTable, ...]:
    """Return a table for each candidate with evidence by module; named modules come first."""
    tables = [_module_table(v) for v in candidates(evidence.findings) if v.modules]
    return tuple(sorted(tables, key=lambda table: not table.guilty))


def _module_table(verdict: Verdict) -> ModuleTable:
    amiss = verdict.outcome != "accept" or any(m.suspicion >= 1 for m in verdict.modules)
    modules = verdict.modules[: MOST_ROWS if amiss else SHOWN]
    texts = [_module_numbers(module) for module in modules]
    columns = tuple(
        name for name in texts[0] if any(row[name] not in (NOT_AVAILABLE, "none") for row in texts)
    )
    return ModuleTable(
        policy=verdict.policy,
        label=outcome_label(verdict),
        columns=columns,
        rows=tuple(
            (
                module.module,
                module.kind,
                module.suspicion >= 1,
                module.module == verdict.guilty_module,
                tuple(row[name] for name in columns),
            )
            for module, row in zip(modules, texts, strict=True)
        ),
        num_modules=len(verdict.modules),
        headline=callout(verdict) or _no_module(verdict),
        guilty=verdict.guilty_module is not None,
    )


def callout(verdict: Verdict) -> str:
    """Return where to look first, as a sentence; empty when no module is named."""
    text = (verdict.guilty_sentence or "").strip()
    if not text and verdict.guilty_module is not None:
        text = f"Look at `{verdict.guilty_module}`."
    return text[:1].upper() + text[1:]


def _no_module(verdict: Verdict) -> str:
    suspicious = [m for m in verdict.modules if m.suspicion >= 1]
    if not suspicious:
        return "No module stands out."
    first = suspicious[0]
    return f"Most conspicuous: `{first.module}`, {first.evidence}." if first.evidence else (
        f"Most conspicuous: `{first.module}`."
    )  # fmt: skip


def _module_numbers(module: ModuleFinding) -> dict[str, str]:
    return {
        "forward error": _ratio_text(module.local_forward_error),
        "gradient error": _ratio_text(module.gradient_error),
        "noise ratio": _ratio_text(module.noise_ratio),
        "cosine": significant(module.cosine, 5),
        "flushed": percent_text(module.flushed_share),
        "zero gradients (FP32)": _against(module.zero_grad_share, percent_text),
        "zero outputs (FP32)": _against(module.zero_output_share, percent_text),
        "updates lost": percent_text(module.lost_update_share),
        "update / weight (FP32)": _against(module.update_to_weight, _ratio_text),
        "integers rounded up to": significant(module.integer_input_max),
        "non-finite": "; ".join(module.nonfinite) or "none",
        "formats": ", ".join(f"{name} {percent_text(share)}" for name, share in module.formats)
        or "none",
    }


def _against(pair: tuple[float | None, float | None] | None, text: object) -> str:
    if pair is None or not callable(text) or pair[0] is None:
        return NOT_AVAILABLE
    return f"{text(pair[0])} ({text(pair[1])})"
