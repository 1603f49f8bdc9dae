"""The same-point probe's verdict on a candidate's arithmetic: four ratios and their thresholds.

It sees harm that a few hundred steps of loss cannot: a failing probe turns an acceptance into an
undecided verdict. It never rejects alone and touches no gate.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.analysis.findings import Reason, caveat
from harness.analysis.probe_findings import ProbeFindings
from harness.analysis.rule import DecisionRule
from harness.analysis.wording import number, percent
from harness.precision.module_names import ROOT
from harness.runs.same_point.record import ModuleError, Point, SamePointRecord

# Below this share of the gradient's own energy the batches have one gradient (a full batch), up to
# the rounding of FP32: 1e-12 is (16 unit roundoffs)^2, rounded.
_NO_NOISE = 1e-12


def measure(record: SamePointRecord, rule: DecisionRule) -> ProbeFindings | str:
    """Return what the probe measured, or why it measured nothing, as a clause.

    With f_j and c_j the gradients of batch j in FP32 and in the candidate's arithmetic at the same
    weights, e_j = c_j - f_j, K batches, and sums over the trajectory's points taken before any
    ratio (a ratio per point would divide by a true gradient that may be next to nothing):

    - nu = sum mean_j |e_j|^2 / sum noise, noise = sum_j |f_j - mean f|^2 / (K-1);
    - beta = sum (|mean e|^2 - sum_j |e_j - mean e|^2 / (K-1) / K) / sum (|mean f|^2 - noise / K);
    - eta = sum_{i != j} <c_i, f_j> / sum_{i != j} <f_i, f_j>;
    - retention = min over all points of sum_j <dw_c, dw_f> / sum_j |dw_f|^2.

    Where the true gradient is not resolved (its energy below `probe_weak_signal` of the noise of
    the mean), beta is relative to that noise and eta is None. A point that updates nothing, such
    as one with learning rate 0, has no retention. A sum of the candidate that is not finite gives
    a ratio that is not, and that fails.

    Source of nu's scale: McCandlish et al. 2018 (gradient noise scale), arXiv 1812.06162.
    """
    path = [p for p in record.points if p.kind == "trajectory"]
    if record.failed is not None or not path:
        return (record.failed or "it has no point").rstrip(".")
    k = record.num_batches
    noise, energy = _sum(p.noise for p in path), _sum(p.mean_gradient_sq for p in path)
    if not (math.isfinite(noise) and math.isfinite(energy)):
        return "FP32's own gradients are not finite at its points"
    if not (noise > 0 or energy > 0):
        return "FP32's gradients are zero at its points"
    signal = energy - noise / k
    weak = signal < rule.probe_weak_signal * noise / k
    bias = _sum(p.mean_error_sq - p.error_noise / k for p in path)
    retention, at = _retention(record.points)
    whole = _whole_model(record.modules)
    found = ProbeFindings(
        noise_ratio=_ratio(_sum(p.error_sq for p in path), noise)
        if noise > _NO_NOISE * energy
        else None,
        rounding_bias=_ratio(bias, noise / k if weak else signal),
        descent=None
        if weak
        else _ratio(_sum(p.cross for p in path), _sum(p.self_cross for p in path)),
        retention=retention,
        retention_step=None if at is None else at.step,
        retention_kind=None if at is None else at.kind,
        retentions=tuple(_retention([p])[0] for p in path),
        weak_signal=weak,
        tests_final_rate=any(p.kind == "final_rate" for p in record.points),
        unseen=record.unseen,
        same_trajectory=record.same_trajectory,
        steps=tuple(p.step for p in path),
        num_batches=k,
        seed=record.seed,
        notes=record.notes,
        relative_error=whole.gradient_error,
        cosine=whole.cosine,
        sign_agreement=whole.sign_agreement,
        sqnr_db=whole.sqnr_db,
        flushed_share=whole.flushed_share,
        fp64_error=whole.fp64_error,
        fp32_fp64_error=whole.fp32_fp64_error,
    )
    return _with_failures(found, rule)


def probe_reasons(
    probe: ProbeFindings, rule: DecisionRule, *, kind: Literal["test", "warning"]
) -> tuple[Reason, ...]:
    """Return a reason per exceeded threshold: `test` where it decides, else `warning`.

    What concerns the gradient comes before what is stored of the update.
    """
    reasons: dict[str, Reason] = {}
    for check in _checks(probe, rule):
        if check.fails:
            # Gradients that are not finite fail three ratios: one sentence says it.
            said = _say(check, probe)
            reasons.setdefault(
                said,
                Reason(
                    code=check.code,
                    message=said,
                    value=check.value,
                    threshold=check.limit,
                    kind=kind,
                ),
            )
    return tuple(reasons.values())


def probe_caveats(probe: ProbeFindings) -> tuple[Reason, ...]:
    """Return what limits the probe's own evidence."""
    found = []
    if probe.weak_signal:
        message = (
            "At the probe's points the mean gradient is not resolved from minibatch noise: the "
            "rounding bias is relative to that noise and the descent is not tested."
        )
        found.append(caveat("PROBE_WEAK_SIGNAL", message))
    return tuple(found)


