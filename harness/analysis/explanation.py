"""Everything that explains one candidate's verdict beside the loss: probes, modules, triage.

Of all this only a failing same-point probe touches the outcome, and only an acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.analysis.diagnostics import Diagnostics, diagnose, diagnostic_warnings
from harness.analysis.findings import Outcome, Reason
from harness.analysis.gates import Comparison
from harness.analysis.loss_scale_window import loss_scale_window
from harness.analysis.methods import NON_INFERIORITY
from harness.analysis.module_evidence import module_findings, sides
from harness.analysis.module_warnings import (
    attention_growth,
    memory_note,
    module_warnings,
    scale_outside_window,
    triage_of,
    triage_warning,
)
from harness.analysis.probe_findings import LossScaleWindow, ModuleFinding, ProbeFindings
from harness.analysis.rule import DecisionRule
from harness.analysis.same_point_rule import measure, probe_caveats, probe_missing, probe_reasons
from harness.analysis.suspects import guilty, guilty_sentence, rank
from harness.runs.same_point.record import SamePointRecord


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What explains a verdict.

    Attributes:
        probe: The same-point probe; None without a measurement.
        modules: By module, the most suspicious first.
        triage: Where trouble began, if a run was in trouble.
        window: Which loss scales would have been safe.
        memory_note: What most of the memory goes to.
        diagnostics: Name -> (candidate, reference).
        warnings: The warnings that all of this gives.
        caveats: What limits the probe, or that there is none.
    """

    probe: ProbeFindings | None
    modules: tuple[ModuleFinding, ...]
    triage: dict[str, Any] | None
    window: LossScaleWindow | None
    memory_note: str | None
    diagnostics: Diagnostics
    warnings: tuple[Reason, ...]
    caveats: tuple[Reason, ...]


def explain(
    comparison: Comparison, same_point: SamePointRecord | None, rule: DecisionRule
) -> Explanation:
    """Return what explains the verdict on one candidate.

    Args:
        comparison: Its runs beside FP32's.
        same_point: Its same-point probe; None where it was not made.
        rule: Constants.
    """
    policy, runs = comparison.policy, sides(comparison.pairs)
    measured = measure(same_point, rule) if same_point is not None else None
    probe = measured if isinstance(measured, ProbeFindings) else None
    triage = triage_of(runs)
    named = triage.get("module") if triage is not None else None
    modules = module_findings(runs, same_point, policy, also=(str(named),) if named else ())
    window, share_outside = loss_scale_window(runs, policy, rule)
    table = diagnose(comparison.pairs, policy, rule)
    found = (
        triage_warning(triage),
        *module_warnings(modules, policy, rule),
        *diagnostic_warnings(table, policy, rule, modules),
        attention_growth(runs, modules, policy, rule),
        scale_outside_window(window, share_outside, rule),
    )
    return Explanation(
        probe=probe,
        modules=rank(modules, policy=policy, triage=triage, rule=rule),
        triage=triage,
        window=window,
        memory_note=memory_note(runs.ours),
        diagnostics=table,
        warnings=tuple(reason for reason in found if reason is not None),
        caveats=(probe_missing(measured if isinstance(measured, str) else None),)
        if probe is None
        else probe_caveats(probe),
    )


def with_probe(
    outcome: Outcome, deciding: tuple[Reason, ...], probe: ProbeFindings | None, rule: DecisionRule
) -> tuple[Outcome, tuple[Reason, ...]]:
    """Return outcome and reasons after the probe has spoken.

    An acceptance that the probe contradicts is undecided, the probe's reasons first and the test
    still visible. Any other outcome stands, with the probe's reasons as evidence, and so does the
    acceptance of a rival (`decision.method`), which knows no probe.
    """
    if probe is None or probe.passes:
        return outcome, deciding
    if outcome != "accept" or rule.method != NON_INFERIORITY:
        return outcome, (*deciding, *probe_reasons(probe, rule, kind="warning"))
    return "inconclusive", (*probe_reasons(probe, rule, kind="test"), *deciding)


def name_guilty(
    comparison: Comparison, explanation: Explanation, rule: DecisionRule
) -> tuple[str | None, str | None]:
    """Return the module that the evidence names for a candidate in trouble, and the sentence."""
    for pair in comparison.pairs:
        crash = pair.candidate.crash
        if crash is not None and crash.module:
            sentence = crash.sentence.rstrip(".")
            return crash.module, f"look at `{crash.module}`: {sentence}."
    found = guilty(explanation.modules, rule)
    return (None, None) if found is None else (found.module, guilty_sentence(found))
