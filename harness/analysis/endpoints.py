"""The two paired endpoints, what FP32 learned on them, and their margins.

Endpoint `train` is the mean training loss over the tail, on the same batches; endpoint `held_out`
the mean held-out loss over the evaluations in the tail. All quantities are in the endpoint's own
unit, and all are relative to FP32's own run: nothing here has an absolute scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis import statistics
from harness.analysis.findings import Endpoint
from harness.analysis.rule import DecisionRule
from harness.analysis.run_memory import once_per_run
from harness.analysis.user_margin import UserMargin, parse_margin
from harness.runs.record import RunRecord

OWN_UNIT = "own units"
"""Unit of a held-out figure that comes from the workload's `eval_fn`, not from its loss."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """What the stable FP32 runs reached on one endpoint.

    Attributes:
        unit: Unit of every number here.
        progress: D, what was learned: loss before training minus tail loss, mean over seeds.
        learned: Share of the loss before training that was learned, mean over seeds.
        learned_se: Its standard error over seeds; None for one seed. Relative, because seeds may
            differ in the scale of their loss and still all learn.
        start: Loss before training, mean over seeds.
        tail: L, tail loss, mean over seeds.
        sigma: Seed-to-seed sd of the held-out tail loss; None below 3 seeds, or where held-out
            data differ between seeds or are in another unit.
        margin: The non-inferiority margin; 0 where nothing was learned.
        margin_term: `progress`, `loss`, `seed_sd`, `cap` or `user`.
        formula_margin: What the formula gives, whoever set `margin`.
    """

    unit: str
    progress: float
    learned: float
    learned_se: float | None
    start: float
    tail: float
    sigma: float | None
    margin: float
    margin_term: str
    formula_margin: float


def tail_start(num_steps: int, rule: DecisionRule) -> int:
    """Return the first step of the tail, the last `ceil(num_steps / tail_divisor)` steps."""
    return num_steps - math.ceil(num_steps / rule.tail_divisor)


@once_per_run
def train_tail(record: RunRecord, rule: DecisionRule) -> float:
    """Return the mean training loss over the tail; NaN if the run ended before its last step."""
    losses = record.series.get("loss", ())
    if len(losses) < record.num_steps:
        return math.nan
    return statistics.mean(losses[tail_start(record.num_steps, rule) :])


@once_per_run
def held_out_tail(
    record: RunRecord, rule: DecisionRule, *, at: Sequence[int] | None = None
) -> float:
    """Return the mean held-out loss over the evaluations in the tail.

    Args:
        record: The run.
        rule: For the start of the tail.
        at: Average exactly these evaluations (numbers of completed steps), as the paired
            reference has them; NaN if one is missing.
    """
    by_step = held_out_by_step(record)
    steps = tail_evaluations(record, rule) if at is None else at
    if not steps or any(step not in by_step for step in steps):
        return math.nan
    return statistics.mean([by_step[step] for step in steps])


@once_per_run
def held_out_by_step(record: RunRecord) -> dict[int, float]:
    """Return the held-out loss by number of completed steps; empty without a held-out set."""
    held = record.held_out
    return {} if held is None else dict(zip(held.steps, held.loss, strict=True))


@once_per_run
def tail_evaluations(record: RunRecord, rule: DecisionRule) -> tuple[int, ...]:
    """Return the numbers of completed steps of the evaluations in the tail."""
    first = max(1, tail_start(record.num_steps, rule))
    return tuple(step for step in held_out_by_step(record) if step >= first)


@once_per_run
def head_loss(record: RunRecord, rule: DecisionRule) -> float:
    """Return the mean of the first training losses: a single first batch is too noisy."""
    count = max(rule.head_min_steps, math.ceil(rule.head_fraction * record.num_steps))
    losses = record.series.get("loss", ())[:count]
    return statistics.mean(losses)


def endpoints_of(references: Sequence[RunRecord], rule: DecisionRule) -> tuple[Endpoint, ...]:
    """Return the endpoints that every one of these FP32 runs has."""
    if references and all(
        0 in held_out_by_step(r) and tail_evaluations(r, rule) for r in references
    ):
        return ("train", "held_out")
    return ("train",)


def same_unit(record: RunRecord) -> bool:
    """Return whether the held-out figure is the workload's loss, so that both share a unit."""
    return record.held_out is not None and record.held_out.unit != OWN_UNIT


def train_unit(record: RunRecord) -> str:
    """Return the unit of the training loss."""
    workload = record.settings.get("workload")
    for settings in (record.settings, workload if isinstance(workload, dict) else {}):
        if isinstance(settings.get("loss_unit"), str):
            return str(settings["loss_unit"])
    return record.held_out.unit if record.held_out and same_unit(record) else "loss units"


def initial_loss(record: RunRecord, endpoint: Endpoint, rule: DecisionRule) -> float:
    """Return the loss before training that an endpoint's progress is counted from.

    The held-out loss at step 0 serves both endpoints where they share a unit: it is the mean over
    many items, while a training head is the mean over a few batches.
    """
    if endpoint == "held_out" or same_unit(record):
        return held_out_by_step(record).get(0, math.nan)
    return head_loss(record, rule)


def endpoint_tail(record: RunRecord, endpoint: Endpoint, rule: DecisionRule) -> float:
    """Return the tail loss of one run on one endpoint."""
    return train_tail(record, rule) if endpoint == "train" else held_out_tail(record, rule)


