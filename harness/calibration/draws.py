"""Which seeds a simulated user happened to run: random orders of the stored seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

LONGEST = 8
"""Seeds in one draw: the most that any plan looks at; shorter plans take its beginning."""


def draw_orders(
    seeds: Sequence[int], *, draws: int, task: str, longest: int = LONGEST
) -> tuple[tuple[int, ...], ...]:
    """Return `draws` random orders of distinct seeds.

    The same for every arm and rule of a task, so that rules are compared on the same draws, and a
    sequential plan sees the beginning of what the fixed plan of 8 sees.

    Args:
        seeds: The stored seeds.
        draws: How many orders.
        task: Seeds the generator, so that a task's draws do not depend on the other tasks.
        longest: Length of each; fewer if there are fewer seeds.

    Returns:
        `draws` tuples of `min(longest, len(seeds))` seeds; empty without seeds.
    """
    length = min(longest, len(seeds))
    if not length:
        return ()
    digest = hashlib.sha256(f"draws of {task}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    pool = np.asarray(sorted(seeds))
    return tuple(
        tuple(int(seed) for seed in generator.permutation(pool)[:length]) for _ in range(draws)
    )
