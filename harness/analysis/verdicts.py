"""From one candidate's runs to its verdict: pairs, estimates, gates, test, warnings, forecast."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.analysis import statistics
from harness.analysis.ahead import Ahead, look_ahead
from harness.analysis.cautions import candidate_caveats, candidate_warnings
from harness.analysis.decision import TestResult, estimate, non_inferiority
from harness.analysis.endpoints import Level, paired_difference, tail_start
from harness.analysis.explanation import explain, name_guilty, with_probe
from harness.analysis.findings import Endpoint, Estimate, Ratio, Reason, Verdict
from harness.analysis.forecast import lean_of, min_detectable_harm
from harness.analysis.gates import Comparison, Hit, apply_gates, logged_in_low_precision
from harness.analysis.methods import NON_INFERIORITY
from harness.analysis.pairing import Pair, make_pair
from harness.analysis.rival_method import rival_of, rival_test
from harness.analysis.rule import DecisionRule
from harness.analysis.scope import verdict_scope
from harness.analysis.setting import Setting
from harness.analysis.settling import accepting_margins
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.same_point.record import SamePointRecord

__all__ = ["Reference", "Setting", "compare", "judge"]

_FAILURES = ("CRASHED", "NOT_EXPRESSIBLE", "NONFINITE", "LOSS_SCALE_COLLAPSE", "DIVERGED")
_CONTROL = Reason(
    code="CONTROL",
    message="FP32 from slightly moved weights: the picture of harmless spread; it gets no verdict.",
    kind="caveat",
)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The FP32 side of every comparison of one model.

    Attributes:
        stable: Seed -> FP32 run that can serve as a reference.
        unstable: Seed -> why its FP32 run cannot.
        levels: What the stable runs reached, per endpoint.
        unstable_reason: Set if too many seeds are unstable.
        not_learning_reason: Set if FP32 learned too little.
    """

    stable: Mapping[int, RunRecord]
    unstable: Mapping[int, str]
    levels: Mapping[Endpoint, Level]
    unstable_reason: Reason | None
    not_learning_reason: Reason | None


def compare(
    policy: PrecisionPolicy,
    runs: Mapping[int, RunRecord],
    reference: Reference,
    setting: Setting,
) -> Comparison:
    """Pair a candidate's runs with the stable FP32 runs and estimate the differences.

    Args:
        policy: The candidate.
        runs: Seed -> candidate run; seeds may be missing.
        reference: The FP32 side.
        setting: Seeds and rule.
    """
    pairs = tuple(
        make_pair(runs[seed], reference.stable[seed])
        for seed in sorted(reference.stable)
        if seed in runs
    )
    missing = tuple(seed for seed in setting.seeds if seed not in runs)
    comparison = Comparison(
        policy=policy,
        runs=tuple(runs.values()),
        pairs=pairs,
        missing=missing,
        levels=reference.levels,
        estimates={},
    )
    estimates = _estimates(comparison, reference.levels, setting.rule)
    return dataclasses.replace(comparison, estimates=estimates)


