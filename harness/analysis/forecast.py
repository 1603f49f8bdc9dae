"""What would settle an undecided verdict: further seeds, and the command that adds them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.analysis import statistics
from harness.analysis.decision import worst_endpoint
from harness.analysis.findings import Endpoint, Estimate
from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan
from harness.analysis.wording import in_margins

Lean = Literal["acceptable", "unacceptable", "unclear"]
_VALUE = r"""(?:'[^']*'|"[^"]*"|\([^)]*\)|\[[^\]]*\]|[^\s'"])*"""
_OVERRIDE = r"""(?<!\S)(?:'\+{0,2}%s=[^']*'|"\+{0,2}%s=[^"]*"|\+{0,2}%s=""" + _VALUE + r")(?!\S)"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """How many further seeds should settle a verdict, or why no number is given.

    Attributes:
        extra_seeds: None if nothing can be said or too many would be needed.
        reason: `UNRESOLVABLE_AT_NMAX` in the latter case, else None.
    """

    extra_seeds: int | None
    reason: str | None = None


def lean_of(estimates: Mapping[Endpoint, Estimate], *, probe_fails: bool = False) -> Lean:
    """Return where the means point: inside the margins, outside one, or nowhere (NaN).

    Means inside the margins of a candidate whose probe fails point nowhere.
    """
    if not estimates:
        return "unclear"
    relative = [in_margins(e.mean_difference, e.margin) for e in estimates.values()]
    if any(math.isnan(x) for x in relative) or max(relative) == 1:
        return "unclear"
    if max(relative) > 1:
        return "unacceptable"
    return "unclear" if probe_fails else "acceptable"


def forecast(estimates: Mapping[Endpoint, Estimate], rule: DecisionRule) -> Forecast:
    """Return the further seeds that should settle an undecided verdict with power `rule.power`.

    Leaning to acceptance, every endpoint must get there, so the slowest counts; leaning to
    rejection, the worst endpoint is enough. Mean and spread are taken as they are now; with one
    pair there is no spread, and the answer is what the test needs at least.
    """
    lean = lean_of(estimates)
    pairs = min((e.num_pairs for e in estimates.values()), default=0)
    if pairs < 2:
        return Forecast(extra_seeds=rule.min_pairs - pairs)
    if lean == "unclear":
        return Forecast(extra_seeds=None)
    if lean == "acceptable":
        needed = [_needed(e, rule.alpha, rule) for e in estimates.values()]
    else:
        e = estimates[worst_endpoint(estimates)]
        needed = [_needed(e, e.alpha_reject, rule)]
    known = [n for n in needed if n is not None]
    total = max([rule.min_pairs, *known])
    if len(known) < len(needed) or total > rule.max_pairs:
        return Forecast(extra_seeds=None, reason="UNRESOLVABLE_AT_NMAX")
    return Forecast(extra_seeds=total - pairs)


def forecast_looks(
    estimates: Mapping[Endpoint, Estimate], rule: DecisionRule, *, plan: SeedPlan, look: int
) -> Forecast:
    """Return the same for a plan with looks: the further seeds up to a look that should settle it.

    Before the last look only later looks count, each at its own level; at the last one any number
    of pairs up to `rule.forecast_limit`, at its level, in its place.

    Args:
        estimates: Of the look.
        rule: The rule of the whole plan or of the look.
        plan: When candidates are judged.
        look: The look that was undecided, from 0.
    """
    lean = lean_of(estimates)
    pairs = min((e.num_pairs for e in estimates.values()), default=0)
    later = range(look + 1, len(plan.looks))
    if pairs < rule.min_pairs:
        step = plan.looks[look + 1] - plan.looks[look] if later else rule.min_pairs - pairs
        return Forecast(extra_seeds=step)
    if lean == "unclear":
        return Forecast(extra_seeds=None)
    slow = (
        estimates
        if lean == "acceptable"
        else {k: estimates[k] for k in [worst_endpoint(estimates)]}
    )
    for k in later or range(look, look + 1):
        alpha, always_valid = plan.alphas[k], plan.kind == "always_valid"
        start = plan.looks[k] - plan.looks[look] + pairs if later else pairs + 1
        limit = start if later else rule.forecast_limit
        needed = [
            _needed(
                e,
                alpha if lean == "acceptable" else alpha * e.alpha_reject / e.alpha_accept,
                dataclasses.replace(rule, forecast_limit=limit, always_valid=always_valid),
                above=start - 1,
            )
            for e in slow.values()
        ]
        known = [n for n in needed if n is not None]
        if len(known) == len(needed):
            return Forecast(extra_seeds=max(known) - pairs)
    return Forecast(extra_seeds=None, reason="UNRESOLVABLE_AT_NMAX")


def min_detectable_harm(e: Estimate, rule: DecisionRule) -> float | None:
    """Return the harm these pairs would have rejected with probability `rule.power`.

    `margin + (t(n-1, 1-alpha_reject) + t(n-1, power)) * s/sqrt(n)`, in the endpoint's unit; None
    below `min_pairs` pairs, where nothing can be rejected by the test.
    """
    if e.sd is None or e.num_pairs < rule.min_pairs:
        return None
    return e.margin + statistics.detectable(
        e.sd / math.sqrt(e.num_pairs),
        e.num_pairs,
        alpha=e.alpha_reject,
        power=rule.power,
        always_valid=rule.always_valid,
    )


def settle_command(command: str, *, seeds: Sequence[int], extra: int) -> str | None:
    """Return `command` with seeds added, e.g. `... seed=0,1,2,3,4`; None for an empty command.

    Existing `seed=` overrides are replaced; new seeds are the smallest unused ones. Finished runs
    are reused by the command itself.
    """
    if not command:
        return None
    chosen = list(seeds)
    new = 0
    while len(chosen) < len(seeds) + extra:
        if new not in chosen:
            chosen.append(new)
        new += 1
    base = without_overrides(command, "seed", "decision.seeds")
    return f"{base} seed={','.join(str(seed) for seed in chosen)}"


def looks_command(command: str, looks: Sequence[int]) -> str | None:
    """Return `command` with these looks, quoted for a shell; None for an empty command."""
    if not command:
        return None
    base = without_overrides(command, "decision.looks")
    return f"{base} 'decision.looks=[{','.join(str(pairs) for pairs in looks)}]'"


def without_overrides(command: str, *keys: str) -> str:
    """Return a command line without what it sets of these keys; the rest stays as it is quoted."""
    for key in keys:
        name = re.escape(key)
        command = re.sub(_OVERRIDE % (name, name, name), "", command)
    return re.sub(r"(?<=\S) {2,}", " ", command).strip()


def _needed(
    e: Estimate, alpha: float, rule: DecisionRule, *, above: int | None = None
) -> int | None:
    """Return the pairs that should settle one endpoint: more than `above`, or than there are."""
    if e.sd is None:
        return None
    return statistics.pairs_needed(
        distance=abs(e.margin - e.mean_difference),
        sd=e.sd,
        num_pairs=e.num_pairs if above is None else above,
        alpha=alpha,
        power=rule.power,
        limit=rule.forecast_limit,
        always_valid=rule.always_valid,
    )
