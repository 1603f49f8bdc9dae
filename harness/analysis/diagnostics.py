"""The numbers that explain a verdict, and the warnings that name the telling ones.

None of them changes an outcome: a dead layer, a stalled weight or an underflow is harm only when
the loss says so, but it says why, and which policy to try instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from harness.analysis.endpoints import tail_start
from harness.analysis.findings import Reason, warning
from harness.analysis.pairing import Pair
from harness.analysis.probe_findings import ModuleFinding
from harness.analysis.reference_gates import first_nonfinite
from harness.analysis.rule import DecisionRule
from harness.analysis.wording import number, percent
from harness.numerics.formats import get_format
from harness.precision.module_names import ROOT
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord

Diagnostics = dict[str, tuple[float | None, float | None]]
_FINAL = ("zero_grad_share", "moved_weight_share", "nonfinite_weights", "nonfinite_buffers")


def diagnose(pairs: Sequence[Pair], policy: PrecisionPolicy, rule: DecisionRule) -> Diagnostics:
    """Return name -> (candidate, reference), means over seeds; None where nothing was measured.

    Besides the final scalars of the records: `lost_update_share` (of non-zero updates, what rounds
    away in BF16 weights), `flushed_share_fp16` / `_bf16` (of non-zero gradient elements, unscaled,
    what lies below the format), `skipped_steps` (per run), `min_loss_scale`, `final_loss_scale`,
    `grad_norm_ratio` (median over the tail, candidate over reference) and
    `first_nonfinite_step` (earliest over the seeds).
    """
    table: Diagnostics = {name: _both(pairs, _final(name)) for name in _FINAL}
    table["lost_update_share"] = _both(pairs, _share("lost_update_bf16", "update_total"))
    for fmt in ("fp16", "bf16"):
        table[f"flushed_share_{fmt}"] = _both(pairs, _share(f"grad_flushed_{fmt}", "grad_nonzero"))
    table["skipped_steps"] = _both(pairs, lambda r: _total(r.series.get("skipped")))
    if policy.loss_scale.kind != "none":
        table["min_loss_scale"] = (_extreme(pairs, min), None)
        table["final_loss_scale"] = (_mean(_last(p.candidate, "loss_scale") for p in pairs), None)
    ratios = [x for x in (_grad_norm_ratio(pair, rule) for pair in pairs) if x is not None]
    table["grad_norm_ratio"] = (float(np.median(ratios)), 1.0) if ratios else (None, None)
    steps = [first_nonfinite(p.candidate.series.get("loss", ())) for p in pairs]
    found = [float(step) for step in steps if step is not None]
    table["first_nonfinite_step"] = (min(found) if found else None, None)
    return table


def diagnostic_warnings(
    table: Mapping[str, tuple[float | None, float | None]],
    policy: PrecisionPolicy,
    rule: DecisionRule,
    modules: Sequence[ModuleFinding] = (),
) -> tuple[Reason, ...]:
    """Return a warning for each telling number; thresholds are constants of the rule.

    Args:
        table: What `diagnose` returned.
        policy: The candidate.
        rule: Constants.
        modules: Evidence by module, where there is any, to say where most is lost.
    """
    checks = (
        _zero_gradients,
        _weights_not_moving,
        functools.partial(_lost_updates, modules=modules),
        _nonfinite_buffers,
        _grad_norm,
        _underflow,
    )
    found = (check(table, policy, rule) for check in checks)
    return tuple(reason for reason in found if reason is not None)


_Table = Mapping[str, tuple[float | None, float | None]]


def _zero_gradients(table: _Table, policy: PrecisionPolicy, rule: DecisionRule) -> Reason | None:
    ours, theirs = table["zero_grad_share"]
    if ours is None or theirs is None or not ours - theirs > rule.zero_grad_excess:
        return None
    message = (
        f"{percent(ours)} of the gradient elements are exactly zero; {percent(theirs)} under FP32: "
        "part of the model receives no gradient."
    )
    return warning("ZERO_GRADIENTS", message, ours, theirs + rule.zero_grad_excess)


def _weights_not_moving(
    table: _Table, policy: PrecisionPolicy, rule: DecisionRule
) -> Reason | None:
    ours, theirs = table["moved_weight_share"]
    if ours is None or theirs is None or not theirs - ours > rule.unmoved_weight_excess:
        return None
    message = (
        f"Only {percent(ours)} of the weights differ from their start; "
        f"{percent(theirs)} under FP32."
    )
    return warning("WEIGHTS_NOT_MOVING", message, ours, theirs - rule.unmoved_weight_excess)


def _lost_updates(
    table: _Table,
    policy: PrecisionPolicy,
    rule: DecisionRule,
    *,
    modules: Sequence[ModuleFinding],
) -> Reason | None:
    share = table["lost_update_share"][0]
    rounds_away = policy.param_format != "fp32" and policy.weight_rounding == "nearest"
    if not rounds_away or share is None or not share > rule.lost_update_share:
        return None
    message = (
        f"{percent(share)} of the weight updates round away in {policy.param_format.upper()} "
        f"weights: too small against the weight they change{_where_lost(modules, policy)}."
    )
    return warning("LOST_UPDATES", message, share, rule.lost_update_share)


def _where_lost(modules: Sequence[ModuleFinding], policy: PrecisionPolicy) -> str:
    """Return the module that loses most, and FP32's updates where they fall below half an ulp."""
    by_share = sorted(
        (m for m in modules if m.lost_update_share is not None and m.module != ROOT),
        key=lambda m: -(m.lost_update_share or 0.0),
    )
    text = ""
    if len(by_share) > 1:
        worst = by_share[0]
        text = f", most in `{worst.module}` ({percent(worst.lost_update_share)})"
    relative = [m.update_to_weight[1] for m in modules if m.update_to_weight is not None]
    known = [x for x in relative if x is not None]
    # Half the spacing of a format lies between u/2 and u of the weight.
    half = get_format(policy.param_format).unit_roundoff / 2
    if known and (typical := float(np.median(known))) < half:
        text += (
            f"; FP32's are {number(typical)} of the weights, below half the spacing of "
            f"{policy.param_format.upper()} ({number(half)})"
        )
    return text


