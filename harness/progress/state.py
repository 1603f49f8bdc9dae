"""What all heartbeats together say: how many runs are done, and how long the rest may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.progress.heartbeat import SPARED, Beat


@dataclass(frozen=True, kw_only=True)
class SweepState:
    """What a display draws.

    Attributes:
        total: Runs of the sweep, reused ones included.
        reused: Runs that were finished before.
        beats: Runs of this invocation, in order of their start.
        elapsed_s: Since the display started.
        eta_s: Estimated rest; None before there is anything to estimate from.
        now: Unix time.
    """

    total: int
    reused: int
    beats: tuple[Beat, ...]
    elapsed_s: float
    eta_s: float | None
    now: float

    @property
    def running(self) -> tuple[Beat, ...]:
        """Runs that have not ended."""
        return tuple(beat for beat in self.beats if beat.status == "running")

    @property
    def num_done(self) -> int:
        """Ended runs, reused ones and those that need not start included."""
        return self.reused + len(self.beats) - len(self.running)

    def ordinal(self, beat: Beat) -> int:
        """Return the run's number in the sweep: reused ones first, then in order of start."""
        return self.reused + self.beats.index(beat) + 1


def estimate_rest(
    beats: tuple[Beat, ...],
    *,
    num_to_run: int,
    elapsed_s: float,
    weights: Mapping[str, float] | None = None,
) -> float | None:
    """Return the seconds until `num_to_run` runs are done, at the pace so far; None if unknown.

    Work is the share of steps done, each run weighted by its expected cost. The pace includes
    however many workers there are, so nothing about them needs to be known.

    Args:
        beats: Runs of this invocation.
        num_to_run: Runs of this invocation in all.
        elapsed_s: Seconds since the first could start.
        weights: Run key -> expected cost in any unit; a run not named counts as the mean.
    """
    known = dict(weights or {})
    mean = sum(known.values()) / len(known) if known else 1.0
    total = sum(known.values()) + mean * max(num_to_run - len(known), 0)
    done = 0.0
    for beat in beats:
        if beat.status == SPARED:
            total -= known.get(beat.run_key, mean)
            continue
        share = 1.0 if beat.status != "running" else beat.step / max(beat.steps, 1)
        done += known.get(beat.run_key, mean) * share
    if done <= 0 or elapsed_s <= 0:
        return None
    return elapsed_s * max(total - done, 0.0) / done
