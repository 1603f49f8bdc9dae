"""What the document says in prose: what was met, how it was done, and what it does not show."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.rule import DecisionRule
from harness.analysis.statistics import failure_rate_bound
from harness.analysis.wording import counted, listing
from harness.calibration.duels import Duel
from harness.calibration.page_text import share_text
from harness.calibration.plans import FIXED, LOOKS
from harness.calibration.results import TaskResult
from harness.calibration.targets import Target

NOTES_ON_TASKS = (
    "D: what FP32 learned over the run. A margin is in the unit of D; in brackets what sets it: "
    "`progress`, 1 % of D; `loss`, 2 % of FP32's loss at the end; `seed_sd`, half the seed-to-seed "
    "spread of FP32's held-out loss. Noise: largest standard deviation over seeds of an FP32 run "
    "against FP32, in margins."
)
ON_RIVALS = (
    "What is neither accepted nor rejected is undecided. This harness may leave an arm undecided; "
    "a rival accepts what it does not reject, as in use, so both of its errors are larger than if "
    "it could abstain. Rivals look at the training loss alone, as those who use them do, while an "
    "arm is harmful on either loss; each rejects a run whose loss is not finite, and has no gates, "
    "no probe and no looks. The rows of *non-inferiority* are this harness with one loss alone and "
    "without the probe."
)
_ON_DIGITS = frozenset({"convnet", "finetune", "kernel", "recurrent", "diffusion"})


def on_shifts(rule: DecisionRule) -> str:
    """Return how to read the operating characteristic."""
    return (
        "Without the probe, which a shift does not have, and with half as many draws. A draw "
        "measures its own margin; where a source has little noise, a true difference of exactly "
        "one margin is judged by the luck of that measurement, so in the last row the difference "
        "is one margin of each draw. Single sources may lie above "
        f"{100 * rule.alpha:g} % there, with many seeds too: where one seed differs far more than "
        "all the others, most draws miss it, and their small spread does not tell that their mean "
        "is off. Three that happen to agree do the same."
    )


def method(tasks: Sequence[TaskResult], rule: DecisionRule) -> str:
    """Return the section on truth, draws and judgement."""
    draws = max((task.draws for task in tasks), default=0)
    first, *later = rule.looks
    looks = f"the first {first}, then " + ", then ".join(map(str, later)) if later else str(first)
    levels = listing([f"{alpha:g}" for alpha in rule.look_alphas])
    return f"""## How it was done

**Truth.** For each arm the paired loss differences of all seeds give a mean and its standard
error, in units of the margin of all seeds. *Harm*: mean minus two standard errors above one margin
on training or held-out loss, or a run that fails (not finite, diverged, loss scale collapsed) in
at least a quarter of the seeds. *Harmless*: mean plus two standard errors below half a margin on
both, and no run that fails. Between the two, an arm is *grey* and in no rate; one that fails in
fewer seeds, and whose other seeds show no harm, is *intermittent* and in none either. A planted
fault that turns out harmless is a *quiet fault*: rejecting it would be an error, accepting it none.

**Draws.** {draws} random orders of the stored seeds per task, the same for all arms and rules. A
plan of n pairs takes the first n; looks take {looks}, at levels {levels}, and
stop where the verdict is settled. Draws without replacement from the stored seeds are less
different from each other than fresh seeds would be, most of all at n = {FIXED[-1]}.

**Judgement.** The analyzer's own functions: pairing, gates, margins measured from the drawn FP32
runs, the test on both endpoints, and the same-point probe, which turns an acceptance into
*undecided*. Null arms from disturbed weights, which a sweep draws as controls and judges not at
all, are judged here as any candidate is. A rate is the mean over arms of the share of draws; in
brackets the worst arm. Intervals (95 %) reach, at either end, as far as the wider of two: a
bootstrap over tasks and arms within them, and Wilson's interval for as many experiments as the
seeds allow without using one twice."""


def limits(tasks: Sequence[TaskResult], *, num_reported: int) -> str:
    """Return the section on what the rates do not cover.

    Args:
        tasks: The results.
        num_reported: Tasks in the half that the intervals are over.
    """
    most = FIXED[-1]
    bound = f"{100 * failure_rate_bound(most):.0f} % at n = {most}"
    few = "one task" if num_reported == 1 else f"{num_reported} tasks"
    steps = sorted({task.num_steps for task in tasks})
    kin = _kinship({task.task for task in tasks})
    length = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}" if steps else "no"
    return f"""## What this does not show

