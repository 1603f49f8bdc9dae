"""The tables that name single arms: planted faults, all arms, and who makes a target be missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.calibration.contenders import LOSS_ONLY, OURS
from harness.calibration.page_text import ABSENT, margins_text, rate_text, share_text, table
from harness.calibration.plans import LOOKS
from harness.calibration.rates import arms_of, rate, share_of
from harness.calibration.results import ArmResult, TaskResult
from harness.calibration.tables import PLAN_NAMES, three_shares, wanted_text
from harness.calibration.targets import Target


def fault_table(tasks: Sequence[TaskResult], sentences: Mapping[str, str]) -> str:
    """Return each family of planted faults: what it is, its sizes, and how often it was missed.

    Args:
        tasks: The results.
        sentences: Family -> what is wrong; one that is not there has its first arm's sentence.
    """
    families: dict[str, list[ArmResult]] = {}
    for arm in arms_of(tasks):
        if arm.kind == "fault":
            families.setdefault(arm.family, []).append(arm)
    rows = []
    for family, arms in sorted(families.items()):
        sizes = [arm.truth.size for arm in arms if arm.group != "void"]
        harm = [arm for arm in arms if arm.group == "harm"]
        key = f"{OURS}@{LOOKS}"
        rows.append(
            [
                f"`{family}`",
                sentences.get(family, arms[0].sentence),
                str(len(arms)),
                _from_to(sizes),
                str(len(harm)),
                rate_text(rate(harm, key, "reject"), worst=False),
                rate_text(rate(harm, key, "accept"), worst=False),
            ]
        )
    headings = (
        "fault", "what is wrong", "arms", "size in margins", "harmful", "of these rejected",
        "accepted",
    )  # fmt: skip
    return table(headings, rows, numbers=5)


def arm_table(tasks: Sequence[TaskResult]) -> str:
    """Return every arm with its truth and how our rule judged it."""
    rows = [arm_row(arm) for task in tasks for arm in task.arms]
    return table(ARM_HEADINGS, rows, numbers=5)


ARM_HEADINGS = (
    "task", "arm", "planted as", "is", "training loss", "held-out loss", "seeds that fail", "probe",
    "n = 3: a / u / r", "n = 5: a / u / r", "n = 8: a / u / r", "looks: a / u / r", "pairs",
)  # fmt: skip


def arm_row(arm: ArmResult) -> list[str]:
    """Return one arm as a row; a / u / r are accepted, undecided and rejected."""
    effects = [arm.truth.effects.get(endpoint) for endpoint in ("train", "held_out")]
    looks = arm.tallies.get(f"{OURS}@{LOOKS}")
    return [
        f"`{arm.task}`",
        f"`{arm.name}`",
        arm.kind,
        _what_it_is(arm),
        *(
            ABSENT if e is None else f"{margins_text(e.mean)} (se {margins_text(e.se)})"
            for e in effects
        ),
        share_text(arm.truth.hard_failures),
        _probe(arm),
        *(three_shares([arm], f"{OURS}@{plan}") for plan in ("3", "5", "8", LOOKS)),
        ABSENT if looks is None else f"{looks.seeds:.1f}",
    ]


def _what_it_is(arm: ArmResult) -> str:
    """Return what its own seeds say; of a null arm too, which counts as null in any case."""
    if arm.group == "quiet_fault":
        return "quiet fault"
    return "harmless" if arm.truth.label == "benign" else arm.truth.label


def culprit_lines(target: Target) -> list[str]:
    """Return, for each plan that misses its target, which arms are responsible."""
    lines = []
    for plan, aim in target.aims.items():
        if aim.met is not False:
            continue
        measured = f"{share_text(aim.value)} (target {wanted_text(aim)})"
        line = f"- {target.title}, {PLAN_NAMES[plan]}: {measured}."
        if target.quantity is not None and aim.culprits:
            named = [_culprit(arm, f"{OURS}@{plan}", target) for arm in aim.culprits[:12]]
            more = len(aim.culprits) - len(named)
            rest = f"; and {more} more" if more > 0 else ""
            line += f" Responsible: {'; '.join(named)}{rest}."
        lines.append(line)
    return lines


def _culprit(arm: ArmResult, key: str, target: Target) -> str:
    assert target.quantity is not None
    share = share_text(share_of(arm.tallies[key], target.quantity))
    said = {"accept": "accepted", "reject": "rejected", "inconclusive": "undecided"}
    size = f"size {margins_text(arm.truth.size)}"
    if arm.truth.hard_failures > 0:
        size += f", fails in {share_text(arm.truth.hard_failures)} of the seeds"
    without = arm.tallies.get(key.replace(OURS, LOSS_ONLY, 1))
    probe = ""
    if target.quantity == "accept" and without is not None and arm.probe:
        probe = f", {share_text(without.accept)} without the probe"
    return f"`{arm.task}/{arm.name}` ({size}; {said[target.quantity]} in {share}{probe})"


def _from_to(sizes: Sequence[float]) -> str:
    if not sizes:
        return ABSENT
    low, high = margins_text(min(sizes)), margins_text(max(sizes))
    return low if low == high else f"{low} to {high}"


def _probe(arm: ArmResult) -> str:
    if arm.probe is None:
        return "not made"
    return ", ".join(c.removeprefix("PROBE_").lower().replace("_", " ") for c in arm.probe) or "ok"
