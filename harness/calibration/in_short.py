"""The first lines of the document: what the measured rates say about an ACCEPT and a REJECT."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.analysis.wording import counted
from harness.calibration.contenders import OURS
from harness.calibration.page_text import interval_text, margins_text, share_text
from harness.calibration.plans import LOOKS
from harness.calibration.rates import Half, Rate, arms_of, mean_of, rate
from harness.calibration.results import ArmResult, Group, ShiftCurve, TaskResult
from harness.calibration.shifts import SHIFTS
from harness.calibration.tables import PLAN_NAMES

_KEY = f"{OURS}@{LOOKS}"
_NEAR = (1.0, 1.25, 1.5)


def in_short(tasks: Sequence[TaskResult], half: Half | None, *, names: str) -> str:
    """Return a list of what the default looks got right and wrong; empty where nothing had them.

    Args:
        tasks: The results.
        half: The half that is reported.
        names: Of its tasks, in words.
    """
    harm, harmless = arms_of(tasks, "harm", half=half), arms_of(tasks, "harmless", half=half)
    accepted, rejected = rate(harm, _KEY, "accept"), rate(harmless, _KEY, "reject")
    if accepted is None or rejected is None:
        return ""
    lines = [
        f"**Can a verdict be trusted?** With the default {PLAN_NAMES[LOOKS]}, on {names}:",
        f"**Accept.** {_of(accepted)} that harm by more than a margin were accepted in "
        f"{_share(accepted)}.",
        _near_misses(tasks, half),
        _outside(tasks, half),
        f"**Reject.** {_of(rejected)} in low precision that do no harm were rejected in "
        f"{_share(rejected)}.",
        _undecided(tasks, half),
        "**Only as far as this goes:** small models, short runs, a CPU; the limits are under "
        "*What this does not show*.",
    ]
    head, *items = (line for line in lines if line)
    return "\n".join([head, "", *(f"- {item}" for item in items)])


def _of(found: Rate) -> str:
    return f"The {counted(found.num_arms, 'arm')}"


def _share(found: Rate) -> str:
    return (
        f"{share_text(found.mean)} of the draws (95 % interval {interval_text(found)}), the worst "
        f"of them in {share_text(found.worst)}"
    )


def _near_misses(tasks: Sequence[TaskResult], half: Half | None) -> str:
    """Return what happens to differences at the margin, which no planted fault is sure to be."""
    chosen = {arm.task for arm in arms_of(tasks, half=half)}
    curves = [c for t in tasks if t.task in chosen for c in t.shifts if c.plan == LOOKS]
    if not curves:
        return ""
    found = [[_accepted_at(curve, shift) for curve in curves] for shift in _NEAR]
    sizes = " / ".join(f"{shift:g}" for shift in _NEAR)
    means = " / ".join(f"{sum(shares) / len(shares):.0f}" for shares in found)
    most = " / ".join(f"{max(shares):.0f}" for shares in found)
    return (
        f"**Close to the margin, less.** True differences of {sizes} margins were accepted in "
        f"{means} % of the draws, on the worst source of noise in {most} %: a draw measures its "
        "own margin."
    )


def _accepted_at(curve: ShiftCurve, shift: float) -> float:
    return 100 * curve.points[SHIFTS.index(shift)].accept


def _outside(tasks: Sequence[TaskResult], half: Half | None) -> str:
    """Return the arms whose harm comes in few seeds, which are in no rate, and were accepted."""
    rare = arms_of(tasks, "intermittent", half=half)
    unsure = [a for a in arms_of(tasks, "grey", half=half, least_size=1.0) if _accepts(a) > 0]
    found = [
        _told(
            rare,
            "fail in some seeds but in fewer than a quarter",
            lambda a: f"{share_text(a.truth.hard_failures)} of the seeds fail",
        ),
        _told(
            unsure,
            "are worse by more than a margin in the mean of seeds that do not agree",
            lambda a: f"{margins_text(a.truth.size)} margins",
        ),
    ]
    told = "; ".join(text for text in found if text)
    if not told:
        return ""
    return f"**Harm that few seeds show can be missed,** and is in none of these rates: {told}."


def _told(arms: Sequence[ArmResult], what: str, detail: Callable[[ArmResult], str]) -> str:
    if not arms:
        return ""
    each = ", ".join(
        f"`{a.task}/{a.name}` in {share_text(_accepts(a))} ({detail(a)})"
        for a in sorted(arms, key=_accepts, reverse=True)
    )
    return f"of the arms that {what}, accepted were {each}"


def _accepts(arm: ArmResult) -> float:
    return arm.tallies[_KEY].accept if _KEY in arm.tallies else 0.0


def _undecided(tasks: Sequence[TaskResult], half: Half | None) -> str:
    groups: tuple[tuple[Group, str], ...] = (
        ("harm", "of harmful arms"),
        ("harmless", "of harmless low precision"),
        ("quiet_fault", "of planted faults that do no harm in these steps"),
        ("grey", "of arms between half a margin and one or not known well enough"),
    )
    found = [
        (mean_of(arms_of(tasks, group, half=half), _KEY, lambda t: t.inconclusive), what)
        for group, what in groups
    ]
    told = ", ".join(f"{share_text(share)} {what}" for share, what in found if share is not None)
    return f"**Undecided** after the last look: {told}."
