"""The statistics of the decision rule, as pure functions of numbers; what they decide is elsewhere.

The unit of replication is the seed: every interval and test here is over per-seed differences,
never over steps (steps of one run are not independent of each other's trajectory). NaN in gives
NaN out; nothing is dropped or imputed. Student's t comes from `scipy.special`, imported on first
use because it takes longer than everything else here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@lru_cache(maxsize=4096)
def t_quantile(probability: float, df: int) -> float:
    """Return the quantile of Student's t: the x with P(T <= x) = `probability`.

    Args:
        probability: In (0, 1).
        df: Degrees of freedom, at least 1.

    Raises:
        ValueError: `df` < 1 or `probability` outside (0, 1).
    """
    if df < 1 or not 0 < probability < 1:
        raise ValueError(f"no t quantile for probability {probability} and df {df}")
    from scipy.special import stdtrit

    return float(stdtrit(df, probability))


def t_tail(x: float, df: int) -> float:
    """Return P(T > x) of Student's t with `df` degrees of freedom; NaN for NaN."""
    from scipy.special import stdtr

    return float(stdtr(df, -x))


def mean_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and sample standard deviation (divisor n - 1).

    The standard deviation is None for fewer than two values; the mean of none is NaN. Equal values
    give exactly 0, whatever their rounding.
    """
    if not values:
        return math.nan, None
    if len(values) > 1 and all(value == values[0] for value in values):
        return float(values[0]), 0.0
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    return mean, float(array.std(ddof=1)) if len(values) > 1 else None


def tail_probability(distance: float, standard_error: float, df: int) -> float:
    """Return P(T > distance / standard_error): the p-value of a one-sided t test.

    A standard error of 0 gives 0 for a positive distance and 1 otherwise, so that bitwise equal
    runs need no rule of their own.
    """
    if standard_error == 0:
        return math.nan if math.isnan(distance) else float(distance <= 0)
    return t_tail(distance / standard_error, df)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm-adjusted p-values, in the order given.

    Source: Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of
    Statistics 6 (1979), 65-70.
    """
    order = sorted(range(len(p_values)), key=lambda k: p_values[k])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, k in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[k]))
        adjusted[k] = largest
    return adjusted


def failure_rate_bound(num_runs: int, *, level: float = 0.05) -> float:
    """Return the largest failure rate that zero failures in `num_runs` runs leave open.

    The exact one-sided binomial bound `1 - level^(1/n)` (Clopper and Pearson 1934, zero events).
    1.0 without runs.
    """
    return 1.0 if num_runs < 1 else 1.0 - level ** (1.0 / num_runs)


def pairs_needed(
    *, distance: float, sd: float, num_pairs: int, alpha: float, power: float, limit: int
) -> int | None:
    """Return the smallest number of pairs, above `num_pairs`, that should settle a one-sided test.

    The smallest n' with `(t(n'-1, 1-alpha) + t(n'-1, power)) * sd / sqrt(n') <= distance`: mean and
    spread are taken as they are now.

    Args:
        distance: From the mean to the margin, positive.
        sd: Standard deviation of the per-seed differences, same unit.
        num_pairs: Pairs there are.
        alpha: Level of the test.
        power: Wanted probability of settling it.
        limit: Largest n' looked at.

    Returns:
        None if no n' up to `limit` is enough, or an argument is NaN.
    """
    for pairs in range(max(num_pairs + 1, 2), limit + 1):
        width = t_quantile(1 - alpha, pairs - 1) + t_quantile(power, pairs - 1)
        if width * sd / math.sqrt(pairs) <= distance:
            return pairs
    return None


def exponential_average(values: Sequence[float], *, decay: float) -> FloatArray:
    """Return the exponential moving average, started at the first value; same length.

    `ema[t] = decay * ema[t-1] + (1 - decay) * values[t]`.
    """
    averages = np.empty(len(values), dtype=np.float64)
    current = values[0] if len(values) else math.nan
    for step, value in enumerate(values):
        current = decay * current + (1 - decay) * value
        averages[step] = current
    return averages


def slope(values: Sequence[float] | FloatArray) -> float:
    """Return the least-squares slope per step; NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan
    y = np.asarray(values, dtype=np.float64)
    x = np.arange(len(y), dtype=np.float64)
    x -= x.mean()
    return float(x @ (y - y.mean()) / (x @ x))


def count_spikes(values: Sequence[float], *, window: int, mads: float) -> int:
    """Return how many steps lie above the running median by more than `mads` times the MAD.

    Median and median absolute deviation are those of the `window` steps before; steps without a
    full window before them, and windows without any spread, are not counted. NaN never counts.
    """
    series = np.asarray(values, dtype=np.float64)
    if len(series) <= window:
        return 0
    windows = np.lib.stride_tricks.sliding_window_view(series, window)[:-1]
    medians = np.median(windows, axis=1)
    spread = np.median(np.abs(windows - medians[:, None]), axis=1)
    return int(np.sum((spread > 0) & (series[window:] > medians + mads * spread)))


def longest_run(flags: Sequence[float]) -> int:
    """Return the length of the longest run of non-zero entries."""
    longest = current = 0
    for flag in flags:
        current = current + 1 if flag else 0
        longest = max(longest, current)
    return longest
