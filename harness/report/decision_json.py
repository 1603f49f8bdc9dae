"""`decision.json`: the findings as strict JSON for machines; its schema lies in `schema/`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from importlib import resources
from typing import Any

from harness.analysis.findings import Estimate, LookSummary, ModelFindings, Ratio, Verdict
from harness.analysis.probe_findings import LossScaleWindow, ModuleFinding, ProbeFindings
from harness.report.text import candidates, controls

SCHEMA_VERSION = 1


def decision_document(findings: ModelFindings) -> dict[str, Any]:
    """Return the content of `decision.json`.

    Plain data only: what is NaN or infinite in the findings is null here. The noise-matched
    control stands under `controls`, without an outcome; `verdicts` holds candidates only.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "sweep_id": findings.sweep_id,
        "workload": findings.workload,
        "device": findings.device,
        "reference_policy": findings.reference_policy,
        "chosen_policy": findings.choice.policy,
        "choice": dataclasses.asdict(findings.choice),
        "verdicts": [_verdict(v) for v in candidates(findings)],
        "controls": [_control(v) for v in controls(findings)],
        "plan": None if findings.plan is None else findings.plan.as_mapping(),
        "savings": None if findings.savings is None else dataclasses.asdict(findings.savings),
        "caveats": [dataclasses.asdict(reason) for reason in findings.caveats],
        "environment": findings.environment,
        "seeds": findings.seeds,
        "num_steps": findings.num_steps,
        "tail_start": findings.tail_start,
        "scope": findings.scope,
        "not_tested": findings.not_tested,
        "command": findings.command,
        "rule": findings.rule,
        "profiles": findings.profiles,
        "failed": findings.failed,
    }
    plain = _plain(document)
    assert isinstance(plain, dict)
    return plain


def decision_text(findings: ModelFindings) -> str:
    """Return `decision_document` as indented strict JSON with a final newline."""
    return json.dumps(decision_document(findings), indent=2, allow_nan=False) + "\n"


def decision_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) that every `decision.json` satisfies."""
    path = resources.files("harness.report") / "schema" / "decision.schema.json"
    schema = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(schema, dict)
    return schema


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "policy": verdict.policy,
        "outcome": verdict.outcome,
        "execution": verdict.execution,
        "reasons": [dataclasses.asdict(reason) for reason in verdict.reasons],
        "estimates": {name: _estimate(e) for name, e in verdict.estimates.items()},
        "step_time_ratio": _value(verdict.step_time_ratio),
        "step_time_ratio_ci": _interval(verdict.step_time_ratio),
        "peak_memory_ratio": _value(verdict.peak_memory_ratio),
        "peak_memory_ratio_ci": _interval(verdict.peak_memory_ratio),
        "speed_note": verdict.speed_note,
        "extra_seeds": verdict.extra_seeds,
        "extra_seeds_reason": verdict.extra_seeds_reason,
        "settle_command": verdict.settle_command,
        "settle": verdict.settle,
        "accepting_margins": verdict.accepting_margins,
        "look": None if verdict.look is None else _look(verdict.look),
        "looks": [_look(look) for look in verdict.looks],
        "scope": verdict.scope,
        "lean": verdict.lean,
        "seeds_used": verdict.seeds_used,
        "seeds_dropped": verdict.seeds_dropped,
        "p_accept": verdict.p_accept,
        "p_accept_holm": verdict.p_accept_holm,
        "p_reject": verdict.p_reject,
        "failure_rate_bound": verdict.failure_rate_bound,
        "failure_rate_note": verdict.failure_rate_note,
        "min_detectable_harm": verdict.min_detectable_harm,
        "min_detectable_harm_note": verdict.min_detectable_harm_note,
        "fallback_of": verdict.fallback_of,
        "lag_steps": verdict.lag_steps,
        "diagnostics": {
            name: {"candidate": candidate, "reference": reference}
            for name, (candidate, reference) in verdict.diagnostics.items()
        },
        "probe": None if verdict.probe is None else _probe(verdict.probe),
        "modules": [_module(module) for module in verdict.modules],
        "guilty_module": verdict.guilty_module,
        "guilty_sentence": verdict.guilty_sentence,
        "triage": verdict.triage,
        "loss_scale_window": None
        if verdict.loss_scale_window is None
        else _window(verdict.loss_scale_window),
        "memory_note": verdict.memory_note,
        "description": verdict.description,
        "policy_content": verdict.policy_content,
    }


def _control(verdict: Verdict) -> dict[str, Any]:
    """A control is drawn, never judged: what reads like a judgement is left out."""
    judged = {"outcome", "lean", "extra_seeds", "extra_seeds_reason", "settle_command"}
    judged |= {"p_accept", "p_accept_holm", "p_reject", "probe", "guilty_module"}
    judged |= {"guilty_sentence", "settle", "accepting_margins", "look", "looks"}
    return {key: value for key, value in _verdict(verdict).items() if key not in judged}


def _look(look: LookSummary) -> dict[str, Any]:
    document = dataclasses.asdict(look)
    document["intervals"] = {
        endpoint: {"low": low, "mean": mean, "high": high}
        for endpoint, (low, mean, high) in look.intervals.items()
    }
    return document


def _probe(probe: ProbeFindings) -> dict[str, Any]:
    return {**dataclasses.asdict(probe), "passes": probe.passes}


def _module(module: ModuleFinding) -> dict[str, Any]:
    document = dataclasses.asdict(module)
    for name in ("zero_grad_share", "zero_output_share", "update_to_weight"):
        pair = document[name]
        document[name] = None if pair is None else {"candidate": pair[0], "reference": pair[1]}
    document["formats"] = dict(module.formats)
    return document


def _window(window: LossScaleWindow) -> dict[str, Any]:
    document = dataclasses.asdict(window)
    document["format"] = document.pop("fmt")
    return document


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return dataclasses.asdict(estimate)


def _value(ratio: Ratio | None) -> float | None:
    return None if ratio is None else ratio.value


def _interval(ratio: Ratio | None) -> list[float] | None:
    if ratio is None or ratio.ci_low is None or ratio.ci_high is None:
        return None
    return [ratio.ci_low, ratio.ci_high]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if hasattr(value, "item") and callable(value.item):  # a NumPy scalar
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)