def judge(
    comparison: Comparison,
    *,
    description: str,
    reference: Reference,
    setting: Setting,
    same_point: SamePointRecord | None = None,
    extra_caveats: Sequence[Reason] = (),
) -> Verdict:
    """Return the verdict on one candidate; Holm's adjustment and speed are added by the caller."""
    rule = setting.rule
    hits = apply_gates(
        comparison,
        unstable=reference.unstable_reason,
        not_learning=reference.not_learning_reason,
        rule=rule,
    )
    estimates = comparison.estimates
    test = _test(comparison, setting)
    is_control = comparison.policy.is_control
    explanation = explain(comparison, None if is_control else same_point, rule)
    ahead = look_ahead(hits, test, explanation, estimates, setting)
    outcome, deciding = with_probe(
        hits[0].outcome if hits else test.outcome,
        _deciding(hits, test, ahead),
        explanation.probe,
        rule,
    )
    failures = sum(hit.reason.code in _FAILURES for hit in hits)
    sound = [pair for pair in comparison.pairs if pair.fault is None]
    reasons = (
        *((_CONTROL,) if is_control else ()),
        # A control is not tested, so it must not read as if it had passed.
        *((hit.reason for hit in hits) if is_control else deciding),
        *explanation.warnings,
        *candidate_warnings(comparison, rule),
        # What a gate has decided does not rest on the loss, so no probe is missed there.
        *(() if is_control or (hits and explanation.probe is None) else explanation.caveats),
        *(() if is_control else candidate_caveats(comparison, num_failures=failures)),
        *extra_caveats,
    )
    # A gate that voids the comparison leaves nobody to blame.
    in_trouble = outcome == "reject" or (outcome == "inconclusive" and not hits)
    guilty, why = (None, None)
    if in_trouble and not is_control:
        guilty, why = name_guilty(comparison, explanation, rule)
    harms = _detectable(estimates, rule)
    margins = accepting_margins(estimates) if rule.method == NON_INFERIORITY else {}
    if rule.familywise:  # acceptance then rests on the other candidates' p as well
        margins = {}
    return Verdict(
        policy=comparison.policy.name,
        policy_content=comparison.policy.content(),
        description=description or comparison.policy.description,
        outcome=outcome,
        execution=_execution(comparison.runs),
        reasons=reasons,
        estimates=dict(estimates),
        seeds_used=tuple(pair.seed for pair in sound),
        seeds_dropped=_dropped(comparison, reference),
        peak_memory_ratio=_memory_ratio(sound),
        extra_seeds=ahead.extra_seeds,
        extra_seeds_reason=ahead.reason,
        settle_command=None if is_control else ahead.command,
        lean=lean_of(estimates, probe_fails=bool(explanation.probe and explanation.probe.failing)),
        failure_rate_bound=statistics.failure_rate_bound(len(sound))
        if sound and not failures
        else None,
        failure_rate_note=_failure_rate_note(len(sound), failures),
        min_detectable_harm=harms,
        min_detectable_harm_note=_harm_note(estimates, harms, rule),
        lag_steps=_lag_steps(comparison, rule),
        p_accept=test.p_accept,
        p_reject=test.p_reject,
        is_control=is_control,
        diagnostics=explanation.diagnostics,
        probe=explanation.probe,
        modules=explanation.modules,
        guilty_module=guilty,
        guilty_sentence=why,
        triage=explanation.triage,
        loss_scale_window=explanation.window,
        memory_note=explanation.memory_note,
        settle=() if is_control else ahead.sentences,
        accepting_margins={} if hits or is_control or test.outcome == "accept" else margins,
        scope=verdict_scope(comparison.runs),
    )


def _test(comparison: Comparison, setting: Setting) -> TestResult:
    """Return what the rule that decides says of a comparison that no gate has decided."""
    rival = rival_of(setting.rule)
    if rival is None:
        return non_inferiority(comparison.estimates, rule=setting.rule)
    return rival_test(rival, comparison.pairs, twins=setting.twins, rule=setting.rule)


def _detectable(
    estimates: Mapping[Endpoint, Estimate], rule: DecisionRule
) -> dict[Endpoint, float]:
    if rule.method != NON_INFERIORITY:
        return {}
    harms = {k: min_detectable_harm(e, rule) for k, e in estimates.items()}
    return {k: harm for k, harm in harms.items() if harm is not None and math.isfinite(harm)}


def _harm_note(
    estimates: Mapping[Endpoint, Estimate], harms: Mapping[Endpoint, float], rule: DecisionRule
) -> str | None:
    """Return why an endpoint has no smallest harm that would have been rejected, or None."""
    if not estimates:
        return "There is no pair of runs to estimate from."
    if rule.method != NON_INFERIORITY:
        return f"The rule {rule.method} does not say which harm it would have seen."
    lacking = next((e for endpoint, e in estimates.items() if endpoint not in harms), None)
    if lacking is None:
        return None
    if lacking.num_pairs < rule.min_pairs:
        return f"The test needs {rule.min_pairs} pairs of runs; fewer show only gross failures."
    if lacking.sd is None:
        return "A difference is not a number, so the runs have no spread to judge by."
    return "At this level so few pairs reject no harm, however large."


