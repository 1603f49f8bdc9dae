"""Weight updates that 16-bit weights lose, by module, pooled over seeds and sampled steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.evidence import Evidence
from harness.report.stored_probes import (
    as_count,
    mapping,
    mean,
    module_label,
    numbers,
    probe_results,
)
from harness.runs.record import RunRecord


@dataclass(frozen=True, kw_only=True)
class LostUpdates:
    """One module under one policy.

    Attributes:
        updates: Non-zero updates seen.
        lost: Format of the weights (`bf16`, `fp16`) -> share of those updates that rounding undoes.
        retained_nearest_bf16: Share of the updates' sum that BF16 weights keep when they round to
            nearest, mean over the samples; `retained_stochastic_bf16` with stochastic rounding.
    """

    module: str
    updates: float
    lost: dict[str, float]
    retained_nearest_bf16: float | None
    retained_stochastic_bf16: float | None

    @property
    def worst(self) -> float:
        """The largest share over the formats."""
        return max(self.lost.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class PolicyUpdates:
    """Lost updates of one policy by module, worst first.

    Attributes:
        observed: Whether the policy's weights really are in 16 bits; else it is worked out for
            such weights.
    """

    policy: str
    observed: bool
    modules: tuple[LostUpdates, ...]


def lost_updates(evidence: Evidence) -> tuple[PolicyUpdates, ...]:
    """Return the reference's what-if and the policies whose weights really lost updates.

    Without a reference that has the probe, the first policy that has it stands in for it.
    """
    found: list[PolicyUpdates] = []
    for policy, runs in evidence.runs.items():
        # One what-if is enough: all policies with FP32 weights answer it alike.
        if _is_observed(runs) or not any(not u.observed for u in found):
            updates = _policy(policy, runs)
            found += [updates] if updates is not None else []
    return tuple(found)


def _is_observed(runs: Sequence[RunRecord]) -> bool:
    return any(found.get("view") == "observed" for found in probe_results(runs, "lost_updates"))


def _policy(policy: str, runs: Sequence[RunRecord]) -> PolicyUpdates | None:
    results = list(probe_results(runs, "lost_updates"))
    names = dict.fromkeys(m for found in results for m in mapping(found.get("modules")))
    modules = [
        row
        for name in names
        if (row := _module(name, [mapping(mapping(f.get("modules")).get(name)) for f in results]))
    ]
    if not modules:
        return None
    return PolicyUpdates(
        policy=policy,
        observed=_is_observed(runs),
        modules=tuple(sorted(modules, key=lambda row: (-row.worst, row.module))),
    )


def _module(name: str, tables: Sequence[Mapping[str, Any]]) -> LostUpdates | None:
    lost = {}
    updates = sum(_total(table, "updates") for table in tables)
    if updates <= 0:
        return None
    for format_name in ("bf16", "fp16"):
        key = f"lost_{format_name}"
        having = [table for table in tables if table.get(key)]
        seen = sum(_total(table, "updates") for table in having)
        if seen > 0:
            lost[format_name] = sum(_total(table, key) for table in having) / seen
    return LostUpdates(
        module=module_label(name),
        updates=updates,
        lost=lost,
        retained_nearest_bf16=_mean(tables, "retained_nearest_bf16"),
        retained_stochastic_bf16=_mean(tables, "retained_stochastic_bf16"),
    )


def _total(table: Mapping[str, Any], key: str) -> float:
    values = table.get(key)
    return sum(as_count(v) for v in values) if isinstance(values, (list, tuple)) else 0.0


def _mean(tables: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return mean(value for table in tables for value in numbers(table.get(key)))
