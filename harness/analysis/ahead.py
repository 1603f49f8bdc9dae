"""What lies ahead of an undecided verdict: further seeds, the command for them, other ways out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.decision import TestResult
from harness.analysis.explanation import Explanation
from harness.analysis.findings import Endpoint, Estimate, Reason
from harness.analysis.forecast import (
    Forecast,
    forecast,
    forecast_looks,
    lean_of,
    looks_command,
    settle_command,
)
from harness.analysis.gates import Hit
from harness.analysis.methods import NON_INFERIORITY
from harness.analysis.setting import Setting
from harness.analysis.settling import settle_sentences
from harness.analysis.wording import listing


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """What would settle a verdict; all empty where it is settled.

    Attributes:
        extra_seeds: Further seeds that should.
        reason: Code of why no number is given: `UNRESOLVABLE_AT_NMAX`, or a failing probe.
        unresolvable: The reason to print in the first case.
        command: The command that adds the seeds.
        sentences: All ways out, where no look follows.
    """

    extra_seeds: int | None = None
    reason: str | None = None
    unresolvable: Reason | None = None
    command: str | None = None
    sentences: tuple[str, ...] = ()


def look_ahead(
    hits: Sequence[Hit],
    test: TestResult,
    explanation: Explanation,
    estimates: Mapping[Endpoint, Estimate],
    setting: Setting,
) -> Ahead:
    """Return what would settle the verdict: seeds, unless the probe forbids an acceptance.

    Where the means lie inside the margins, more seeds could only lead to the acceptance that the
    probe turns into an undecided verdict; too few seeds for a test say nothing yet.
    """
    if hits or setting.rule.method != NON_INFERIORITY:
        return Ahead()
    probe = explanation.probe
    failing = probe.failing if probe is not None else ()
    if failing and (test.outcome == "accept" or _only_acceptance_ahead(test, estimates)):
        return Ahead(reason=failing[0])
    if test.outcome != "inconclusive":
        return Ahead()
    found = _forecast(estimates, setting)
    sentences: tuple[str, ...] = ()
    if setting.last_look and test.reason.code == "CI_SPANS_MARGIN":
        sentences = _sentences(estimates, setting, probe_fails=bool(failing))
    return Ahead(
        extra_seeds=found.extra_seeds,
        reason=found.reason,
        unresolvable=None if found.reason is None else _unresolvable(found.reason, setting),
        command=_command(found.extra_seeds, setting),
        sentences=sentences,
    )


def _only_acceptance_ahead(test: TestResult, estimates: Mapping[Endpoint, Estimate]) -> bool:
    return test.reason.code == "CI_SPANS_MARGIN" and lean_of(estimates) == "acceptable"


def _forecast(estimates: Mapping[Endpoint, Estimate], setting: Setting) -> Forecast:
    if setting.plan is None or not setting.adaptive:
        return forecast(estimates, setting.rule)
    return forecast_looks(estimates, setting.rule, plan=setting.plan, look=setting.look)


def _sentences(
    estimates: Mapping[Endpoint, Estimate], setting: Setting, *, probe_fails: bool
) -> tuple[str, ...]:
    if any(e.ci_high is None for e in estimates.values()):
        return ()
    # Up to the limit of the forecast: whether that many are affordable is the reader's to say.
    far = dataclasses.replace(
        setting.rule, max_pairs=max(setting.rule.max_pairs, setting.rule.forecast_limit)
    )
    found = _forecast(estimates, dataclasses.replace(setting, rule=far))
    extra = found.extra_seeds
    return settle_sentences(
        estimates,
        total=None if extra is None else len(setting.seeds) + extra,
        command=_command(extra, setting),
        rule=setting.rule,
        probe_fails=probe_fails,
    )


def _command(extra: int | None, setting: Setting) -> str | None:
    """Return the command that adds the seeds: the same one again while looks are left."""
    if extra is None:
        return None
    if setting.plan is None or not setting.adaptive:
        return settle_command(setting.command, seeds=setting.seeds, extra=extra)
    if not setting.last_look:
        return setting.command or None
    # The new look takes the place of the last one, at its level: that level is spent twice, and
    # the chance of an error at the margin rises by it, no more.
    looks = (*setting.rule.looks[:-1], setting.plan.max_pairs + extra)
    return looks_command(setting.command, looks)


def _unresolvable(code: str, setting: Setting) -> Reason:
    message = (
        "No affordable number of further seeds should settle this: a larger held-out set, a "
        "longer run or a wider margin would."
    )
    if not setting.last_look and setting.plan is not None:
        left = listing([str(pairs) for pairs in setting.plan.looks[setting.look + 1 :]])
        message = (
            f"At the present mean and spread the looks that are left ({left} seeds) should not "
            "settle this."
        )
    return Reason(code=code, message=message, kind="test")