def paired_difference(
    candidate: RunRecord, reference: RunRecord, endpoint: Endpoint, rule: DecisionRule
) -> float:
    """Return candidate minus reference on one endpoint; NaN if either side is incomplete."""
    if endpoint == "train":
        return train_tail(candidate, rule) - train_tail(reference, rule)
    at = tail_evaluations(reference, rule)
    return held_out_tail(candidate, rule, at=at) - held_out_tail(reference, rule, at=at)


def measure_levels(references: Sequence[RunRecord], rule: DecisionRule) -> dict[Endpoint, Level]:
    """Return the level of each endpoint from the stable FP32 runs; empty without any."""
    if not references:
        return {}
    return {
        endpoint: _measure(references, endpoint, rule)
        for endpoint in endpoints_of(references, rule)
    }


def _measure(references: Sequence[RunRecord], endpoint: Endpoint, rule: DecisionRule) -> Level:
    has_held_out = "held_out" in endpoints_of(references, rule)
    # Where both endpoints share a unit, what was learned is read off the held-out set for both.
    source: Endpoint = "held_out" if has_held_out and same_unit(references[0]) else endpoint
    starts = [
        initial_loss(r, source, rule) if has_held_out else head_loss(r, rule) for r in references
    ]
    gains = [
        start - endpoint_tail(r, source, rule) for start, r in zip(starts, references, strict=True)
    ]
    progress, _ = statistics.mean_sd(gains)
    learned, learned_sd = statistics.mean_sd(_shares(gains, starts))
    tail, _ = statistics.mean_sd([endpoint_tail(r, endpoint, rule) for r in references])
    sigma = _seed_sd(references, rule) if source == "held_out" else None
    formula, term = _margin(
        progress=progress,
        tail=tail,
        sigma=sigma,
        loss_can_be_negative=_has_negative(references, endpoint),
        rule=rule,
    )
    held = references[0].held_out
    unit = train_unit(references[0]) if endpoint == "train" or held is None else held.unit
    own = _own_margin(parse_margin(rule.margin), unit=unit, progress=progress)
    margin, term = (formula, term) if own is None else (own, "user")
    return Level(
        unit=unit,
        progress=progress,
        learned=learned,
        learned_se=None if learned_sd is None else learned_sd / math.sqrt(len(references)),
        start=statistics.mean_sd(starts)[0],
        tail=tail,
        sigma=sigma,
        margin=margin,
        margin_term=term,
        formula_margin=formula,
    )


def _shares(gains: Sequence[float], starts: Sequence[float]) -> list[float]:
    """Return each gain over the loss it started from.

    Over the mean start where one is zero; where all are, over the mean gain, as no share of the
    start exists and any gain is large beside it.
    """
    if all(start != 0 for start in starts):
        return [gain / abs(start) for gain, start in zip(gains, starts, strict=True)]
    scale = statistics.mean(np.abs(starts)) or statistics.mean(np.abs(gains)) or 1.0
    return [gain / scale for gain in gains]


def _seed_sd(references: Sequence[RunRecord], rule: DecisionRule) -> float | None:
    """Return the seed-to-seed sd of the held-out tail, if all seeds saw the same held-out data.

    Never from training tails: there the seeds' different batches inflate it, and pairing cancels
    exactly that part.
    """
    hashes = {r.fingerprints.held_out_sha256 for r in references}
    if len(references) < 3 or len(hashes) != 1 or None in hashes:
        return None
    return statistics.mean_sd([held_out_tail(r, rule) for r in references])[1]


def _has_negative(references: Sequence[RunRecord], endpoint: Endpoint) -> bool:
    if endpoint == "train":
        return any(_least_loss(r) < 0 for r in references)
    return any(min(held_out_by_step(r).values(), default=0.0) < 0 for r in references)


@once_per_run
def _least_loss(record: RunRecord) -> float:
    return min(record.series["loss"], default=0.0)


def _margin(
    *,
    progress: float,
    tail: float,
    sigma: float | None,
    loss_can_be_negative: bool,
    rule: DecisionRule,
) -> tuple[float, str]:
    """Return `min(max(min(progress*D, loss*L), seed_sd*sigma), cap*D)` and the term that set it."""
    if not progress > 0:
        return 0.0, "progress"
    margin, term = rule.margin_progress * progress, "progress"
    if not loss_can_be_negative and tail > 0 and rule.margin_loss * tail < margin:
        margin, term = rule.margin_loss * tail, "loss"
    if sigma is not None and rule.margin_seed_sd * sigma > margin:
        margin, term = rule.margin_seed_sd * sigma, "seed_sd"
    if margin > rule.margin_cap * progress:
        margin, term = rule.margin_cap * progress, "cap"
    return margin, term


def _own_margin(user: UserMargin | None, *, unit: str, progress: float) -> float | None:
    """Return the user's margin in an endpoint's unit; None where it says nothing about it.

    A size in the loss's unit says nothing about a figure in own units, nor the other way round; a
    share of what was learned serves every endpoint that learned something.
    """
    if user is None:
        return None
    if user.basis == "progress":
        return user.size / 100 * progress if progress > 0 else None
    return user.size if (user.basis == "own") == (unit == OWN_UNIT) else None