def _nonfinite_buffers(table: _Table, policy: PrecisionPolicy, rule: DecisionRule) -> Reason | None:
    ours, theirs = table["nonfinite_buffers"]
    if not ours or theirs:
        return None
    message = (
        f"{ours:.0f} buffer elements per run end non-finite (FP32: none): running statistics keep "
        "what a skipped step computed, and evaluation uses them."
    )
    return warning("NONFINITE_BUFFERS", message, ours, 0.0)


def _grad_norm(table: _Table, policy: PrecisionPolicy, rule: DecisionRule) -> Reason | None:
    ratio = table["grad_norm_ratio"][0]
    if ratio is None or 1 / rule.grad_norm_factor <= ratio <= rule.grad_norm_factor:
        return None
    message = f"The gradient norm at the end of the run is {number(ratio)} times FP32's."
    return warning("GRAD_NORM_RATIO", message, ratio, rule.grad_norm_factor)


def _underflow(table: _Table, policy: PrecisionPolicy, rule: DecisionRule) -> Reason | None:
    """Warn only without a scaler: a loss scale lifts the gradients before they are rounded."""
    if policy.compute_format not in ("fp16", "bf16") or policy.loss_scale.kind != "none":
        return None
    share = table[f"flushed_share_{policy.compute_format}"][1]
    if share is None or not share > rule.flushed_share:
        return None
    message = (
        f"{percent(share)} of FP32's non-zero gradient elements lie below the range of "
        f"{policy.compute_format.upper()}, and no loss scaling lifts them."
    )
    return warning("UNDERFLOW_OBSERVED", message, share, rule.flushed_share)


def _both(
    pairs: Sequence[Pair], measure: Callable[[RunRecord], float | None]
) -> tuple[float | None, float | None]:
    return _mean(measure(p.candidate) for p in pairs), _mean(measure(p.reference) for p in pairs)


def _mean(values: Iterable[float | None]) -> float | None:
    present = [x for x in values if x is not None]
    return float(np.mean(present)) if present else None


def _final(name: str) -> Callable[[RunRecord], float | None]:
    return lambda record: record.final.get(name)


def _share(count: str, of: str) -> Callable[[RunRecord], float | None]:
    def measure(record: RunRecord) -> float | None:
        total, part = _total(record.sampled.get(of)), _total(record.sampled.get(count))
        return part / total if part is not None and total else None

    return measure


def _total(values: Sequence[float] | None) -> float | None:
    return float(sum(values)) if values else None


def _last(record: RunRecord, name: str) -> float | None:
    values = record.series.get(name, ())
    return values[-1] if values else None


def _extreme(pairs: Sequence[Pair], pick: Callable[[Sequence[float]], float]) -> float | None:
    scales = [x for p in pairs for x in p.candidate.series.get("loss_scale", ())]
    return float(pick(scales)) if scales else None


def _grad_norm_ratio(pair: Pair, rule: DecisionRule) -> float | None:
    start = tail_start(pair.reference.num_steps, rule)
    ours = pair.candidate.series.get("grad_norm", ())[start:]
    theirs = pair.reference.series.get("grad_norm", ())[start:]
    ratios = [
        a / b
        for a, b in zip(ours, theirs, strict=False)
        if b > 0 and math.isfinite(a) and math.isfinite(b)
    ]
    return float(np.median(ratios)) if ratios else None
