"""What ran where: each op family's format under each policy, as one traced step showed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.report.evidence import Evidence
from harness.report.stored_probes import (
    as_count,
    first_result,
    mapping,
    module_label,
    table_rows,
)
from harness.report.text import percent_text
from harness.runs.record import RunRecord
from harness.runs.record_files import stored_number

# What is not fewer bits than FP32; TF32 is FP32 in storage, but not in a product.
_FULL = ("fp32", "fp64", "complex64", "complex128")
_MOST_PLACES = 6
_DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class FormatCount:
    """Calls of one op family in one format; `low` marks fewer bits than FP32's."""

    format: str
    calls: int
    low: bool


@dataclass(frozen=True, kw_only=True)
class FamilyRow:
    """One op family in one or both directions.

    Attributes:
        family: Name of the family.
        direction: `forward`, `backward`, or `both` where every policy treats them alike.
        cells: Policy -> formats it ran in, most calls first.
    """

    family: str
    direction: str
    cells: dict[str, tuple[FormatCount, ...]]


@dataclass(frozen=True, kw_only=True)
class PolicyAudit:
    """What one policy's traced step showed besides the families.

    Attributes:
        low_precision_share: Share of the products' FLOPs in fewer bits than FP32, as text.
        casts: Casts inserted, as text.
        products_in_fp32: Modules whose products ran in FP32, most FLOPs first.
        nonfinite: Ops that gave a non-finite output from finite inputs, as one sentence; empty if
            there are none.
    """

    policy: str
    low_precision_share: str
    casts: str
    products_in_fp32: tuple[str, ...] = ()
    nonfinite: str = ""


@dataclass(frozen=True, kw_only=True)
class WhatRan:
    """The audit of all policies; `policies` in grid order, only those that were audited."""

    policies: tuple[str, ...] = ()
    rows: tuple[FamilyRow, ...] = ()
    audits: tuple[PolicyAudit, ...] = ()
    forward_only: bool = False


