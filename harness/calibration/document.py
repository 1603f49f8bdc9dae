"""`calibration.md`: the whole page is written from the results, by the command alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.analysis.rule import DecisionRule
from harness.analysis.wording import counted, listing
from harness.calibration import arm_tables, tables
from harness.calibration.contenders import Contender, contenders
from harness.calibration.duels import duels
from harness.calibration.figures import FOLDER, write_figures
from harness.calibration.in_short import in_short
from harness.calibration.page_prose import (
    NOTES_ON_TASKS,
    ON_RIVALS,
    duels_text,
    fault_sentences,
    limits,
    method,
    on_shifts,
    targets_met,
    task_sentences,
)
from harness.calibration.page_text import share_text
from harness.calibration.plans import FIXED
from harness.calibration.rates import Half, arms_of, half_of
from harness.calibration.results import TaskResult
from harness.calibration.targets import (
    Target,
    mean_seeds,
    reported_half,
    shared_sweep,
    targets,
)
from harness.runs.record_files import write_atomically

DOCUMENT = "calibration.md"
_MIN_PAIRS = DecisionRule().min_pairs
_CAPTIONS: Mapping[str, str] = {
    "operating": (
        "Shares of verdicts by the true difference, which is planted on the noise of real runs. "
        "Lines: mean over tasks and noise sources; shaded: their range. Vertical line: the margin, "
        "where accepting and rejecting are both errors."
    ),
    "rules": (
        "Both errors of every rule. A good rule has all its marks at the left edge of both "
        "panels; the grey bar reaches from the mean to the worst arm at n = 5. Left: null and "
        "harmless arms together."
    ),
    "sizes": (
        "Accepted, undecided and rejected, in percent of the draws, by what the arms are. In "
        "brackets: arms."
    ),
    "arms": (
        "Every arm of all tasks. To the right of the line an arm is worse by more than a margin in "
        "the mean of all seeds. It may still be grey there (its seeds do not agree) or "
        "intermittent (few of them fail): in no rate."
    ),
    "pairs": (
        "Pairs of runs until a verdict is settled, with looks and looking after every pair. In "
        "brackets: arms."
    ),
}


def write_document(
    tasks: Sequence[TaskResult], *, output: Path, rule: DecisionRule, command: str, quick: bool
) -> Path:
    """Write the page and its figures and return the page's path.

    Args:
        tasks: The results.
        output: Folder of the page; created if needed.
        rule: Constants of our rule.
        command: That gives this page.
        quick: Whether the page says that this was the quick version.
    """
    output.mkdir(parents=True, exist_ok=True)
    rules, half = contenders(), reported_half(tasks)
    drawn = write_figures(tasks, rules, half=half, alpha=rule.alpha, folder=output / FOLDER)
    text = document(tasks, rules=rules, drawn=drawn, rule=rule, command=command, quick=quick)
    path = output / DOCUMENT
    write_atomically(path, text)
    return path


def document(
    tasks: Sequence[TaskResult],
    *,
    rules: Sequence[Contender],
    drawn: Sequence[str],
    rule: DecisionRule,
    command: str,
    quick: bool,
) -> str:
    """Return the page.

    Args:
        tasks: The results.
        rules: What was judged.
        drawn: Names of the figures that exist.
        rule: Constants of our rule.
        command: That gives this page.
        quick: Whether it says that this was the quick version.
    """
    half = reported_half(tasks)
    figures = {name: _figure(name) for name in drawn}
    sections = [
        _head(tasks, command=command, quick=quick),
        *filter(None, [in_short(tasks, half, names=_half_text(tasks, half))]),
        _aims(tasks, rules, half),
        method(tasks, rule),
        _tasks(tasks),
        _rules(tasks, rules, half, figures),
        _by_size(tasks, half, figures),
        _characteristic(tasks, half, figures, rule),
        _cost(tasks, half, figures),
        _faults(tasks),
        limits(tasks, num_reported=len(_reported(tasks, half))),
        _arms(tasks),
    ]
    return "\n\n".join(sections) + "\n"


def _head(tasks: Sequence[TaskResult], *, command: str, quick: bool) -> str:
    arms = arms_of(tasks)
    runs = sum((len(task.arms) + 1) * task.num_seeds for task in tasks)
    faults = {arm.family for arm in arms if arm.kind == "fault"}
    lines = [
        "# How often the verdicts are wrong",
        f"Written by `{command}`; every number below comes out of that command.",
    ]
    if quick:
        lines.append("This is the quick version: few arms, few seeds, few draws. It checks the "
                     "machinery; its rates are rough.")  # fmt: skip
    lines.append(
        f"{counted(len(tasks), 'small training')} in FP32 and in {counted(len(arms), 'arm')} in "
        "all: FP32 again with nothing but rounding changed, low precision as it should be, and "
        f"{counted(len(faults), 'kind')} of planted precision faults in doses. {runs} stored runs. "
        "What each arm truly does to the loss is taken from all of its seeds; then every rule is "
        "shown only a few seeds, drawn again and again from the stored ones, and its verdicts are "
        "counted."
    )
    return "\n\n".join(lines)


def _aims(tasks: Sequence[TaskResult], rules: Sequence[Contender], half: Half | None) -> str:
    reported, other = targets(tasks, half), targets(tasks, "A")
    parts = [
        "## What it must show",
        f"Measured: {_half_text(tasks, half)}. "
        "Constants may have been chosen on half A, never on half B.",
        tables.target_table(reported, other),
        targets_met(reported),
        *_missed(reported),
    ]
    if half is not None and targets_met(other):
        parts += [f"On half A: {targets_met(other)}", *_missed(other)]
    parts.append(duels_text(duels(tasks, rules, half)))
    parts += [
        f"The rates with their 95 % intervals (with fewer than {_MIN_PAIRS} pairs only the gates "
        "decide, and nothing is accepted):",
        tables.interval_table(tasks, half),
    ]
    return "\n\n".join(parts)


def _missed(found: Sequence[Target]) -> list[str]:
    """Return the list of missed targets as one paragraph; none where all are met."""
    lines = [line for target in found for line in arm_tables.culprit_lines(target)]
    return ["\n".join(lines)] if lines else []


def _tasks(tasks: Sequence[TaskResult]) -> str:
    parts = [
        "## Tasks and arms",
        tables.task_table(tasks, task_sentences(tasks)),
        NOTES_ON_TASKS,
        tables.group_table(tasks),
    ]
    unprobed = [a for a in arms_of(tasks) if a.probe is None and a.kind != "null"]
    if unprobed:
        parts.append(
            f"{len(unprobed)} arms besides the null ones have no same-point probe; they are judged "
            "by their loss alone."
        )
    left = [f"`{task.task}/{name}`" for task in tasks for name in task.incomplete]
    if left:
        parts.append(f"Left out, as some of their seeds are missing: {listing(left)}.")
    return "\n\n".join(parts)


def _rules(
    tasks: Sequence[TaskResult],
    rules: Sequence[Contender],
    half: Half | None,
    figures: Mapping[str, str],
) -> str:
    parts = [
        "## Rules side by side",
        f"Mean over arms, worst arm in brackets; {_half_text(tasks, half)}. {ON_RIVALS}",
        tables.rival_table(rules),
        *_shown(figures, "rules"),
        tables.rule_table(tasks, rules, half),
    ]
    if half is not None and any(half_of(task.task) == "A" for task in tasks):
        parts += [
            "<details><summary>The same on half A</summary>",
            tables.rule_table(tasks, rules, "A"),
            "</details>",
        ]
    return "\n\n".join(parts)


def _by_size(tasks: Sequence[TaskResult], half: Half | None, figures: Mapping[str, str]) -> str:
    return "\n\n".join(
        [
            "## By size of the harm",
            "Accepted / undecided / rejected by this harness, mean over arms; sizes in margins, "
            f"from all seeds; {_half_text(tasks, half)}.",
            *_shown(figures, "sizes"),
            tables.size_table(tasks, half),
            *_shown(figures, "arms"),
        ]
    )


def _characteristic(
    tasks: Sequence[TaskResult],
    half: Half | None,
    figures: Mapping[str, str],
    rule: DecisionRule,
) -> str:
    curves = [c for t in _reported(tasks, half) for c in t.shifts]
    if not curves:
        return "## Operating characteristic\n\nNo task has a usable source of noise."
    return "\n\n".join(
        [
            "## Operating characteristic",
            "Differences of harmless arms (the null arms with the most noise, and `bf16`), centred "
            "on their mean over all seeds, with the same shift planted on both endpoints: the true "
            "difference is known, in margins of all seeds. Accepted, rejected: mean (range) over "
            f"{len({(c.task, c.arm) for c in curves})} sources in "
            f"{listing([f'`{name}`' for name in dict.fromkeys(c.task for c in curves)])}. "
            f"{on_shifts(rule)}",
            *_shown(figures, "operating"),
            tables.shift_table(curves),
        ]
    )


def _cost(tasks: Sequence[TaskResult], half: Half | None, figures: Mapping[str, str]) -> str:
    seeds, shared = mean_seeds(tasks, half), shared_sweep(tasks, half)
    if seeds is None:
        return f"## Seeds and compute\n\nNo task has the {FIXED[-1]} seeds that looks may take."
    lines = [
        "Compute counts the candidate's runs and one FP32 run per pair, against the fixed plan of "
        f"{FIXED[-1]} pairs; a run that ended itself counts as the steps that it ran. Runs of the "
        "bank are not ended early for being hopeless, so what that saves within a run is not in "
        "here."
    ]
    lines.append(f"Over all candidate arms a verdict takes {seeds:.1f} pairs on average.")
    if shared is not None:
        lines.append(
            "A sweep of the harmless formats of a task, which share FP32 and so run it as long as "
            f"any of them is undecided, costs {share_text(shared)} of the fixed plan."
        )
    return "\n\n".join(
        [
            "## Seeds and compute",
            " ".join(lines),
            *_shown(figures, "pairs"),
            tables.cost_table(tasks, half),
        ]
    )


def _faults(tasks: Sequence[TaskResult]) -> str:
    return "\n\n".join(
        [
            "## The planted faults",
            "All tasks; sizes over tasks and doses; rejected and accepted with looks, over the "
            "harmful arms.",
            arm_tables.fault_table(tasks, fault_sentences()),
        ]
    )


def _arms(tasks: Sequence[TaskResult]) -> str:
    return "\n\n".join(
        [
            "## Every arm",
            "Losses in margins, mean over all seeds with its standard error. a / u / r: accepted, "
            "undecided, rejected by this harness; pairs: with looks.",
            "<details><summary>All arms of all tasks</summary>",
            arm_tables.arm_table(tasks),
            "</details>",
        ]
    )


def _half_text(tasks: Sequence[TaskResult], half: Half | None) -> str:
    names = listing([f"`{t.task}`" for t in _reported(tasks, half)])
    return f"half {half} ({names})" if half is not None else names


def _reported(tasks: Sequence[TaskResult], half: Half | None) -> list[TaskResult]:
    return [task for task in tasks if half is None or half_of(task.task) == half]


def _figure(name: str) -> str:
    caption = _CAPTIONS[name]
    return f"![{caption.split('. ')[0].rstrip('.')}]({FOLDER}/{name}.png)\n\n*{caption}*"


def _shown(figures: Mapping[str, str], name: str) -> list[str]:
    return [figures[name]] if name in figures else []
