"""Warnings and caveats on one candidate: what to know beside its verdict; none ever changes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from harness.analysis import statistics
from harness.analysis.findings import Reason, caveat, warning
from harness.analysis.gates import Comparison, logged_in_low_precision
from harness.analysis.pairing import Pair
from harness.analysis.rule import DecisionRule
from harness.analysis.wording import (
    ENDPOINT_NAMES,
    counted,
    in_margins,
    in_words,
    number,
    percent,
)
from harness.runs.record import RunRecord


def candidate_warnings(comparison: Comparison, rule: DecisionRule) -> tuple[Reason, ...]:
    """Return the warnings on one candidate."""
    checks: tuple[Callable[[Comparison, DecisionRule], Reason | None], ...] = (
        _identical,
        _logged_low_precision,
        _step0_loss_differs,
        _trend_worsening,
        _spikes_excess,
        _skips_excess,
        _better_than_reference,
        _endpoints_disagree,
        _chaos_saturated,
        _intermittent,
    )
    found = (check(comparison, rule) for check in checks)
    return tuple(reason for reason in found if reason is not None)


def candidate_caveats(comparison: Comparison, *, num_failures: int) -> tuple[Reason, ...]:
    """Return what a verdict on this candidate leaves open, whatever it is."""
    caveats = []
    runs = [pair.candidate for pair in comparison.pairs]
    emulated = next((r for r in comparison.runs if r.execution == "emulated"), None)
    if emulated is not None:
        caveats.append(caveat("EMULATED", emulated.execution_detail or "Computed by rounding."))
    if runs and num_failures == 0:
        bound = statistics.failure_rate_bound(len(runs))
        message = (
            f"No run failed in {counted(len(runs), 'seed')}, which still leaves "
            f"a failure rate of up to {percent(bound)} possible (95 % bound)."
        )
        caveats.append(caveat("FAILURE_RATE_BOUND", message, bound))
    return tuple(caveats)


def _identical(c: Comparison, rule: DecisionRule) -> Reason | None:
    same = [p.candidate.series.get("loss") == p.reference.series.get("loss") for p in c.pairs]
    if not same or not all(same):
        return None
    message = (
        "Every loss of every seed equals FP32's bit for bit: this policy changed nothing here, so "
        "its acceptance says nothing about the format."
    )
    return warning("IDENTICAL_TO_FP32", message)


def _logged_low_precision(c: Comparison, rule: DecisionRule) -> Reason | None:
    fmt = logged_in_low_precision(c)
    if fmt is None or "held_out" not in c.estimates:
        return None
    message = (
        f"Every training loss is exactly a {fmt.upper()} value, so only the held-out loss was "
        "tested; compute the loss in FP32 inside loss_fn."
    )
    return warning("LOSS_LOGGED_LOW_PRECISION", message)


def _step0_loss_differs(c: Comparison, rule: DecisionRule) -> Reason | None:
    tolerance = (
        rule.step0_tolerance_tf32
        if c.policy.compute_format == "tf32" and c.policy.param_format == "fp32"
        else rule.step0_tolerance_16bit
    )
    largest, seed = 0.0, None
    for pair in c.pairs:
        ours, theirs = _first_loss(pair.candidate), _first_loss(pair.reference)
        if pair.fault is not None or not theirs or not math.isfinite(ours):
            continue
        if abs(ours / theirs - 1) > largest:
            largest, seed = abs(ours / theirs - 1), pair.seed
    if largest <= tolerance or c.policy.is_control:
        return None
    message = (
        f"The very first loss, on equal weights and data, differs from FP32's by "
        f"{percent(largest)} (seed {seed}): the forward pass itself is off."
    )
    return warning("STEP0_LOSS_DIFFERS", message, largest, tolerance)


def _trend_worsening(c: Comparison, rule: DecisionRule) -> Reason | None:
    e = c.estimates.get("train")
    series = [x for x in (_difference(pair) for pair in c.pairs) if x is not None]
    if e is None or len(series) < rule.min_pairs or len(series) < len(c.pairs):
        return None
    num_steps = len(series[0])
    start = num_steps - math.ceil(rule.trend_fraction * num_steps)
    slopes = [statistics.slope(x[start:]) for x in series]
    mean, sd = statistics.mean_sd(slopes)
    if sd is None or not math.isfinite(mean):
        return None
    error = sd / math.sqrt(len(slopes))
    p = statistics.tail_probability(mean, error, len(slopes) - 1)
    ahead = e.mean_difference + mean * num_steps
    if not (p < rule.trend_level and ahead > e.margin):
        return None
    message = (
        "The training-loss difference grows over the last half of the run; at that rate it would "
        f"be {in_words(ahead, e.margin)} after as many steps again."
    )
    return warning("TREND_WORSENING", message, ahead, e.margin)


def _spikes_excess(c: Comparison, rule: DecisionRule) -> Reason | None:
    def spikes(records: Iterable[RunRecord]) -> int:
        return sum(
            statistics.count_spikes(
                r.series.get("loss", ()), window=rule.spike_window, mads=rule.spike_mads
            )
            for r in records
        )

    ours, theirs = spikes(p.candidate for p in c.pairs), spikes(p.reference for p in c.pairs)
    limit = max(theirs + rule.spike_excess, rule.spike_factor * theirs)
    if not ours > limit:
        return None
    message = f"The loss spikes {ours} times over all seeds; FP32's {theirs} times."
    return warning("SPIKES_EXCESS", message, float(ours), float(limit))


def _skips_excess(c: Comparison, rule: DecisionRule) -> Reason | None:
    shares = []
    for pair in c.pairs:
        skipped = pair.candidate.series.get("skipped", ())
        later = skipped[math.ceil(rule.skips_warmup * pair.candidate.num_steps) :]
        shares.append(sum(later) / len(later) if later else 0.0)
    worst = max(shares, default=0.0)
    if not worst > rule.max_skip_share:
        return None
    message = (
        f"The loss scaler skipped {percent(worst)} of the steps after the first "
        f"{percent(rule.skips_warmup)} of the run; those updates are lost."
    )
    return warning("FP16_SKIPS_EXCESS", message, worst, rule.max_skip_share)


def _better_than_reference(c: Comparison, rule: DecisionRule) -> Reason | None:
    for endpoint, e in c.estimates.items():
        if e.ci_high is not None and e.num_pairs >= rule.min_pairs and e.ci_high < -e.margin:
            message = (
                f"In {ENDPOINT_NAMES[endpoint]} the candidate is better than FP32 by more than the "
                f"margin ({in_words(e.mean_difference, e.margin)}). Rounding does not teach: look "
                "for skipped steps, a regularizing effect or a fault in the comparison."
            )
            return warning("BETTER_THAN_REFERENCE", message, e.ci_high, -e.margin)
    return None


def _endpoints_disagree(c: Comparison, rule: DecisionRule) -> Reason | None:
    relative = {k: in_margins(e.mean_difference, e.margin) for k, e in c.estimates.items()}
    if len(relative) < 2:
        return None
    low, high = min(relative.values()), max(relative.values())
    if not (low < -rule.disagree_margins and high > rule.disagree_margins):
        return None
    texts = [
        f"{ENDPOINT_NAMES[k]} {in_words(e.mean_difference, e.margin)}"
        for k, e in c.estimates.items()
    ]
    message = f"Training and held-out loss disagree: {' but '.join(texts)}."
    return warning("ENDPOINTS_DISAGREE", message, high, rule.disagree_margins)


def _chaos_saturated(c: Comparison, rule: DecisionRule) -> Reason | None:
    for endpoint, e in c.estimates.items():
        sigma = c.levels[endpoint].sigma
        if e.sd is None or not sigma:
            continue
        limit = rule.chaos_factor * math.sqrt(2) * sigma
        if e.sd > limit:
            message = (
                f"In {ENDPOINT_NAMES[endpoint]} the paired difference spreads by {number(e.sd)} "
                f"over seeds, as much as unpaired FP32 runs do (seed sd {number(sigma)}): chaos "
                "sets it, and pairing no longer helps."
            )
            return warning("CHAOS_SATURATED", message, e.sd, limit)
    return None


def _intermittent(c: Comparison, rule: DecisionRule) -> Reason | None:
    seeds = sorted(
        run.seed for run in c.runs if any(e.get("kind") == "intermittent" for e in run.events)
    )
    if not seeds:
        return None
    return warning(
        "INTERMITTENT",
        f"The run that failed finished when tried once more (seed {', '.join(map(str, seeds))}): "
        "the failure comes and goes with the device's own nondeterminism. The first try counts.",
        float(len(seeds)),
    )


def _first_loss(record: RunRecord) -> float:
    return next(iter(record.series.get("loss", ())), math.nan)


def _difference(pair: Pair) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None:
    ours, theirs = pair.candidate.series.get("loss", ()), pair.reference.series["loss"]
    if len(ours) != len(theirs) or pair.fault is not None:
        return None
    return np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
