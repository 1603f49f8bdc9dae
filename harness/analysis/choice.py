"""Which policy to train in, given the verdicts: by measured speed on a GPU, by a fixed order else.

On a CPU step times say nothing about a GPU, so the order of formats is assumed and said so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.eligibility import (
    by_format,
    departs_from_autocast,
    is_eligible,
    never_chosen_because,
    width,
)
from harness.analysis.fallback_policy import offer
from harness.analysis.fallbacks import (
    failed_by_probe,
    fallback_reasons,
    probe_reason,
    rejection_reason,
)
from harness.analysis.findings import Choice, Reason, Verdict
from harness.analysis.rule import DecisionRule
from harness.analysis.wording import ENDPOINT_NAMES, in_margins, in_words, listing, seeds_text

MEASURED = "measured"
ASSUMED = "assumed, not measured"


@dataclass(frozen=True, kw_only=True)
class ChoiceInput:
    """What the choice is made from.

    Attributes:
        workload: Model name.
        reference: Name of the FP32 policy.
        verdicts: In grid order, the control included.
        blocked: The gate on the reference that forbids any recommendation, if one fired.
        num_steps: Length of the runs.
        measured: Whether step-time ratios of this machine may decide.
    """

    workload: str
    reference: str
    verdicts: tuple[Verdict, ...]
    blocked: Reason | None
    num_steps: int
    measured: bool


def choose(given: ChoiceInput, rule: DecisionRule) -> Choice:
    """Return the recommendation.

    Its policy is None only if the reference cannot judge, or fewer than `rule.min_pairs` pairs of
    every candidate leave nothing but undecided ones; otherwise a policy, the reference if nothing
    else is accepted or worth it.
    """
    basis = MEASURED if given.measured else ASSUMED
    candidates = [v for v in given.verdicts if not v.is_control]
    if given.blocked is not None:
        sentence = f"No recommendation for {given.workload}: {_lower_first(given.blocked.message)}"
        return Choice(policy=None, sentence=sentence, speed_basis=basis)
    if candidates and all(
        v.outcome == "inconclusive" and len(v.seeds_used) < rule.min_pairs for v in candidates
    ):
        return Choice(
            policy=None,
            sentence=_too_few_sentence(given, candidates, rule),
            speed_basis=basis,
            reasons=_enough_seeds(candidates),
        )
    eligible = [v for v in candidates if v.outcome == "accept" and is_eligible(v)]
    ranked = _by_speed(eligible, given, rule) if given.measured else by_format(eligible)
    reasons = _reasons(given, candidates, ranked, rule)
    if not ranked:
        return Choice(
            policy=given.reference,
            sentence=_stay_sentence(given, candidates, rule),
            speed_basis=basis,
            reasons=reasons,
        )
    return Choice(
        policy=ranked[0].policy,
        sentence=_train_sentence(given, ranked[0]),
        speed_basis=basis,
        reasons=reasons,
    )


def _by_speed(eligible: Sequence[Verdict], given: ChoiceInput, rule: DecisionRule) -> list[Verdict]:
    """Return the accepted candidates that are measurably faster than FP32, the choice first.

    Score: speed-up times the share of the run left after the steps by which it lags; FP32 itself
    has the score 1, so what scores no more is left out. The best score wins; among scores within
    `speed_tie` of it, the wider format. What departs from autocast's lists comes last: it is
    chosen only where nothing else is left.
    """
    faster = [v for v in eligible if _is_faster(v, rule) and _score(v, given) > 1]
    fast = sorted(faster, key=lambda v: (departs_from_autocast(v), -_score(v, given)))
    if not fast:
        return []
    plain = [v for v in fast if not departs_from_autocast(v)] or fast
    best = _score(plain[0], given)
    tied = [v for v in plain if _score(v, given) >= best * (1 - rule.speed_tie)]
    first = min(tied, key=width)
    return [first, *(v for v in fast if v is not first)]


def _is_faster(verdict: Verdict, rule: DecisionRule) -> bool:
    ratio = verdict.step_time_ratio
    return ratio is not None and ratio.ci_high is not None and ratio.ci_high * rule.min_speedup < 1


def _score(verdict: Verdict, given: ChoiceInput) -> float:
    assert verdict.step_time_ratio is not None
    lag = max(0.0, verdict.lag_steps or 0.0)
    # FP32's slope may be next to nothing at the end of a run, and the lag longer than the run.
    return max(0.0, 1 - lag / given.num_steps) / verdict.step_time_ratio.value


def _train_sentence(given: ChoiceInput, verdict: Verdict) -> str:
    if verdict.main_reason.code == "RIVAL_RULE":
        why = _lower_first(verdict.main_reason.message)
        return f"Train {given.workload} in {verdict.policy}, if you trust this rule: {why}"
    bounds = {k: e for k, e in verdict.estimates.items() if e.ci_high is not None}
    worst = max(bounds, key=lambda k: in_margins(bounds[k].ci_high, bounds[k].margin))
    loss, note = "training and held-out loss stay", ""
    if len(bounds) == 1:
        loss = f"{ENDPOINT_NAMES[worst]} stays"
        note = ", no held-out set" if worst == "train" else ", the training loss was not tested"
    sentence = (
        f"Train {given.workload} in {verdict.policy}: over the first {given.num_steps} steps its "
        f"{loss} within the margin of FP32 (at worst "
        f"{in_words(bounds[worst].ci_high, bounds[worst].margin)}, {len(verdict.seeds_used)} seeds"
        f"{note})"
    )
    if given.measured and verdict.step_time_ratio is not None:
        sentence += f", and a step takes {verdict.step_time_ratio.value:.2f} of FP32's time"
    return f"{sentence}."


def _too_few_sentence(given: ChoiceInput, candidates: Sequence[Verdict], rule: DecisionRule) -> str:
    tested = [v for v in candidates if v.main_reason.kind != "gate"]
    if not tested:
        why = _lower_first(candidates[0].main_reason.message)
        return f"No recommendation for {given.workload}: {why}"
    seeds = sorted({seed for v in tested for seed in v.seeds_used})
    return (
        f"No recommendation for {given.workload} yet: {seeds_text(seeds)} can show a gross "
        f"failure, and none occurred, but a verdict needs {rule.min_pairs} seeds."
    )


def _stay_sentence(given: ChoiceInput, candidates: Sequence[Verdict], rule: DecisionRule) -> str:
    if not candidates:
        return f"Stay in {given.reference} for {given.workload}: the grid has no candidate."
    accepted = [v for v in candidates if v.outcome == "accept" and is_eligible(v)]
    if accepted:
        verb, which = ("is", "it is not") if len(accepted) == 1 else ("are", "none is")
        why = f"{which} measurably faster here"
        if any(_is_faster(v, rule) for v in accepted):
            why = f"{which} fast enough here to make up for the steps by which it lags"
        return (
            f"Stay in {given.reference} for {given.workload}: "
            f"{listing([v.policy for v in accepted])} {verb} accepted, but {why}."
        )
    parts = [
        f"{listing([v.policy for v in group])} {word}"
        for outcome, word in (
            ("reject", "rejected"),
            ("inconclusive", "undecided"),
            ("accept", "accepted on loss alone"),
        )
        if (group := [v for v in candidates if v.outcome == outcome])
    ]
    return f"Stay in {given.reference} for {given.workload}: {listing(parts)}."


def _reasons(
    given: ChoiceInput,
    candidates: Sequence[Verdict],
    ranked: Sequence[Verdict],
    rule: DecisionRule,
) -> tuple[str, ...]:
    reasons: list[str] = []
    if len(ranked) > 1:
        reasons.append(f"Runner-up: {ranked[1].policy}, also accepted.")
    chosen = ranked[0] if ranked else None
    if chosen and chosen.p_accept_holm is not None and chosen.p_accept_holm > rule.alpha:
        reasons.append(
            f"Adjusted for the number of candidates (Holm), {chosen.policy} has "
            f"p = {chosen.p_accept_holm:.2g}, above {rule.alpha:g}."
        )
    reasons += _undecided_reasons(
        _worth_settling(candidates, chosen, given), measured=given.measured
    )
    reasons += fallback_reasons(candidates, chosen=chosen)
    limit = rule.flushed_share
    reasons += [
        rejection_reason(v, candidates, flushed_limit=limit) + _offer(v, candidates, rule)
        for v in candidates
        if v.outcome == "reject"
    ]
    reasons += [
        probe_reason(v, candidates, flushed_limit=limit) + _offer(v, candidates, rule)
        for v in candidates
        if failed_by_probe(v)
    ]
    for verdict in candidates:
        hazard = never_chosen_because(verdict)
        if verdict.outcome == "accept" and hazard is not None:
            reasons.append(f"{verdict.policy} is accepted on loss but not recommended: {hazard}.")
    if chosen is not None and departs_from_autocast(chosen):
        reasons.append(
            f"Caution: {chosen.policy} also lowers ops that autocast keeps in FP32 (exponentials, "
            "sums, normalization); its acceptance rests on the range of values in this run."
        )
    if not given.measured:
        reasons.append("Speed: assumed from the formats, not measured on a GPU.")
    return tuple(reasons)


def _offer(verdict: Verdict, candidates: Sequence[Verdict], rule: DecisionRule) -> str:
    limit, automatic = rule.flushed_share, rule.try_fallback
    return offer(verdict, candidates, flushed_limit=limit, automatic=automatic)


def _worth_settling(
    candidates: Sequence[Verdict], chosen: Verdict | None, given: ChoiceInput
) -> list[Verdict]:
    """Return the undecided candidates that would be preferred to the choice if accepted."""
    undecided = [
        v
        for v in candidates
        if v.outcome == "inconclusive"
        and v.lean != "unacceptable"
        and is_eligible(v)
        and not failed_by_probe(v)
    ]
    if chosen is None:
        return undecided
    if not given.measured:
        order = by_format([*undecided, chosen])
        return order[: order.index(chosen)]
    assert chosen.step_time_ratio is not None
    return [
        v
        for v in undecided
        if v.step_time_ratio is not None and v.step_time_ratio.value < chosen.step_time_ratio.value
    ]


def _undecided_reasons(undecided: Sequence[Verdict], *, measured: bool) -> tuple[str, ...]:
    reasons = []
    for verdict in undecided:
        speed = ""
        if measured and verdict.step_time_ratio is not None:
            speed = f" and would take {verdict.step_time_ratio.value:.2f} of FP32's step time"
        text = f"{verdict.policy} is undecided{speed}"
        if verdict.extra_seeds and verdict.settle_command:
            plural = "" if verdict.extra_seeds == 1 else "s"
            text += (
                f"; {verdict.extra_seeds} more seed{plural} should settle it: "
                f"{verdict.settle_command}"
            )
            reasons.append(text)
        else:
            # Where no seeds are named, what would settle it instead.
            advice = [r.message for r in verdict.reasons if r.code == verdict.extra_seeds_reason]
            reasons.append(" ".join([f"{text}: {verdict.main_reason.message}", *advice]))
    return tuple(reasons)


def _enough_seeds(candidates: Sequence[Verdict]) -> tuple[str, ...]:
    """Return how to get to a verdict when there are too few seeds for any."""
    commands = {v.extra_seeds: v.settle_command for v in candidates if v.settle_command}
    if not commands:
        return ()
    extra = min(key for key in commands if key is not None)
    plural = "" if extra == 1 else "s"
    return (f"{extra} more seed{plural} would make a verdict possible: {commands[extra]}",)


def _lower_first(text: str) -> str:
    """Lower the first letter, unless it starts a name such as FP32."""
    return text if text[:2].isupper() else text[:1].lower() + text[1:]