_Table = dict[tuple[str, str], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class _Traced:
    """One policy's calls by (family, direction) and format, and FLOPs by family."""

    calls: _Table
    flops: dict[str, float] = field(default_factory=dict)


def what_ran(evidence: Evidence) -> WhatRan:
    """Return the matrix of op families and formats; empty when no run was audited.

    Records without the per-module trace still hold the forward pass by op.
    """
    traced: dict[str, _Traced] = {}
    audits = []
    for policy, runs in evidence.runs.items():
        if audit := first_result(runs, "audit"):
            traced[policy] = _traced(audit)
            audits.append(_policy_audit(policy, audit, evidence))
    forward_only = not traced
    if forward_only:
        traced = {p: t for p, runs in evidence.runs.items() if (t := _forward_pass(runs))}
    return WhatRan(
        policies=tuple(traced),
        rows=_family_rows(traced),
        audits=tuple(audits),
        forward_only=forward_only,
    )


def _traced(audit: Mapping[str, Any]) -> _Traced:
    calls: _Table = {}
    flops: dict[str, float] = {}
    for row in table_rows(audit.get("rows")):
        family = str(row.get("family") or row.get("op"))
        counts = calls.setdefault((family, str(row.get("direction"))), {})
        name = str(row.get("format"))
        counts[name] = counts.get(name, 0.0) + as_count(row.get("calls"))
        flops[family] = flops.get(family, 0.0) + as_count(row.get("flops"))
    return _Traced(calls=calls, flops=flops)


def _forward_pass(runs: Sequence[RunRecord]) -> _Traced | None:
    for record in runs:
        if record.audit:
            calls: _Table = {
                (op, "forward"): {name: float(n) for name, n in formats.items()}
                for op, formats in record.audit.items()
            }
            return _Traced(calls=calls)
    return None


def _family_rows(traced: Mapping[str, _Traced]) -> tuple[FamilyRow, ...]:
    weight: dict[str, float] = {}
    for found in traced.values():
        for (family, _), formats in found.calls.items():
            # Families that compute most come first; those without FLOPs by their calls.
            amount = found.flops.get(family, 0.0) * 1e6 + sum(formats.values())
            weight[family] = max(weight.get(family, 0.0), amount)
    rows: list[FamilyRow] = []
    for family in sorted(weight, key=lambda name: (-weight[name], name)):
        both = {d: _cells(traced, family, (d,)) for d in _DIRECTIONS}
        present = [d for d in _DIRECTIONS if any(both[d].values())]
        if len(present) == 2 and _formats(both["forward"]) == _formats(both["backward"]):
            cells = _cells(traced, family, _DIRECTIONS)
            rows.append(FamilyRow(family=family, direction="both", cells=cells))
        else:
            rows += [FamilyRow(family=family, direction=d, cells=both[d]) for d in present]
    return tuple(rows)


def _cells(
    traced: Mapping[str, _Traced], family: str, directions: Sequence[str]
) -> dict[str, tuple[FormatCount, ...]]:
    cells = {}
    for policy, found in traced.items():
        counts: dict[str, float] = {}
        for direction in directions:
            for name, calls in found.calls.get((family, direction), {}).items():
                counts[name] = counts.get(name, 0.0) + calls
        cells[policy] = tuple(
            FormatCount(format=name, calls=int(calls), low=is_low(name))
            for name, calls in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        )
    return cells


def _formats(cells: Mapping[str, Sequence[FormatCount]]) -> dict[str, list[str]]:
    return {policy: sorted(c.format for c in found) for policy, found in cells.items()}


def is_low(format_name: object) -> bool:
    """Return whether a floating-point format has fewer significant bits than FP32."""
    name = str(format_name)
    return name not in _FULL and not name.startswith(("int", "bool", "mixed"))


def _policy_audit(policy: str, audit: Mapping[str, Any], evidence: Evidence) -> PolicyAudit:
    casts = table_rows(audit.get("casts"))
    calls = sum(as_count(row.get("calls")) for row in casts)
    elements = sum(as_count(row.get("elements")) for row in casts)
    low = stored_number(audit.get("low_precision_flop_share"))
    return PolicyAudit(
        policy=policy,
        low_precision_share=percent_text(low),
        casts=f"{int(calls):,} ({int(elements):,} elements)" if calls else "none",
        # Where nothing ran in low precision every product did, and a list would say nothing.
        products_in_fp32=_products_in_fp32(audit) if low else (),
        nonfinite=_nonfinite(audit, scaled=_is_scaled(policy, evidence)),
    )


def _is_scaled(policy: str, evidence: Evidence) -> bool:
    content = next((r.policy_content for r in evidence.runs[policy]), {})
    return bool(mapping(content.get("loss_scale")).get("kind", "none") != "none")


def _products_in_fp32(audit: Mapping[str, Any]) -> tuple[str, ...]:
    flops: dict[str, float] = {}
    for row in table_rows(audit.get("rows")):
        amount = as_count(row.get("flops"))
        if amount > 0 and not is_low(row.get("format")):
            module = module_label(row.get("module"))
            flops[module] = flops.get(module, 0.0) + amount
    return tuple(sorted(flops, key=lambda name: -flops[name]))


def _nonfinite(audit: Mapping[str, Any], *, scaled: bool) -> str:
    rows = table_rows(audit.get("nonfinite"))
    places = [
        f"{row.get('op')} in `{module_label(row.get('module'))}` ({row.get('direction')}, "
        f"{row.get('format')})"
        for row in rows
    ]
    places = list(dict.fromkeys(places))
    if not places:
        return ""
    more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
    text = f"a non-finite output from finite inputs in {', '.join(places[:_MOST_PLACES])}{more}."
    if scaled and all(row.get("direction") == "backward" for row in rows):
        # The traced step is the first, at which a dynamic scale has not yet found its place.
        text += " The loss scale was too large in that step; a loss scaler skips such a step."
    return text
