"""The tables of the document: results in, Markdown out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.analysis.rivals import RIVALS
from harness.analysis.rule import DecisionRule
from harness.calibration.contenders import OURS, Contender
from harness.calibration.page_text import (
    ABSENT,
    interval_text,
    margins_text,
    rate_text,
    share_text,
    table,
)
from harness.calibration.plans import ALWAYS_VALID, FIXED, LOOKS
from harness.calibration.rates import (
    Half,
    arms_of,
    compute_share,
    half_of,
    mean_of,
    rate,
)
from harness.calibration.results import (
    GROUPS,
    SIZE_CLASSES,
    ArmResult,
    Group,
    ShiftCurve,
    ShiftPoint,
    TaskResult,
)
from harness.calibration.shifts import SHIFTS
from harness.calibration.targets import FULL, PLANS, Aim, Target
from harness.report.text import significant

_RULE = DecisionRule()
PLAN_NAMES: Mapping[str, str] = {
    **{str(n): f"n = {n}" for n in FIXED},
    LOOKS: f"looks {'-'.join(map(str, _RULE.looks))}",
    ALWAYS_VALID: f"always valid, {_RULE.min_pairs} to {_RULE.looks[-1]}",
}
_ASKED_GROUPS: tuple[Group, ...] = ("null", "harmless", "quiet_fault", "harm")


def target_table(reported: Sequence[Target], other: Sequence[Target]) -> str:
    """Return the table of targets: the half that is reported, and beside it the other one."""
    rows = []
    for row, beside in zip(reported, other, strict=True):
        cells = [row.title]
        for plan in PLANS:
            aim = row.aims[plan]
            cells += [wanted_text(aim), _measured(aim), _value(beside.aims[plan])]
        rows.append(cells)
    return table(
        ("", *(h for p in PLANS for h in (f"{PLAN_NAMES[p]}: target", "measured", "half A"))),
        rows,
    )


def wanted_text(aim: Aim) -> str:
    """Return a target in words: `at most 0.5 %`; `none` where the value is only reported."""
    if aim.limit is None:
        return "none"
    return f"at {'least' if aim.at_least else 'most'} {100 * aim.limit:g} %"


def task_table(tasks: Sequence[TaskResult], sentences: Mapping[str, str]) -> str:
    """Return what each task is, how much FP32 learns, its margins and its noise."""
    rows = []
    for t in tasks:
        spreads = [e.sd for a in t.arms if a.kind == "null" for e in a.truth.effects.values()]
        margins = [f"{significant(m, 2)} ({term})" for m, term in t.margins.values()]
        margins += [ABSENT] * (2 - len(margins))
        rows.append(
            [
                f"`{t.task}`",
                half_of(t.task),
                sentences.get(t.task, ""),
                str(t.num_steps),
                str(t.num_seeds),
                f"{significant(t.progress, 3)} {t.unit}",
                *margins,
                margins_text(max(spreads)) if spreads else ABSENT,
                t.void or "",
            ]
        )
    headings = [
        "task", "half", "what is trained", "steps", "seeds", "learned (D)", "margin, training",
        "margin, held-out", "noise (margins)", "void",
    ]  # fmt: skip
    if not any(t.void for t in tasks):
        headings, rows = headings[:-1], [row[:-1] for row in rows]
    return table(headings, rows)


def group_table(tasks: Sequence[TaskResult]) -> str:
    """Return how many arms there are of each kind, by half."""
    rows = [
        [
            meaning,
            *(str(len(arms_of(tasks, group, half=half))) for half in ("A", "B")),
            str(len(arms_of(tasks, group))),
        ]
        for group, meaning in GROUPS.items()
        if arms_of(tasks, group)
    ]
    return table(("arms", "half A", "half B", "both"), rows, numbers=3)


def rule_table(tasks: Sequence[TaskResult], rules: Sequence[Contender], half: Half | None) -> str:
    """Return every rule at every plan: mean over arms, and the worst arm in brackets."""
    null, harmless, quiet, harm = (arms_of(tasks, g, half=half) for g in _ASKED_GROUPS)
    rows = []
    for rule in rules:
        for plan in (*map(str, FIXED), LOOKS, ALWAYS_VALID):
            key = f"{rule.name}@{plan}"
            if not any(key in arm.tallies for arm in (*null, *harmless, *harm)):
                continue
            rows.append(
                [
                    rule.title,
                    PLAN_NAMES[plan],
                    rate_text(rate(null, key, "reject")),
                    rate_text(rate(harmless, key, "reject")),
                    rate_text(rate(quiet, key, "reject")),
                    rate_text(rate(harmless, key, "accept"), worst=False),
                    rate_text(rate(harm, key, "reject"), worst=False),
                    rate_text(rate(harm, key, "accept")),
                ]
            )
    headings = (
        "rule", "plan", "null rejected", "harmless rejected", "quiet fault rejected",
        "harmless accepted", "harm rejected", "harm ACCEPTED",
    )  # fmt: skip
    return table(headings, rows, numbers=6)


def interval_table(tasks: Sequence[TaskResult], half: Half | None) -> str:
    """Return the intervals of our rule's error rates."""
    null, harmless, _, harm = (arms_of(tasks, g, half=half) for g in _ASKED_GROUPS)
    rows = []
    for plan in (*map(str, FIXED), LOOKS, ALWAYS_VALID):
        key = f"{OURS}@{plan}"
        found = [
            rate(null, key, "reject"),
            rate(harmless, key, "reject"),
            rate(harmless, key, "accept"),
            rate(harm, key, "accept"),
            rate(harm, key, "reject"),
        ]
        if any(found):
            cells = [
                ABSENT if r is None else f"{share_text(r.mean)} ({interval_text(r)})" for r in found
            ]
            rows.append([PLAN_NAMES[plan], *cells])
    headings = (
        "plan", "null rejected", "harmless rejected", "harmless accepted", "harm accepted",
        "harm rejected",
    )  # fmt: skip
    return table(headings, rows, numbers=5)


