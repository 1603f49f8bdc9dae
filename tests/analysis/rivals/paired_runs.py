"""Pairs of synthetic runs for the rules: a shared curve, and what a candidate adds to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from factories import make_record, with_series

from harness.analysis.pairing import Pair, make_pair
from harness.runs.record import RunRecord

Losses = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def make_pairs(
    change: Losses | None = None, seeds: Sequence[int] = range(8), **fields: object
) -> list[Pair]:
    """Return one pair per seed whose candidate's losses are `change(FP32's, generator)`."""
    return [pair_of(make_record("fp32", seed, **fields), change) for seed in seeds]  # type: ignore[arg-type]


def pair_of(reference: RunRecord, change: Losses | None = None) -> Pair:
    """Return a pair of a reference with a candidate whose losses are `change(its own)`."""
    losses = np.array(reference.series["loss"])
    if change is not None:
        losses = change(losses, np.random.default_rng(reference.seed))
    own = make_record("bf16", reference.seed)
    # The held-out set stays FP32's, so that what a test changes is all that differs.
    candidate = dataclasses.replace(
        reference, policy="bf16", policy_content=own.policy_content, run_key=own.run_key
    )
    return make_pair(with_series(candidate, loss=losses.tolist()), reference)


def noise(size: float) -> Losses:
    """Return a change by a constant drawn per seed, as chaotic but harmless rounding makes."""
    return lambda losses, rng: losses + size * rng.standard_normal()


def shift(size: float, spread: float = 0.0) -> Losses:
    """Return a change by `size` that grows in over the first half, with a spread over seeds."""
    return lambda losses, rng: (
        losses
        + (size + spread * rng.standard_normal())
        * np.minimum(1, 2 * np.arange(len(losses)) / len(losses))
    )


def spoilt(pairs: Sequence[Pair], *, seed: int, loss: Callable[[list[float]], list[float]]):
    """Return the pairs with the losses of one candidate changed."""
    return [
        make_pair(
            with_series(p.candidate, loss=loss(list(p.candidate.series["loss"]))), p.reference
        )
        if p.seed == seed
        else p
        for p in pairs
    ]
