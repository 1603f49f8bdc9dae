"""The policy that the evidence on a failed candidate points to, where the grid has not tried it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.fallbacks import failed_by_probe
from harness.analysis.findings import Verdict
from harness.analysis.remedies import Remedy, remedies
from harness.precision.policy import PrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class FallbackPolicy:
    """A policy to try next.

    Attributes:
        of: Name of the candidate that failed.
        policy: What to train instead, with a name and a description of its own.
    """

    of: str
    policy: PrecisionPolicy


def suggested_fallback(
    verdict: Verdict, candidates: Sequence[Verdict], *, flushed_limit: float
) -> FallbackPolicy | None:
    """Return the policy that the evidence on one candidate points to, or None.

    The first remedy that is a change of the policy and that no candidate of the grid follows yet.
    None for a candidate that did not fail, where the evidence names nothing, and where a candidate
    of the grid follows it and is not rejected: what it says then is the answer.

    Args:
        verdict: Any candidate's verdict.
        candidates: All candidates of the grid, this one among them.
        flushed_limit: As for `remedies`.
    """
    failed = verdict.outcome == "reject" or failed_by_probe(verdict)
    if not failed or verdict.is_control:
        return None
    for remedy in remedies(verdict, flushed_limit=flushed_limit):
        if remedy.only_if_tried:
            continue  # a guess; the grid's own policies are the place for those
        tried = [v for v in candidates if v is not verdict and _follows(v, remedy, verdict)]
        if any(v.outcome != "reject" for v in tried):
            return None
        found = None if tried else _policy_of(remedy, verdict)
        if found is not None:
            return FallbackPolicy(of=verdict.policy, policy=found)
    return None


def suggested_fallbacks(
    candidates: Sequence[Verdict], *, flushed_limit: float, done: Sequence[str] = ()
) -> tuple[FallbackPolicy, ...]:
    """Return at most one policy to try for each failed candidate, none of them twice.

    Args:
        candidates: All candidates of the grid.
        flushed_limit: As for `remedies`.
        done: Names of policies that were fallbacks themselves, or already have one.
    """
    found: dict[str, FallbackPolicy] = {}
    for verdict in candidates:
        if verdict.policy in done:
            continue
        fallback = suggested_fallback(verdict, candidates, flushed_limit=flushed_limit)
        if fallback is not None:
            found.setdefault(fallback.policy.content_hash(), fallback)
    contents = [v.policy_content for v in candidates]
    return tuple(f for f in found.values() if f.policy.content() not in contents)


def offer(
    verdict: Verdict, candidates: Sequence[Verdict], *, flushed_limit: float, automatic: bool
) -> str:
    """Return a sentence on how to try the fallback of a failed candidate; empty without any.

    Args:
        verdict: The candidate.
        candidates: All candidates of the grid.
        flushed_limit: As for `remedies`.
        automatic: Whether the sweep tries fallbacks by itself.
    """
    if automatic:
        return ""
    fallback = suggested_fallback(verdict, candidates, flushed_limit=flushed_limit)
    if fallback is None:
        return ""
    return " decision.try_fallback=true trains and judges that in the same sweep."


def _follows(candidate: Verdict, remedy: Remedy, failed: Verdict) -> bool:
    if remedy.does_it is not None:
        return remedy.does_it(candidate)
    changed = {**failed.policy_content, **remedy.changes}
    return bool(remedy.changes) and candidate.policy_content == changed


def _policy_of(remedy: Remedy, failed: Verdict) -> PrecisionPolicy | None:
    """Return the policy that follows a remedy; None if it is no change, or FP32 itself."""
    if not remedy.changes:
        return None
    policy = PrecisionPolicy.from_mapping(
        {
            **failed.policy_content,
            **remedy.changes,
            "name": f"{failed.policy}_{remedy.suffix}",
            "description": f"Fallback for {failed.policy}: {_without_setting(remedy.text)}.",
        }
    )
    unchanged = policy.content() == failed.policy_content
    return None if unchanged or policy.computes_in_fp32 else policy


def _without_setting(text: str) -> str:
    """Return the remedy without the setting in brackets that would ask for it by hand."""
    return text.split(" (")[0]
