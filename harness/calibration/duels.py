"""Every rival beside our rule, on the two errors that a rule can make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.calibration.contenders import OURS, Contender
from harness.calibration.plans import FIXED, LOOKS
from harness.calibration.rates import Half, arms_of, mean_of
from harness.calibration.results import ArmResult, Tally, TaskResult


@dataclass(frozen=True, kw_only=True)
class Duel:
    """The errors of a rival and of our rule, under plans that are compared.

    Attributes:
        theirs: `<rival>@<pairs>`.
        ours: `ours@<plan>`.
        false_rejects: (theirs, ours): null and harmless arms rejected, mean over arms.
        false_accepts: (theirs, ours): harmful arms accepted, mean over arms.
    """

    theirs: str
    ours: str
    false_rejects: tuple[float, float]
    false_accepts: tuple[float, float]

    @property
    def better(self) -> bool:
        """Whether the rival is strictly better on both errors."""
        return all(theirs < ours for theirs, ours in (self.false_rejects, self.false_accepts))

    @property
    def dominates(self) -> bool:
        """Whether the rival is worse on neither error and strictly better on one."""
        both = (self.false_rejects, self.false_accepts)
        return all(t <= o for t, o in both) and any(t < o for t, o in both)


def duels(
    tasks: Sequence[TaskResult], rules: Sequence[Contender], half: Half | None
) -> tuple[Duel, ...]:
    """Return every rival, at every number of pairs, beside ours with as many and with looks.

    Args:
        tasks: The results.
        rules: What was judged; only the rivals among them are compared.
        half: Half of the tasks; None for all.
    """
    harmless = [*arms_of(tasks, "null", half=half), *arms_of(tasks, "harmless", half=half)]
    harmful = arms_of(tasks, "harm", half=half)
    found = []
    for rival in rules:
        for pairs in FIXED if rival.is_rival else ():
            for plan in (str(pairs), LOOKS):
                theirs, ours = f"{rival.name}@{pairs}", f"{OURS}@{plan}"
                first = _means(harmless, theirs, ours, lambda tally: tally.reject)
                second = _means(harmful, theirs, ours, lambda tally: tally.accept)
                if first is not None and second is not None:
                    found.append(
                        Duel(theirs=theirs, ours=ours, false_rejects=first, false_accepts=second)
                    )
    return tuple(found)


def _means(
    arms: Sequence[ArmResult], theirs: str, ours: str, value: Callable[[Tally], float]
) -> tuple[float, float] | None:
    """Return a mean of both rules over the arms that both were asked about."""
    both = [arm for arm in arms if theirs in arm.tallies and ours in arm.tallies]
    first, second = mean_of(both, theirs, value), mean_of(both, ours, value)
    return None if first is None or second is None else (first, second)
