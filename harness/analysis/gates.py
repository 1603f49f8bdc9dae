"""Gates: what makes a comparison void, and what no candidate may do, whatever the loss says.

Each gate looks at one comparison and returns a reason or None. The first hit in the order of
`REFERENCE_GATES` and `CANDIDATE_GATES` decides; all hits are reported. One hard failure in n seeds
is enough for a rejection: the paired FP32 run on the same data did not fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from harness.analysis.endpoints import Level, held_out_by_step
from harness.analysis.findings import Endpoint, Estimate, Outcome, Reason
from harness.analysis.in_run_gates import collapse_of, divergence_rise, end_note, ended_early
from harness.analysis.methods import NON_INFERIORITY
from harness.analysis.pairing import Pair
from harness.analysis.reference_gates import first_nonfinite, gate_reason, smoothed_end
from harness.analysis.rule import DecisionRule
from harness.analysis.run_memory import once_per_run
from harness.analysis.wording import (
    ENDPOINT_NAMES,
    in_words,
    margin_basis,
    number,
    seeds_text,
)
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One candidate against the stable FP32 runs.

    Attributes:
        policy: The candidate's policy.
        runs: Every candidate run of the grid that exists.
        pairs: One per seed whose FP32 run is stable and whose candidate run exists, by seed.
        missing: Seeds without a candidate run.
        levels: FP32's level per endpoint; empty if no FP32 run is stable.
        estimates: Per endpoint, over the pairs whose fingerprints agree.
    """

    policy: PrecisionPolicy
    runs: tuple[RunRecord, ...]
    pairs: tuple[Pair, ...]
    missing: tuple[int, ...]
    levels: Mapping[Endpoint, Level]
    estimates: Mapping[Endpoint, Estimate]


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A gate that fired and the outcome it stands for."""

    outcome: Outcome
    reason: Reason


def _pairing_broken(c: Comparison, rule: DecisionRule) -> Reason | None:
    broken = [pair for pair in c.pairs if pair.fault is not None]
    if not broken:
        return None
    message = (
        f"These runs are not pairs: {broken[0].fault} between FP32 and {c.policy.name} in "
        f"{seeds_text([pair.seed for pair in broken])}. {_pairing_advice(broken[0].fault)}"
    )
    return gate_reason("PAIRING_BROKEN", message, float(len(broken)), 0.0)


def _pairing_advice(fault: str | None) -> str:
    if fault is not None and "dropout" in fault:
        return "Let the forward pass draw random numbers from torch's own generators alone."
    return (
        "Draw every random number of build_model, batches and held_out from a generator seeded "
        "with `seed`."
    )


def _crashed(c: Comparison, rule: DecisionRule) -> Reason | None:
    crashes = [(p.seed, p.candidate.crash) for p in c.pairs if p.candidate.crash is not None]
    if not crashes:
        return None
    crash = crashes[0][1]
    assert crash is not None
    code = "NOT_EXPRESSIBLE" if all(x and x.not_expressible for _, x in crashes) else "CRASHED"
    sentence = crash.sentence.rstrip(".") or f"{crash.kind}: {crash.message}"
    where = "" if len(crashes) == len(c.pairs) else f" ({seeds_text([s for s, _ in crashes])})"
    return gate_reason(code, f"{sentence}{where}; FP32 trains.", float(len(crashes)), 0.0)


def _nonfinite(c: Comparison, rule: DecisionRule) -> Reason | None:
    found = [
        (pair, what)
        for pair in c.pairs
        if (what := _first_nonfinite_of(pair.candidate, pair.reference, c.policy))
    ]
    if not found:
        return None
    pair, what = found[0]
    share = f"; {len(found)} of {len(c.pairs)} seeds" if len(c.pairs) > 1 else ""
    where = " on the same data" if pair.fault is None else ""
    note = end_note(pair.candidate)
    message = f"{what} (seed {pair.seed}{share}); FP32 stays finite{where}.{note}"
    return gate_reason("NONFINITE", message, float(len(found)), 0.0)


@once_per_run
def _first_nonfinite_of(
    candidate: RunRecord, reference: RunRecord, policy: PrecisionPolicy
) -> str | None:
    step = first_nonfinite(candidate.series.get("loss", ()))
    if step is not None:
        return f"The loss is not finite at step {step}"
    if candidate.final.get("nonfinite_weights", 0.0) > 0:
        return "The final weights are not finite"
    buffers = candidate.final.get("nonfinite_buffers", 0.0)
    if buffers > 0 and not reference.final.get("nonfinite_buffers", 0.0) > 0:
        return f"{buffers:.0f} buffer elements (such as BatchNorm statistics) are not finite"
    for steps, value in held_out_by_step(candidate).items():
        if not math.isfinite(value):
            return f"The held-out loss is not finite after {steps} steps"
    # Some optimizers drop non-finite gradients; what FP32 survives as well is no fault of a format.
    if policy.loss_scale.kind == "none" and not any(reference.series.get("nonfinite_grad", ())):
        counts = candidate.series.get("nonfinite_grad", ())
        step = next((k for k, count in enumerate(counts) if not count == 0), None)
        if step is not None:
            return f"Gradients are not finite at step {step}, and no loss scaler skips the step"
    return None


def _loss_scale_collapse(c: Comparison, rule: DecisionRule) -> Reason | None:
    for pair in c.pairs:
        found = collapse_of(pair.candidate, c.policy, rule)
        if found is not None:
            what, value, limit = found
            message = f"{what} (seed {pair.seed}).{end_note(pair.candidate)}"
            return gate_reason("LOSS_SCALE_COLLAPSE", message, value, limit)
    return None


def _diverged(c: Comparison, rule: DecisionRule) -> Reason | None:
    level = c.levels.get("train")
    if level is None:
        return None
    for pair in _whole(c.pairs):
        end, limit = _divergence(pair.candidate, level, rule)
        reference_end, reference_limit = _divergence(pair.reference, level, rule)
        # Both may end near the bound on a noisy task; then a hair's breadth must not decide.
        apart = end - reference_end > rule.gross_margins * level.margin
        if end > limit and apart and not reference_end > reference_limit:
            message = (
                f"The smoothed training loss rose from its minimum to {number(end)} (seed "
                f"{pair.seed}; {number(limit)} is tolerated); FP32's ends at "
                f"{number(reference_end)}."
            )
            return gate_reason("DIVERGED", message, end, limit)
    ended = [
        pair
        for pair in c.pairs
        if pair.candidate.status == "diverged" and not _told(pair, c.policy, rule)
    ]
    if not ended:
        return None
    message = "The run ended itself as diverged; FP32's did not."
    early = ended_early(ended[0].candidate)
    if early is not None:
        message = f"Seed {ended[0].seed}: {early.why}; FP32 trains on. {early.note}"
    return gate_reason("DIVERGED", message, None, None)


def _told(pair: Pair, policy: PrecisionPolicy, rule: DecisionRule) -> bool:
    """Return whether another gate tells why a run ended itself, with a loss that may be low."""
    if collapse_of(pair.candidate, policy, rule) is not None:
        return True
    if ended_early(pair.candidate) is None:
        return False
    return _first_nonfinite_of(pair.candidate, pair.reference, policy) is not None


def _divergence(record: RunRecord, level: Level, rule: DecisionRule) -> tuple[float, float]:
    """Return the smoothed loss at the end and the bound above which the run has diverged.

    The bound is relative to the run's own minimum: a loss that stays flat at its start has not
    diverged, it has not learned, and is grossly worse than FP32's.
    """
    end, lowest = smoothed_end(record, rule)
    return end, lowest + divergence_rise(level, rule)


def _gross_degradation(c: Comparison, rule: DecisionRule) -> Reason | None:
    for endpoint, e in c.estimates.items():
        if not e.differences or not e.margin > 0:
            continue
        least = math.nan if any(map(math.isnan, e.differences)) else min(e.differences)
        limit, spread_known = _gross_limit(endpoint, e, c.levels, rule)
        # Without FP32's spread over seeds the differences' own must not explain them either.
        beyond_luck = spread_known or (e.ci_low is not None and e.ci_low > 0)
        if least > limit and (e.num_pairs == 1 or beyond_luck):
            message = _gross_message(endpoint, e, least, rule)
            return gate_reason("GROSS_DEGRADATION", message, least, limit)
    return None


def _gross_limit(
    endpoint: Endpoint, e: Estimate, levels: Mapping[Endpoint, Level], rule: DecisionRule
) -> tuple[float, bool]:
    """Return what every difference must exceed to be gross, and whether seed luck is in it.

    Several margins, or several times the seed luck that a margin allows for. A margin may lie far
    below that luck (the cap, or one of the user's own); in a chaotic training every one of three
    harmless differences then exceeds several margins in up to one experiment of eight.
    """
    factor = rule.gross_margins if e.num_pairs > 1 else rule.gross_margins_single
    level = levels.get(endpoint)
    sigma = level.sigma if level is not None else None
    luck = rule.margin_seed_sd * sigma if sigma is not None else 0.0
    return factor * max(e.margin, luck), sigma is not None


def _gross_message(endpoint: Endpoint, e: Estimate, least: float, rule: DecisionRule) -> str:
    """Return what the harm is, what one margin is, and why that margin may look small."""
    every = f"every one of {e.num_pairs} seeds" if e.num_pairs > 1 else "the only seed"
    mean = f"{number(e.mean_difference)} {e.unit}"
    message = (
        f"In {ENDPOINT_NAMES[endpoint]} {every} is worse than FP32 by at least "
        f"{in_words(least, e.margin, signed=False)} ({mean} on average). One margin is "
        f"{number(e.margin)} {e.unit}: {margin_basis(e, rule.as_mapping())}"
    )
    if e.margin_term != "loss":
        return f"{message}."
    # The margin then is far below 1 % of what was learned, and the harm may be as well.
    return f"{message}, which is small beside the {number(e.progress)} {e.unit} that it learned."


def logged_in_low_precision(c: Comparison) -> str | None:
    """Return the 16-bit format that every logged loss of every seed is a value of, or None.

    It must be one that the candidate uses, or the reference's losses lie on it too: the mean of a
    few BF16 values has a few bits more, as an FP16 value has, and was nevertheless taken in FP32.
    """
    formats = {pair.candidate.loss_on_16bit_grid for pair in c.pairs}
    if len(formats) != 1:
        return None
    found = formats.pop()
    used = found in (c.policy.compute_format, c.policy.param_format)
    return found if used or all(p.reference.loss_on_16bit_grid == found for p in c.pairs) else None


def _loss_logged_low_precision(c: Comparison, rule: DecisionRule) -> Reason | None:
    fmt = logged_in_low_precision(c)
    if fmt is None or "held_out" in c.estimates:
        return None
    message = (
        f"Every training loss is exactly a {fmt.upper()} value and there is no held-out set: "
        "compute the loss in FP32 inside loss_fn, or differences below its rounding stay unseen."
    )
    return gate_reason("LOSS_LOGGED_LOW_PRECISION", message, None, None)


def _run_missing(c: Comparison, rule: DecisionRule) -> Reason | None:
    if not c.missing:
        return None
    message = (
        f"No finished run of {c.policy.name} for {seeds_text(c.missing)}; "
        "the same command again trains what is missing."
    )
    return gate_reason("RUN_MISSING", message, float(len(c.missing)), 0.0)


Gate = Callable[[Comparison, DecisionRule], Reason | None]
CRASH_GATES: tuple[tuple[Gate, Outcome], ...] = ((_crashed, "reject"),)
PAIRING_GATES: tuple[tuple[Gate, Outcome], ...] = ((_pairing_broken, "inconclusive"),)
# A NaN is a fact however the loss was logged, so the failures come before the gates that say that
# too little is known.
FAILURE_GATES: tuple[tuple[Gate, Outcome], ...] = (
    (_nonfinite, "reject"),
    (_loss_scale_collapse, "reject"),
    (_diverged, "reject"),
    (_loss_logged_low_precision, "inconclusive"),
    (_gross_degradation, "reject"),
    (_run_missing, "inconclusive"),
)
# Where a rival decides, what a failure is is its own affair.
RIVAL_GATES: tuple[tuple[Gate, Outcome], ...] = ((_run_missing, "inconclusive"),)


def apply_gates(
    comparison: Comparison,
    *,
    unstable: Reason | None,
    not_learning: Reason | None,
    rule: DecisionRule,
) -> tuple[Hit, ...]:
    """Return all gates that fired, the deciding one first.

    Order: broken pairs, an unstable reference, a crash (a fact that needs no learning reference),
    a reference that does not learn, then the failures of a trained candidate.
    """
    hits = _fired(PAIRING_GATES, comparison, rule)
    hits += _reference_hit(unstable)
    hits += _fired(CRASH_GATES, comparison, rule)
    hits += _reference_hit(not_learning)
    ours = rule.method == NON_INFERIORITY
    hits += _fired(FAILURE_GATES if ours else RIVAL_GATES, comparison, rule)
    return tuple(hits)


def _fired(
    gates: Iterable[tuple[Gate, Outcome]], comparison: Comparison, rule: DecisionRule
) -> list[Hit]:
    found = ((outcome, gate(comparison, rule)) for gate, outcome in gates)
    return [Hit(outcome=outcome, reason=reason) for outcome, reason in found if reason is not None]


def _reference_hit(reason: Reason | None) -> list[Hit]:
    return [] if reason is None else [Hit(outcome="inconclusive", reason=reason)]


def _whole(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs whose candidate has a finite loss at every step."""
    return [pair for pair in pairs if pair.fault is None and _is_whole(pair.candidate)]


@once_per_run
def _is_whole(record: RunRecord) -> bool:
    losses = record.series.get("loss", ())
    return len(losses) == record.num_steps and first_nonfinite(losses) is None
