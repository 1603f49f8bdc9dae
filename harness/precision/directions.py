"""Reads the direction of a policy's entries: `forward:softmax` concerns the forward pass only.

An entry without a prefix concerns both. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def split_direction(entry: str) -> tuple[Direction | None, str]:
    """Return an entry's direction, None for both, and what follows it.

    >>> split_direction("backward:blocks.*.norm"), split_direction("softmax")
    (('backward', 'blocks.*.norm'), (None, 'softmax'))
    """
    for direction in DIRECTIONS:
        if entry.startswith(f"{direction}:"):
            return direction, entry.removeprefix(f"{direction}:")
    return None, entry


def entries_for(entries: Iterable[str], direction: Direction) -> tuple[str, ...]:
    """Return the entries that concern a direction, as written."""
    return tuple(entry for entry in entries if split_direction(entry)[0] in (None, direction))