def probe_missing(why: str | None) -> Reason:
    """Return the caveat of a candidate that was not probed, with the reason if it is known."""
    because = "" if why is None else f" ({why})"
    message = (
        f"The arithmetic was not probed at fixed weights{because}: harm that a few hundred steps "
        "of loss cannot show is not excluded."
    )
    return caveat("PROBE_MISSING", message)


@dataclass(frozen=True)
class _Check:
    """One threshold: its code, the value held against it, and whether that fails."""

    code: str
    value: float | None
    limit: float
    fails: bool
    say: Callable[[float, ProbeFindings], str]


def _checks(probe: ProbeFindings, rule: DecisionRule) -> tuple[_Check, ...]:
    # Each is written so that NaN fails and None, which is not defined, does not.
    ret, limit = probe.retention, rule.probe_retention
    stalls = ret is not None and not ret >= limit
    beta, most = probe.rounding_bias, rule.probe_rounding_bias
    biased = beta is not None and not beta <= most
    eta, off = probe.descent, rule.probe_descent
    descends_otherwise = eta is not None and not abs(eta - 1) <= off
    nu, loud = probe.noise_ratio, rule.probe_noise_ratio
    noisy = nu is not None and not nu <= loud
    # Stored updates last: where the gradients differ, so do the updates.
    return (
        _Check("PROBE_ROUNDING_BIAS", beta, most, biased, _say_bias),
        _Check("PROBE_DESCENT_LOSS", eta, off, descends_otherwise, _say_descent),
        _Check("PROBE_ROUNDING_NOISE", nu, loud, noisy, _say_noise),
        _Check("PROBE_STAGNATION", ret, limit, stalls, functools.partial(_say_stagnation, limit)),
    )


def _with_failures(probe: ProbeFindings, rule: DecisionRule) -> ProbeFindings:
    failing = tuple(check.code for check in _checks(probe, rule) if check.fails)
    return dataclasses.replace(probe, failing=failing)


# Below this share nothing that matters is stored.
_NEXT_TO_NOTHING = 0.005


def _say(check: _Check, probe: ProbeFindings) -> str:
    if check.value is not None and math.isfinite(check.value):
        return check.say(check.value, probe)
    if check.code == "PROBE_STAGNATION":
        return f"From equal weights, the candidate's update {_where(probe)} is not finite."
    return "At equal weights and data, the candidate's gradients are not finite."


def _where(probe: ProbeFindings) -> str:
    if probe.retention_kind == "final_rate":
        return "at the planned final learning rate"
    return f"after {probe.retention_step} steps"


def _say_stagnation(limit: float, value: float, probe: ProbeFindings) -> str:
    least = f"only {percent(value)}" if value >= _NEXT_TO_NOTHING else "next to nothing"
    text = f"From equal weights, {least} of FP32's update is stored {_where(probe)}"
    first = next(
        (
            (step, share)
            for step, share in zip(probe.steps, probe.retentions, strict=False)
            if share is not None and share < limit
        ),
        None,
    )
    if first is not None and (first[0], "trajectory") != (
        probe.retention_step,
        probe.retention_kind,
    ):
        text += f" (already after {first[0]} steps {percent(max(0.0, first[1]))})"
    if probe.failing != ("PROBE_STAGNATION",):
        return f"{text}, the gradient being another one."
    return f"{text}: the weights stall, which the loss of a short run may not show."


def _say_bias(value: float, probe: ProbeFindings) -> str:
    scale = "the noise of the mean gradient" if probe.weak_signal else "the true gradient"
    return (
        f"At equal weights rounding biases the gradient by {percent(math.sqrt(value))} of {scale}: "
        "it is the same in every batch and does not average out."
    )


def _say_descent(value: float, probe: ProbeFindings) -> str:
    return (
        f"At equal weights the candidate's gradient descends {number(value)} times as fast as "
        "FP32's."
    )


def _say_noise(value: float, probe: ProbeFindings) -> str:
    return (
        f"At equal weights the rounding error of the gradient has {percent(value)} of the energy "
        f"of minibatch noise: training acts as with a batch {number(1 + value)} times smaller."
    )


def _retention(points: Sequence[Point]) -> tuple[float | None, Point | None]:
    """Return the least retention, NaN before any number, and where."""
    worst: tuple[float | None, Point | None] = (None, None)
    for point in points:
        if not point.updated > 0 or not math.isfinite(point.updated):
            continue
        value = _ratio(point.retained, point.updated)
        if worst[0] is None or not value >= worst[0]:
            worst = (value, point)
            if math.isnan(value):
                break
    return worst


def _whole_model(modules: Sequence[ModuleError]) -> ModuleError:
    """Return the figures of the root, which stands for all parameters."""
    found = (m for m in modules if m.module == ROOT)
    return next(found, ModuleError(module=ROOT, kind=""))


def _sum(values: Iterable[float]) -> float:
    # Not fsum, which raises on infinities of both signs.
    return float(sum(values))


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.nan if not above else math.copysign(math.inf, above)
