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


def t_tail(x: float, df: float) -> float:
    """Return P(T > x) of Student's t with `df` degrees of freedom; NaN for NaN."""
    from scipy.special import stdtr

    return float(stdtr(df, -x))


def mean(values: Sequence[float] | FloatArray) -> float:
    """Return the mean; NaN of none, of a NaN, and of infinities of both signs."""
    if not len(values):
        return math.nan
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.mean(np.asarray(values, dtype=np.float64)))


def mean_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and sample standard deviation (divisor n - 1).

    The standard deviation is None for fewer than two values; the mean of none is NaN. Equal values
    give exactly 0, whatever their rounding.
    """
    if not values:
        return math.nan, None
    if len(values) > 1 and all(value == values[0] for value in values):
        return float(values[0]), 0.0
    spread = None
    if len(values) > 1:
        # Of an infinite loss there is none, and that of a huge one overflows: no warnings of numpy.
        with np.errstate(invalid="ignore", over="ignore"):
            spread = float(np.std(np.asarray(values, dtype=np.float64), ddof=1))
    return mean(values), spread


def tail_probability(distance: float, standard_error: float, df: float) -> float:
    """Return P(T > distance / standard_error): the p-value of a one-sided t test.

    A standard error of 0 gives 0 for a positive distance and 1 otherwise, so that bitwise equal
    runs need no rule of their own.
    """
    if standard_error == 0:
        return math.nan if math.isnan(distance) else float(distance <= 0)
    return t_tail(distance / standard_error, df)


def always_valid_quantile(num_pairs: int, two_sided: float, *, g: float = 50.0) -> float:
    """Return how many standard errors a confidence sequence reaches at `num_pairs` pairs.

    The intervals `mean +- quantile * s/sqrt(n)` hold at all n at once with probability of at least
    `1 - two_sided`, so one may look after every pair. With `a = 1 + g*n`:
    `R = (a / two_sided^2)^(1/n)`, quantile `sqrt((n-1) * (R-1) / (1 - R/a))`, infinite where
    `R >= a` (too few pairs for this level).

    Args:
        num_pairs: n, at least 2.
        two_sided: Level, in (0, 1); a one-sided use at level alpha passes twice alpha.
        g: Variance of the Gaussian mixture over the mean, in units of the variance of one pair.

    Source: inverted from the t-martingale with right-Haar prior on the scale and Gaussian mixture
    on the mean of Wang and Ramdas, Anytime-valid t-tests and confidence sequences for Gaussian
    means with unknown variance (arXiv 2310.03722).
    """
    a = 1 + g * num_pairs
    ratio = (a / two_sided**2) ** (1 / num_pairs)
    if ratio >= a:
        return math.inf
    return math.sqrt((num_pairs - 1) * (ratio - 1) / (1 - ratio / a))


def always_valid_p(distance: float, standard_error: float, num_pairs: int) -> float:
    """Return the one-sided p-value whose quantile is `distance / standard_error`.

    The inverse of `always_valid_quantile`: half the two-sided level, at most 1, and 1 for a
    distance that is not positive. A standard error of 0 gives the least p that `num_pairs` reach.
    """
    if math.isnan(distance) or math.isnan(standard_error):
        return math.nan
    if distance <= 0:
        return 1.0
    a = 1 + 50.0 * num_pairs
    if standard_error == 0:
        ratio = a
    else:
        squared = (distance / standard_error) ** 2 / (num_pairs - 1)
        ratio = (1 + squared) / (1 + squared / a)
    return min(1.0, 0.5 * math.sqrt(a / ratio**num_pairs))


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
    *,
    distance: float,
    sd: float,
    num_pairs: int,
    alpha: float,
    power: float,
    limit: int,
    always_valid: bool = False,
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
        always_valid: Whether the test is the always-valid one, whose quantile takes the place of
            `t(n'-1, 1-alpha)`.

    Returns:
        None if no n' up to `limit` is enough, or an argument is NaN.
    """
    for pairs in range(max(num_pairs + 1, 2), limit + 1):
        error = sd / math.sqrt(pairs)
        if (
            detectable(error, pairs, alpha=alpha, power=power, always_valid=always_valid)
            <= distance
        ):
            return pairs
    return None


def detectable(
    standard_error: float, num_pairs: int, *, alpha: float, power: float, always_valid: bool = False
) -> float:
    """Return the distance from a margin that a one-sided test finds with probability `power`.

    `(quantile of the test + t(n-1, power)) * standard_error`; a standard error of 0 gives 0.
    """
    if standard_error == 0:
        return 0.0
    quantile = one_sided_quantile(alpha, num_pairs, always_valid=always_valid)
    return (quantile + t_quantile(power, num_pairs - 1)) * standard_error


def one_sided_quantile(alpha: float, num_pairs: int, *, always_valid: bool) -> float:
    """Return how many standard errors a one-sided interval at level `alpha` reaches.

    Student's t, or the always-valid quantile at twice `alpha`.
    """
    if always_valid:
        return always_valid_quantile(num_pairs, 2 * alpha)
    return t_quantile(1 - alpha, num_pairs - 1)


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
    """Return the least-squares slope per step; NaN for fewer than two values or one not finite."""
    y = np.asarray(values, dtype=np.float64)
    if len(y) < 2 or not np.isfinite(y).all():
        return math.nan
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
