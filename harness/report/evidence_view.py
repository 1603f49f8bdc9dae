"""The evidence behind the verdicts, in the order a sceptic asks for it, as plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from harness.report.evidence import Evidence
from harness.report.exponent_ranges import KINDS, RangeLoss, histograms, range_losses
from harness.report.pair_proof import COLUMNS, pair_rows
from harness.report.resources import memory_sentences, profile_sentences
from harness.report.rounding_error import (
    MOST_ROWS,
    SHOWN,
    callout,
    module_tables,
    probe_columns,
    probe_rows,
    rounding_name,
    unprobed,
)
from harness.report.stored_probes import mapping
from harness.report.tensor_norms import ModuleNorms, module_norms
from harness.report.text import candidates, outcome_label, percent_text, significant
from harness.report.trouble_causes import causes
from harness.report.update_losses import LostUpdates, PolicyUpdates, lost_updates
from harness.report.what_ran import what_ran
from harness.runs.record import RunRecord

# Of each module five kinds of tensors: the worst rows say what there is to say.
_MOST_RANGES = 150
_MOST_SKIPPED = 6
# Probes whose absence leaves a question of the section without an answer.
_PROBES = {
    "audit": "the formats of its ops",
    "exponents": "the range of its numbers",
    "norms": "the size of its tensors",
    "lost_updates": "its weight updates",
}


@dataclass(frozen=True, kw_only=True)
class Callout:
    """Where to look first for one candidate."""

    policy: str
    label: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A table of modules of which the first rows are always shown and the rest on request.

    Attributes:
        num_modules: How many rows there are; the last of very many are left out.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    num_modules: int

    @property
    def left_out(self) -> int:
        """How many rows the table does not hold."""
        return self.num_modules - len(self.rows)

    @property
    def first(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The rows that are always shown."""
        return self.rows[:SHOWN]

    @property
    def rest(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """All others."""
        return self.rows[SHOWN:]


def callouts(evidence: Evidence) -> tuple[Callout, ...]:
    """Return the candidates of which the evidence names a module, in grid order."""
    return tuple(
        Callout(policy=v.policy, label=outcome_label(v), sentence=callout(v))
        for v in candidates(evidence.findings)
        if callout(v)
    )


def evidence_context(evidence: Evidence) -> dict[str, Any]:
    """Return everything that the evidence section of both templates uses."""
    findings = evidence.findings
    tables = module_tables(evidence)
    return {
        "callouts": callouts(evidence),
        "pair_columns": COLUMNS,
        "pair_rows": pair_rows(evidence),
        "what_ran": what_ran(evidence),
        "probe_columns": probe_columns(findings),
        "probe_rows": probe_rows(evidence),
        "unprobed": unprobed(findings),
        "module_tables": tables,
        "rounding_names": {table.policy: rounding_name(table.policy) for table in tables},
        "shown_rows": SHOWN,
        "range_listing": _range_listing(evidence),
        "norm_listing": _norm_listing(evidence),
        "norms_beyond": tuple(row.module for row in _norms(evidence) if row.beyond_fp16),
        "update_listings": tuple(map(_update_listing, lost_updates(evidence))),
        "windows": tuple(
            (v.policy, v.loss_scale_window.sentence)
            for v in candidates(findings)
            if v.loss_scale_window is not None
        ),
        "causes": causes(evidence),
        "unmeasured": unmeasured(evidence),
        "memory_sentences": memory_sentences(evidence),
        "profile_sentences": profile_sentences(findings),
    }


def unmeasured(evidence: Evidence) -> tuple[str, ...]:
    """Return sentences on the evidence that this report lacks because a probe was off or failed."""
    lines = []
    if missing := unprobed(evidence.findings):
        lines.append(
            f"Arithmetic at the same weights: not measured for {', '.join(missing)}; harm that a "
            "short run's loss does not show is not excluded there."
        )
    runs = [record for found in evidence.runs.values() for record in found]
    absent = [what for probe, what in _PROBES.items() if not any(r.probes.get(probe) for r in runs)]
    if runs and absent:
        lines.append(f"By module: no run looked at {', '.join(absent)}.")
    if skipped := _not_applicable(runs):
        shown = "; ".join(skipped[:_MOST_SKIPPED])
        more = len(skipped) - _MOST_SKIPPED
        lines.append(f"Could not be looked at: {shown}{f'; and {more} more' * (more > 0)}.")
    return tuple(lines)


def _not_applicable(runs: Iterable[RunRecord]) -> list[str]:
    """Return the tensors that step probes could not look at, each once, with the reason."""
    found: dict[str, None] = {}
    for record in runs:
        for result in record.probes.values():
            reasons = mapping(result).get("not_applicable")
            if isinstance(reasons, list):
                found.update(dict.fromkeys(map(str, reasons)))
    return list(found)


def _range_listing(evidence: Evidence) -> Listing | None:
    reference = evidence.findings.reference_policy
    rows = range_losses(histograms(evidence.runs[reference]))
    if not rows:
        return None
    return Listing(
        title=f"What formats would lose of {reference}'s tensors without scaling",
        columns=(
            "tensor",
            "98 % lie between",
            "FP16 flushes",
            "FP16 overflows",
            "E4M3 flushes",
            "E4M3 overflows",
            "E5M2 flushes",
        ),
        rows=tuple((row.module, _range_cells(row)) for row in rows[:_MOST_RANGES]),
        num_modules=len(rows),
    )


def _range_cells(row: RangeLoss) -> tuple[str, ...]:
    between = f"2^{row.low} and 2^{row.high}"
    return (
        KINDS[row.kind],
        f"{between}; {row.nonfinite} not finite" if row.nonfinite else between,
        percent_text(row.flushed["fp16"]),
        percent_text(row.overflow["fp16"]),
        percent_text(row.flushed["fp8_e4m3"]),
        percent_text(row.overflow["fp8_e4m3"]),
        percent_text(row.flushed["fp8_e5m2"]),
    )


def _norms(evidence: Evidence) -> tuple[ModuleNorms, ...]:
    return module_norms(evidence.runs[evidence.findings.reference_policy])


def _norm_listing(evidence: Evidence) -> Listing | None:
    rows = _norms(evidence)
    if not rows:
        return None
    return Listing(
        title=f"How large {evidence.findings.reference_policy}'s tensors are",
        columns=(
            "weight RMS",
            "gradient RMS",
            "update / weight",
            "largest input",
            "largest output",
            "largest attention logit",
        ),
        rows=tuple(
            (row.module, tuple(significant(v, 3) for v in row.values.values()))
            for row in rows[:MOST_ROWS]
        ),
        num_modules=len(rows),
    )


def _update_listing(updates: PolicyUpdates) -> Listing:
    title = (
        f"{updates.policy}: updates lost in its own 16-bit weights"
        if updates.observed
        else f"{updates.policy}: updates that 16-bit weights would lose"
    )
    return Listing(
        title=title,
        columns=(
            "BF16 loses",
            "FP16 loses",
            "kept by BF16, nearest",
            "kept by BF16, stochastic",
        ),
        rows=tuple((row.module, _update_cells(row)) for row in updates.modules[:MOST_ROWS]),
        num_modules=len(updates.modules),
    )


def _update_cells(row: LostUpdates) -> tuple[str, ...]:
    return (
        percent_text(row.lost.get("bf16")),
        percent_text(row.lost.get("fp16")),
        percent_text(row.retained_nearest_bf16),
        percent_text(row.retained_stochastic_bf16),
    )
