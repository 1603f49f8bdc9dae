"""Learning rates over a run: each ends at a hundredth, where small updates show their harm."""

from __future__ import annotations

import math

FINAL = 0.01


def cosine(step: int, steps: int, *, warmup: int) -> float:
    """Return the share of the peak rate at batch `step`: linear warm-up, then half a cosine."""
    done = _done(step, steps, warmup=warmup)
    if done is None:
        return (step + 1) / warmup
    return FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * done))


def linear(step: int, steps: int, *, warmup: int) -> float:
    """Return the share of the peak rate at batch `step`: linear warm-up, then a straight line."""
    done = _done(step, steps, warmup=warmup)
    if done is None:
        return (step + 1) / warmup
    return 1 - (1 - FINAL) * done


def _done(step: int, steps: int, *, warmup: int) -> float | None:
    """Return how much of the decay is over, 1 at the last batch; None during the warm-up."""
    if step < warmup:
        return None
    return min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