def size_table(tasks: Sequence[TaskResult], half: Half | None) -> str:
    """Return accept / undecided / reject of our rule by kind of arm and by the size of the harm."""
    plans = ("3", "5", "8", LOOKS)
    rows = []
    for name, arms in size_groups(tasks, half):
        cells = [three_shares(arms, f"{OURS}@{plan}") for plan in plans]
        rows.append([name, str(len(arms)), *cells])
    headings = ("arms, size in margins", "arms", *(PLAN_NAMES[plan] for plan in plans))
    return table(headings, rows, numbers=len(plans) + 1)


def three_shares(arms: Sequence[ArmResult], key: str) -> str:
    """Return `0.10 / 0.20 / 0.70`: accepted, undecided, rejected, mean over arms."""
    means = [
        mean_of(arms, key, lambda tally: tally.accept),
        mean_of(arms, key, lambda tally: tally.inconclusive),
        mean_of(arms, key, lambda tally: tally.reject),
    ]
    if means[0] is None:
        return ABSENT
    return " / ".join(f"{mean:.2f}" for mean in means if mean is not None)


def size_groups(
    tasks: Sequence[TaskResult], half: Half | None
) -> list[tuple[str, list[ArmResult]]]:
    """Return the arms by what they are and, where they harm, by size; empty groups left out."""
    found = [
        ("null", arms_of(tasks, "null", half=half)),
        ("harmless", arms_of(tasks, "harmless", half=half)),
        ("quiet fault", arms_of(tasks, "quiet_fault", half=half)),
        ("grey", arms_of(tasks, "grey", half=half)),
    ]
    harm = arms_of(tasks, "harm", half=half)
    found += [(f"harm {name}", [a for a in harm if a.size_class == name]) for name in SIZE_CLASSES]
    return [(name, arms) for name, arms in found if arms]


def rival_table(rules: Sequence[Contender]) -> str:
    """Return when each rival rejects, in its own words."""
    rows = [[rule.title, RIVALS[rule.name].sentence] for rule in rules if rule.name in RIVALS]
    return table(("rival", "when it rejects"), rows)


def cost_table(tasks: Sequence[TaskResult], half: Half | None) -> str:
    """Return pairs and compute by kind of arm, with looks."""
    rows = []
    for name, arms in size_groups(tasks, half):
        cells = []
        for plan in (LOOKS, ALWAYS_VALID):
            key = f"{OURS}@{plan}"
            seeds = mean_of(arms, key, lambda tally: tally.seeds)
            cells += [
                ABSENT if seeds is None else f"{seeds:.1f}",
                share_text(compute_share(arms, key, FULL)),
            ]
        rows.append([name, str(len(arms)), *cells])
    headings = (
        "arms, size in margins", "arms", "looks: pairs", "compute", "always valid: pairs",
        "compute",
    )  # fmt: skip
    return table(headings, rows, numbers=5)


def shift_table(curves: Sequence[ShiftCurve]) -> str:
    """Return accept and reject by true difference: mean, and range, over the noise sources."""
    plans = [p for p in ("3", "5", "8", LOOKS, ALWAYS_VALID) if any(c.plan == p for c in curves)]

    def row(name: str, point: Callable[[ShiftCurve], ShiftPoint]) -> list[str]:
        own = [[point(c) for c in curves if c.plan == plan] for plan in plans]
        return [
            name,
            *(f"{_range([p.accept for p in x])}, {_range([p.reject for p in x])}" for x in own),
        ]

    rows = [row(f"{shift:g}", _point_at(k)) for k, shift in enumerate(SHIFTS)]
    rows.append(row("1, margin of the draw", lambda c: c.at_own_margin))
    return table(("true difference / margin", *(PLAN_NAMES[p] for p in plans)), rows)


def _point_at(index: int) -> Callable[[ShiftCurve], ShiftPoint]:
    return lambda curve: curve.points[index]


def _measured(aim: Aim) -> str:
    text = _value(aim)
    if aim.met is None:
        return text
    return f"{text}: {'met' if aim.met else 'MISSED'}"


def _value(aim: Aim) -> str:
    return share_text(aim.value)


def _range(values: Sequence[float]) -> str:
    mean, low, high = (f"{v:.2f}" for v in (sum(values) / len(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low}-{high})"