def _failure_rate_note(num_sound: int, failures: int) -> str | None:
    """Return why there is no bound on the failure rate, or None."""
    if failures:
        return "A run failed: the failure rate is not zero, and so few runs do not measure it."
    return None if num_sound else "There is no pair of runs to count failures in."


def _estimates(
    comparison: Comparison, levels: Mapping[Endpoint, Level], rule: DecisionRule
) -> dict[Endpoint, Estimate]:
    """Return the estimate of each endpoint that there is to test.

    A training loss that was logged in 16 bits is none where a held-out loss exists.
    """
    sound = [pair for pair in comparison.pairs if pair.fault is None]
    if "held_out" in levels and logged_in_low_precision(comparison) is not None:
        levels = {endpoint: levels[endpoint] for endpoint in levels if endpoint != "train"}
    return {
        endpoint: estimate(
            tuple(paired_difference(p.candidate, p.reference, endpoint, rule) for p in sound),
            unit=level.unit,
            margin=level.margin,
            margin_term=level.margin_term,
            progress=level.progress,
            reference_loss=level.tail,
            num_endpoints=len(levels),
            rule=rule,
            formula_margin=level.formula_margin if level.margin_term == "user" else None,
        )
        for endpoint, level in levels.items()
        if sound
    }


def _deciding(hits: Sequence[Hit], test: TestResult, ahead: Ahead) -> tuple[Reason, ...]:
    """Return the reasons that decide, first the one that did."""
    reasons = tuple(hit.reason for hit in hits)
    # The test adds nothing to a comparison that a gate has declared void.
    if not hits or (hits[0].outcome == "reject" and test.outcome == "reject"):
        reasons += (test.reason,)
    return reasons if ahead.unresolvable is None else (*reasons, ahead.unresolvable)


def _dropped(comparison: Comparison, reference: Reference) -> tuple[int, ...]:
    broken = {pair.seed for pair in comparison.pairs if pair.fault is not None}
    return tuple(sorted(broken | set(reference.unstable)))


def _execution(runs: Sequence[RunRecord]) -> Literal["native", "emulated"]:
    return "emulated" if any(run.execution == "emulated" for run in runs) else "native"


def _memory_ratio(pairs: Sequence[Pair]) -> Ratio | None:
    """Return the median over seeds; None where either side was not measured or was emulated.

    A CPU's figure is the whole process', with libraries and whatever earlier runs left in the
    allocator, so two of them have no ratio: the control's was seen at 0.7 and at 1.4.
    """
    if any(pair.candidate.environment.get("device_kind") != "cuda" for pair in pairs):
        return None
    ratios = []
    for pair in pairs:
        ours, theirs = pair.candidate, pair.reference
        if not ours.peak_memory_bytes or not theirs.peak_memory_bytes:
            return None
        if ours.execution == "emulated" or ours.peak_memory_source != theirs.peak_memory_source:
            return None
        ratios.append(ours.peak_memory_bytes / theirs.peak_memory_bytes)
    return Ratio(value=float(np.median(ratios))) if ratios else None


def _lag_steps(comparison: Comparison, rule: DecisionRule) -> float | None:
    """Return the training-loss difference over FP32's mean slope in the tail, in steps."""
    e = comparison.estimates.get("train")
    if e is None or not math.isfinite(e.mean_difference):
        return None
    references = [pair.reference for pair in comparison.pairs if pair.fault is None]
    slopes = [
        statistics.slope(r.series["loss"][tail_start(r.num_steps, rule) :]) for r in references
    ]
    fall = abs(float(np.mean(slopes)))
    return e.mean_difference / fall if fall > 0 else None