- Harm that needs more than the {length} steps of these runs. The probe is there for that, and
  its own rate of being right about longer runs is not measured here.
- Large models, real learning-rate spikes and GPUs: all runs are small, on a CPU, and most formats
  are computed by rounding in FP32 storage. A GPU's kernels also differ from run to run.
- Rare failures. An arm that fails in few seeds is left out as intermittent; n pairs without a
  failure leave a failure rate of up to 1 - 0.05^(1/n) open, {bound}.
- Independent rates. Arms of a task share their FP32 runs and draws share seeds. The bootstrap
  allows for it as far as {few} can tell, and over so few it is known to be too narrow; where no
  arm ever errs, it is silent, and the interval takes the arms of a task for independent.
{kin}- Truth without error: it rests on the same stored seeds as the draws, which flatters every
  rule. An arm near a boundary may be on its wrong side, and harm between one margin and what two
  standard errors resolve is grey, not counted as a miss.
- The cost of the probe, and of a twin where a sweep has one: compute counts trainings of FP32 and
  of candidates alone.
- The choice among several accepted policies, and Holm's adjustment, were not simulated."""


def _kinship(tasks: set[str]) -> str:
    """Return what the halves share, as an item of the list; empty for a bank without such tasks."""
    if not {"gpt_cool", "gpt_hot", *_ON_DIGITS} <= tasks:
        return ""
    return (
        "- Halves that have nothing in common: `gpt_hot` is the model and the text of `gpt_cool` "
        f"at another\n  learning rate, and {len(_ON_DIGITS)} of the {len(tasks)} trainings read "
        "the same digits. Only the runs of half B were\n  kept out of every choice.\n"
    )


def targets_met(found: Sequence[Target]) -> str:
    """Return how many targets are met, and how many could not be measured."""
    aims = [aim.met for target in found for aim in target.aims.values() if aim.met is not None]
    missed = aims.count(False)
    open_ = sum(aim.limit is not None for t in found for aim in t.aims.values()) - len(aims)
    rest = f" {counted(open_, 'target')} could not be measured." if open_ else ""
    if not aims:
        return rest.strip()
    if not missed:
        return f"All {len(aims)} targets that could be measured are met.{rest}"
    return (
        f"{len(aims) - missed} of the {len(aims)} targets that could be measured are met.{rest} "
        "Missed:"
    )


def duels_text(found: Sequence[Duel]) -> str:
    """Return which rivals are better than our rule on both errors."""
    better = [duel for duel in found if duel.better]
    dominating = [duel for duel in found if duel.dominates and not duel.better]
    if not found:
        return "No rival rule could be compared: there are no harmful arms, or no harmless ones."
    if better:
        text = "**Better than ours on both errors:** " + "; ".join(map(_one_duel, better)) + "."
    else:
        theirs = listing(list(dict.fromkeys(d.theirs.split("@")[1] for d in found)), last="or")
        looks = any(d.ours.endswith(f"@{LOOKS}") for d in found)
        text = (
            "No rival rule is better on both errors (harmless or null rejected, harm accepted): "
            f"with {theirs} pairs, none is better than ours with as many"
            f"{', nor than ours with looks' if looks else ''}. Target met."
        )
    if dominating:
        text += " Equal on one error and better on the other: "
        text += "; ".join(map(_one_duel, dominating)) + "."
    return text


def _one_duel(duel: Duel) -> str:
    (a, b), (c, d) = duel.false_rejects, duel.false_accepts
    return (
        f"`{duel.theirs}` against `{duel.ours}` (rejects {share_text(a)} against {share_text(b)}, "
        f"accepts {share_text(c)} against {share_text(d)})"
    )


def task_sentences(tasks: Sequence[TaskResult]) -> dict[str, str]:
    """Return what each task trains; a task that is not of the catalogue has no entry."""
    # Imports torch, which judging does without.
    from harness.calibration.tasks import TASKS

    return {task.task: TASKS[task.task].sentence for task in tasks if task.task in TASKS}


def fault_sentences() -> dict[str, str]:
    """Return what each fault of the catalogue is, and what its doses are."""
    # Imports torch, as above.
    from harness.calibration.faults.catalogue import FAULTS

    return {
        name: f"{fault.sentence} Dose: {fault.dose}." if fault.dose else fault.sentence
        for name, fault in FAULTS.items()
    }
