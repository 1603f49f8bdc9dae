"""A bootstrap over the steps of the tail, in blocks, as if steps were replicates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from harness.analysis.rivals.base import Finding, Rival
from harness.analysis.rivals.curves import FloatArray, PairCurves


@dataclass(frozen=True, kw_only=True)
class BlockBootstrap(Rival):
    """Reject if the bootstrap interval of the mean difference over the tail lies above zero.

    The difference series, averaged over seeds step by step, has m steps (the last third) and is
    resampled in overlapping blocks of `ceil(sqrt(m))` steps, as many as cover m. Reject if the
    2.5 % quantile of the means of `resamples` resamples is above 0: a two-sided 95 % percentile
    interval that excludes 0 on the worse side. The blocks drawn depend on m alone, so the rule is
    a function of its input. A loss that is not finite: reject. One pair is enough, which is what
    makes the rule popular.

    Source: moving blocks, Kuensch, The jackknife and the bootstrap for general stationary
    observations, Annals of Statistics 17 (1989), 1217-1241; percentile interval, Efron and
    Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """

    name: str = "block_bootstrap"
    sentence: str = (
        "The 95 % block-bootstrap interval over steps of the mean difference lies above zero."
    )
    compares: str = "the lower end of the bootstrap interval of the mean difference"
    level: float = 0.05
    resamples: int = 1000

    def compare(self, curves: Sequence[PairCurves], twins: Sequence[PairCurves]) -> Finding:
        """Return the outcome, with the lower end of the interval."""
        series = curves[0].tail_differences
        if len(curves) > 1:
            series = np.add.reduce([c.tail_differences for c in curves]) / len(curves)
        low = lower_end(series, level=self.level, resamples=self.resamples)
        return Finding(outcome="reject" if low > 0 else "accept", value=low, threshold=0.0)


def lower_end(series: FloatArray, *, level: float, resamples: int) -> float:
    """Return the `level / 2` quantile of the moving-block bootstrap of a series' mean.

    Args:
        series: One difference per step, at least one.
        level: Two-sided level of the interval.
        resamples: How often the series is resampled.
    """
    length = block_length(len(series))
    sums = np.concatenate(([0.0], np.cumsum(series)))
    means = (sums[length:] - sums[:-length]) / length
    # The running sums leave an ulp of noise on a series that is zero, or one value, throughout.
    means = np.where(np.ptp(series) == 0, series[0], means)
    resampled = means[_blocks(len(series), resamples)].mean(axis=0)
    rank = max(0, math.ceil(level / 2 * resamples) - 1)
    return float(np.partition(resampled, rank)[rank])


def block_length(num_steps: int) -> int:
    """Return the block length of a series: the square root of its length, rounded up."""
    return math.ceil(math.sqrt(num_steps))


@lru_cache(maxsize=64)
def _blocks(num_steps: int, resamples: int) -> NDArray[np.intp]:
    """Return the first steps of the blocks drawn, shape (blocks, resamples)."""
    length = block_length(num_steps)
    generator = np.random.default_rng([num_steps, resamples])
    shape = (math.ceil(num_steps / length), resamples)
    return generator.integers(num_steps - length + 1, size=shape).astype(np.intp)
