"""When a run need not go on: what of its series alone decides the verdict on its candidate.

The same conditions as the gates of a finished comparison, read while the run goes on, and one that
only a run in progress has: so far above FP32 for so long that no end can make up for it. The
reference and the controls are never ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis import statistics
from harness.analysis.endpoints import Level, measure_levels
from harness.analysis.reference_gates import first_nonfinite, unstable_reason
from harness.analysis.rule import DecisionRule
from harness.analysis.run_memory import once_per_run
from harness.analysis.wording import number
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import ENDED_EARLY, RunRecord

# A loss in the first third may still come down: warm-up, a loss scale that looks for its range.
_FIRST_SHARE = 1 / 3


@dataclass(frozen=True, kw_only=True)
class EndedEarly:
    """How a run ended itself.

    Attributes:
        step: Completed steps.
        num_steps: Planned steps.
        seconds_saved: Steps not made times the mean time of those that were; 0 if not known.
        why: What the run's gate saw, as one sentence.
    """

    step: int
    num_steps: int
    seconds_saved: float
    why: str

    @property
    def note(self) -> str:
        """What was not run, as a sentence."""
        saved = f", which saved about {self.seconds_saved:.2g} s" if self.seconds_saved > 0 else ""
        return f"That ended the run after {self.step} of {self.num_steps} steps{saved}."


def ended_early(record: RunRecord) -> EndedEarly | None:
    """Return how a run ended itself, or None for one that went on to its end or to a crash."""
    event = next((e for e in record.events if e["kind"] == ENDED_EARLY), None)
    if event is None:
        return None
    step = int(event["step"])
    times = [t for t in record.series.get("step_time_s", ()) if math.isfinite(t)]
    mean = sum(times) / len(times) if times else 0.0
    return EndedEarly(
        step=step,
        num_steps=record.num_steps,
        seconds_saved=mean * (record.num_steps - step),
        why=str(event["message"]),
    )


def end_note(record: RunRecord) -> str:
    """Return how a run ended itself, as a sentence to append; empty if it did not."""
    end = ended_early(record)
    return "" if end is None else f" {end.note}"


def collapse_of(
    record: RunRecord, policy: PrecisionPolicy, rule: DecisionRule
) -> tuple[str, float, float] | None:
    """Return what the loss scaler of a run did that no training survives; see `scale_collapse`."""
    kind = policy.loss_scale.kind
    if kind == "none":
        return None
    least, skips = _scaling(record)
    return scale_collapse(least=least, skips=skips, kind=kind, rule=rule)


@once_per_run
def _scaling(record: RunRecord) -> tuple[float, int]:
    """Return the least loss scale (infinite without any) and the most skips in a row."""
    least = min(record.series.get("loss_scale", ()), default=math.inf)
    return least, statistics.longest_run(record.series.get("skipped", ()))


def scale_collapse(
    *, least: float, skips: int, kind: str, rule: DecisionRule
) -> tuple[str, float, float] | None:
    """Return what a loss scaler did that no training survives, the number and its limit; or None.

    Args:
        least: The smallest loss scale; infinite without any.
        skips: Most steps skipped in a row.
        kind: Of the policy's loss scale; `none` never collapses.
        rule: For the limits.
    """
    if kind == "none":
        return None
    if skips >= rule.max_consecutive_skips:
        limit = float(rule.max_consecutive_skips)
        return f"The loss scaler skipped {skips} steps in a row", float(skips), limit
    if kind != "static" and least < rule.min_loss_scale:
        return f"The loss scale fell to {number(least)}", least, rule.min_loss_scale
    return None


class InRunGate:
    """Looks at the series of one run as they grow; called after every fetch.

    A gate looks at each step once and so serves one run.
    """

    def __init__(
        self, policy: PrecisionPolicy, reference: RunRecord | None, rule: DecisionRule
    ) -> None:
        """Prepare for one run.

        Args:
            policy: The candidate's policy.
            reference: The finished FP32 run of the same seed, where there is one already. Without
                it (or with one that cannot judge) only the gates apply that need none.
            rule: Constants.
        """
        self._policy, self._rule = policy, rule
        usable = reference is not None and unstable_reason(reference, rule) is None
        self._reference = reference if usable else None
        self._level = _level(self._reference, rule)
        self._seen = 0

    def __call__(self, series: Mapping[str, Sequence[float]]) -> str | None:
        """Return why the run need not go on, as one sentence, or None.

        Args:
            series: `RunRecord.series` up to now, all of one length.
        """
        since, self._seen = self._seen, len(series.get("loss", ()))
        return (
            self._nonfinite(series, since)
            or self._collapsed(series, since)
            or self._hopeless(series.get("loss", ()))
        )

    def _nonfinite(self, series: Mapping[str, Sequence[float]], since: int) -> str | None:
        step = first_nonfinite(series.get("loss", ())[since:])
        if step is not None:
            return f"the loss is not finite at step {since + step}"
        # A scaler skips such steps. What FP32 survives as well is no fault of a format.
        if self._policy.loss_scale.kind != "none" or self._reference is None:
            return None
        if any(self._reference.series.get("nonfinite_grad", ())):
            return None
        counts = series.get("nonfinite_grad", ())[since:]
        step = next((k for k, count in enumerate(counts) if count != 0), None)
        if step is None:
            return None
        return f"gradients are not finite at step {since + step}, and no loss scaler skips the step"

    def _collapsed(self, series: Mapping[str, Sequence[float]], since: int) -> str | None:
        # A streak of skips may have begun before the last fetch.
        first = max(0, since - self._rule.max_consecutive_skips)
        found = scale_collapse(
            least=min(series.get("loss_scale", ())[first:], default=math.inf),
            skips=statistics.longest_run(series.get("skipped", ())[first:]),
            kind=self._policy.loss_scale.kind,
            rule=self._rule,
        )
        return None if found is None else found[0][0].lower() + found[0][1:]

    def _hopeless(self, losses: Sequence[float]) -> str | None:
        """Return why a finite loss will not come back.

        Every one of the last steps lies above FP32's loss on the same batch by `hopeless_progress`
        times all that FP32 learns in its whole run, which is forty margins or more, and above the
        run's own minimum by what the divergence gate tolerates. A run that has learned nothing is
        off by once what FP32 learned, and so goes on: it may still learn. One spike ends nothing
        either, as each of the steps counts: a tenth of the run and at least 30.
        """
        if self._reference is None or self._level is None:
            return None
        steps = self._reference.num_steps
        window = max(self._rule.min_tail_steps, math.ceil(self._rule.divergence_window * steps))
        start = len(losses) - window
        if start < _FIRST_SHARE * steps:
            return None
        ours = np.asarray(losses[start:])
        theirs = np.asarray(self._reference.series["loss"][start : len(losses)])
        least = float((ours - theirs).min())
        risen = float(ours.min()) - min(losses)
        level, rule = self._level, self._rule
        # A wide margin of the user's own must not be less patient than the verdict.
        bound = max(
            rule.hopeless_progress * level.progress, 2 * rule.gross_margins_single * level.margin
        )
        if not (least > bound and risen > divergence_rise(level, rule)):
            return None
        return (
            f"each of the last {window} losses is above FP32's by {number(least)} or more "
            f"({number(bound)} is hopeless) and above the run's own minimum by {number(risen)}"
        )


def divergence_rise(level: Level, rule: DecisionRule) -> float:
    """Return how far above its own minimum a run may end without having diverged."""
    return max(rule.divergence_margins * level.margin, rule.divergence_progress * level.progress)


def _level(reference: RunRecord | None, rule: DecisionRule) -> Level | None:
    """Return what one FP32 run reached in the training loss; None where it learned nothing."""
    if reference is None:
        return None
    level = measure_levels((reference,), rule)["train"]
    return level if level.progress > 0 else None
