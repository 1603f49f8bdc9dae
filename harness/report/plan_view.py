"""Why each policy stopped, what was saved, and what each verdict could not have seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.analysis.findings import Endpoint, LookSummary, ModelFindings, Verdict
from harness.analysis.wording import ENDPOINT_NAMES, counted, in_words, listing, number
from harness.report.text import (
    ENDPOINT_LABELS,
    NOT_AVAILABLE,
    candidates,
    interval_text,
    is_number,
    outcome_label,
    percent_text,
    shown_endpoints,
    significant,
)

_DECISIONS = {
    "accepted": "accepted",
    "rejected": "rejected",
    "gate": "rejected by a gate",
    "probe": "loss passed, arithmetic did not",
    "last_look": "undecided",
    "unfinished": "not yet settled",
    "went_on": "undecided, went on",
}
_NEED_WORDS = ("gate", "probe", "unfinished")


@dataclass(frozen=True, kw_only=True)
class LookRow:
    """One look at one policy.

    Attributes:
        policy: Its name.
        label: Its verdict, `accept` and so on.
        first: Whether this is the policy's first row.
        look: `2 of 3`.
        seeds: Pairs that the look is over.
        intervals: Endpoint label -> mean and interval in margins.
        level: What the look may err.
        decision: What came of it.
        sentence: Why nothing was looked at after it, where `decision` does not say all.
    """

    policy: str
    label: str
    first: bool
    look: str
    seeds: str
    intervals: dict[str, str]
    level: str
    decision: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """What one verdict speaks for.

    Attributes:
        policy: Its name.
        label: Its verdict.
        scope: Steps, batch, device and seeds.
        harm: The smallest harm that the runs would have rejected with 80 % power, or why none.
        failures: The failure rate that the runs could not have seen, or why there is no figure.
        adjusted: p-value of the acceptance after Holm's adjustment.
    """

    policy: str
    label: str
    scope: str
    harm: str
    failures: str
    adjusted: str


def look_rows(findings: ModelFindings) -> tuple[LookRow, ...]:
    """Return every look at every candidate, in grid order; empty for a plan without looks."""
    if findings.plan is None or not findings.plan.adaptive:
        return ()
    endpoints = shown_endpoints(findings)
    return tuple(
        _look_row(verdict, look, endpoints)
        for verdict in candidates(findings)
        for look in verdict.looks
    )


def _look_row(verdict: Verdict, look: LookSummary, endpoints: tuple[Endpoint, ...]) -> LookRow:
    decision = _DECISIONS[look.stop]
    if look.stop == "gate" and verdict.outcome != "reject":
        decision = "no verdict possible"
    held_back = look.stop == "last_look" and any(
        reason.code == "HOLM_NOT_MET" and reason.kind == "test" for reason in verdict.reasons
    )
    return LookRow(
        policy=verdict.policy,
        label=outcome_label(verdict),
        first=look is verdict.looks[0],
        look=f"{look.index} of {look.of}",
        seeds=str(look.pairs),
        intervals={ENDPOINT_LABELS[e]: _interval(look, e) for e in endpoints},
        level=number(look.alpha),
        decision=decision,
        sentence=look.sentence if look.stop in _NEED_WORDS or held_back else "",
    )


def _interval(look: LookSummary, endpoint: Endpoint) -> str:
    low, mean, high = look.intervals.get(endpoint, (None,) * 3)
    return interval_text(mean, low, high) if is_number(mean) else NOT_AVAILABLE


def plan_line(findings: ModelFindings) -> str:
    """Return when policies were judged, as a sentence; empty where that is not known."""
    plan = findings.plan
    if plan is None:
        return ""
    pairs = listing([str(n) for n in plan.looks])
    if plan.kind == "fixed":
        seeds = counted(plan.max_pairs, "seed")
        return (
            f"Fixed plan: every policy on {seeds}, judged once at level {number(plan.alphas[0])}."
        )
    if plan.kind == "looks":
        levels = listing([number(alpha) for alpha in plan.alphas])
        if len(plan.looks) == 1:
            return f"One look at {pairs} seeds, which may err with probability {levels}."
        return (
            f"Looks at {pairs} seeds, which may err with probability {levels}, together at most "
            f"{number(sum(plan.alphas))}: a policy that a look settles gets no further runs."
        )
    return (
        f"A look after every seed from {plan.looks[0]} to {plan.max_pairs}: the intervals are "
        f"wider, and err at any of the looks with probability {number(plan.alphas[0])} at most."
    )


def savings_line(findings: ModelFindings) -> str:
    """Return what stopping early saved; empty for a fixed plan."""
    saved = findings.savings
    if saved is None:
        return ""
    who = [f"{policy} {count}" for policy, count in saved.by_policy.items()]
    return f"{saved.sentence} Not run: {listing(who)}." if who else saved.sentence


def claim_rows(findings: ModelFindings) -> tuple[ClaimRow, ...]:
    """Return for every candidate, whatever its verdict, what it speaks for and what it missed."""
    return tuple(
        ClaimRow(
            policy=verdict.policy,
            label=outcome_label(verdict),
            scope=verdict.scope or findings.scope,
            harm=smallest_harm(verdict),
            failures=unseen_failures(verdict),
            adjusted=significant(verdict.p_accept_holm, 2),
        )
        for verdict in candidates(findings)
    )


def smallest_harm(verdict: Verdict) -> str:
    """Return per endpoint the smallest harm that the runs could have shown, or why there is none.

    In margins and in the endpoint's unit: `+1.30 margins (0.0261 nats) in training loss`.
    """
    found = []
    for endpoint, harm in verdict.min_detectable_harm.items():
        estimate = verdict.estimates.get(endpoint)
        if estimate is None or not is_number(harm):
            continue
        size = in_words(harm, estimate.margin, signed=False)
        unit = f" ({number(harm)} {estimate.unit})" if "margins" in size else f" {estimate.unit}"
        found.append(f"{size}{unit} in {ENDPOINT_NAMES[endpoint]}")
    text = "; ".join(found)
    if verdict.min_detectable_harm_note:
        text = (
            f"{text}. {verdict.min_detectable_harm_note}"
            if text
            else verdict.min_detectable_harm_note
        )
    return text or NOT_AVAILABLE


def unseen_failures(verdict: Verdict) -> str:
    """Return the failure rate that the runs leave open at 95 %, or why there is no such figure."""
    if verdict.failure_rate_bound is None:
        return verdict.failure_rate_note or NOT_AVAILABLE
    runs = counted(len(verdict.seeds_used), "run")
    return f"up to {percent_text(verdict.failure_rate_bound)} (none in {runs})"


def holm_line(findings: ModelFindings) -> str:
    """Return what the adjusted p-values are and whether they bind."""
    if all(v.p_accept_holm is None for v in findings.verdicts):
        return ""
    count = len(candidates(findings))
    if findings.rule.get("familywise"):
        binding = "It was binding here (decision.familywise=true)."
    else:
        binding = "It is shown and not binding; decision.familywise=true makes it so."
    return (
        f"The adjusted p-value (Holm) is of the acceptance, over {counted(count, 'candidate')}: "
        f"the choice picks among them. {binding}"
    )


def settle_lists(findings: ModelFindings) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return (policy, what would settle it) for the candidates that stayed undecided."""
    return tuple((v.policy, v.settle) for v in candidates(findings) if v.settle)


def short_claims(findings: ModelFindings) -> Iterator[str]:
    """Yield what the verdicts could not have seen in a few lines, for a terminal."""
    harms = []
    for verdict in candidates(findings):
        sizes = [
            (harm / verdict.estimates[e].margin, e)
            for e, harm in verdict.min_detectable_harm.items()
            if e in verdict.estimates and verdict.estimates[e].margin > 0 and is_number(harm)
        ]
        size = in_words(max(sizes)[0], 1.0, unit=False, signed=False) if sizes else "none"
        harms.append(f"{verdict.policy}: {size}")
    if harms:
        yield f"Smallest harm that would have shown (80 % power), in margins: {', '.join(harms)}."
    rates: dict[str, list[str]] = {}
    for verdict in candidates(findings):
        if verdict.failure_rate_bound is not None:
            text = percent_text(verdict.failure_rate_bound)
            rates.setdefault(text, []).append(verdict.policy)
    if rates:
        text = "; ".join(f"{rate}: {', '.join(names)}" for rate, names in rates.items())
        yield f"Failure rate that would have gone unseen, up to: {text}."
