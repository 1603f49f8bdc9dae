"""The sums of the same-point probe: candidate gradients against FP32 ones at the same weights.

For K batches with FP32 gradients f_j, candidate gradients c_j and errors e_j = c_j - f_j. Every
quantity is a sum over weights, so it is kept per parameter: modules and the whole model are sums
of the same numbers. All sums are in FP64; what is not finite stays so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from harness.numerics.errors import decibels

# Elements of a block of columns in FP64: bounds the memory of the products.
_BLOCK_ELEMENTS = 1 << 21


@dataclass(frozen=True, kw_only=True)
class GradientSums:
    """What the K gradients of some weights add up to; `+` is over weights or over points.

    Attributes:
        noise: sum_j |f_j - mean f|^2 / (K-1).
        mean_gradient_sq: |mean f|^2.
        error_sq: mean_j |e_j|^2.
        mean_error_sq: |mean e|^2.
        error_noise: sum_j |e_j - mean e|^2 / (K-1).
        cross: sum over i != j of <c_i, f_j>.
        self_cross: sum over i != j of <f_i, f_j>.
        reference_sq: sum_j |f_j|^2.
        candidate_sq: sum_j |c_j|^2.
        product: sum_j <c_j, f_j>.
        nonzero: Elements of all f_j that are not zero.
        same_sign: Those of them whose c_j has the same sign.
        flushed: Those of them whose c_j is zero.
    """

    noise: float = 0.0
    mean_gradient_sq: float = 0.0
    error_sq: float = 0.0
    mean_error_sq: float = 0.0
    error_noise: float = 0.0
    cross: float = 0.0
    self_cross: float = 0.0
    reference_sq: float = 0.0
    candidate_sq: float = 0.0
    product: float = 0.0
    nonzero: float = 0.0
    same_sign: float = 0.0
    flushed: float = 0.0

    def __add__(self, other: GradientSums) -> GradientSums:
        return GradientSums(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    @classmethod
    def total(cls, parts: Iterable[GradientSums]) -> GradientSums:
        """Return the sum of all parts; zeros for none."""
        result = cls()
        for part in parts:
            result = result + part
        return result


def gradient_sums(candidate: Tensor, reference: Tensor) -> GradientSums:
    """Return the sums over one parameter's gradients.

    Args:
        candidate: Shape (K, n): gradients c_j of K >= 2 batches, unscaled, one flat row each.
        reference: Same shape: the FP32 gradients f_j.

    Returns:
        All zeros for n = 0. NaN or infinite where a candidate's gradient is not finite.

    Raises:
        ValueError: Shapes differ or K < 2.

    Source: the trace of the minibatch gradient covariance of McCandlish et al. 2018 ("An empirical
    model of large-batch training", section 2.2) and the same statistics of the rounding error.
    """
    if candidate.shape != reference.shape or candidate.ndim != 2 or candidate.shape[0] < 2:
        raise ValueError(
            f"two (K, n) matrices of one shape with K >= 2 are needed, got "
            f"{tuple(candidate.shape)} and {tuple(reference.shape)}"
        )
    num_batches, size = candidate.shape
    width = max(1, _BLOCK_ELEMENTS // num_batches)
    totals = torch.zeros(len(_SUM_NAMES), dtype=torch.float64, device=candidate.device)
    for start in range(0, size, width):
        columns = slice(start, start + width)
        totals += _block_sums(candidate[:, columns].double(), reference[:, columns].double())
    # One fetch per parameter; the probe runs beside training, not inside it.
    return GradientSums(**dict(zip(_SUM_NAMES, totals.tolist(), strict=True)))


_SUM_NAMES = tuple(f.name for f in fields(GradientSums))


def _block_sums(c: Tensor, f: Tensor) -> Tensor:
    """Return the sums over a block of columns, in the order of `GradientSums`: 1-D FP64."""
    count = c.shape[0]
    e = c - f
    mean_f, mean_e = f.mean(0), e.mean(0)
    sum_c, sum_f = c.sum(0), f.sum(0)
    product, reference_sq = _dot(c, f), _dot(f, f)
    spread_f, spread_e = f - mean_f, e - mean_e
    is_nonzero = f != 0
    sums = (
        _dot(spread_f, spread_f) / (count - 1),
        _dot(mean_f, mean_f),
        _dot(e, e) / count,
        _dot(mean_e, mean_e),
        _dot(spread_e, spread_e) / (count - 1),
        _dot(sum_c, sum_f) - product,
        _dot(sum_f, sum_f) - reference_sq,
        reference_sq,
        _dot(c, c),
        product,
        is_nonzero.sum(),
        (is_nonzero & (torch.sign(c) == torch.sign(f))).sum(),
        (is_nonzero & (c == 0)).sum(),
    )
    return torch.stack([value.double() for value in sums])


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.reshape(-1), b.reshape(-1))


@dataclass(frozen=True, kw_only=True)
class GradientMeasures:
    """The measures of some weights that a reader looks at; None where they are not defined.

    Attributes:
        gradient_error: sqrt(sum |e|^2 / sum |f|^2).
        cosine: Of c and f, taken over all batches as one vector.
        sign_agreement: Share of elements whose signs agree, of those not zero in FP32.
        sqnr_db: 10 log10(sum |f|^2 / sum |e|^2); infinite without any error.
        flushed_share: Share of elements that are zero in c, of those not zero in f.
        noise_ratio: sum mean_j |e_j|^2 / sum noise.
    """

    gradient_error: float | None = None
    cosine: float | None = None
    sign_agreement: float | None = None
    sqnr_db: float | None = None
    flushed_share: float | None = None
    noise_ratio: float | None = None


def measures(sums: GradientSums, *, num_batches: int) -> GradientMeasures:
    """Return the measures that follow from sums.

    Args:
        sums: Over the weights and points of interest.
        num_batches: K, at every point.

    Returns:
        None where a denominator is zero (a module without gradients). `inf` and NaN where the
        candidate's gradients are not finite.
    """
    error_sq = sums.error_sq * num_batches
    has_signal = sums.reference_sq > 0
    error = _root(error_sq / sums.reference_sq) if has_signal else None
    norms = _root(sums.candidate_sq) * _root(sums.reference_sq)
    return GradientMeasures(
        gradient_error=error,
        cosine=_clamped(sums.product / norms) if has_signal and norms != 0 else None,
        sign_agreement=sums.same_sign / sums.nonzero if sums.nonzero else None,
        sqnr_db=decibels(error) if error is not None else None,
        flushed_share=sums.flushed / sums.nonzero if sums.nonzero else None,
        noise_ratio=sums.error_sq / sums.noise if sums.noise > 0 else None,
    )


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def _clamped(value: float) -> float:
    return value if math.isnan(value) else min(1.0, max(-1.0, value))


def batches_that_fit(num_weights: int, *, wanted: int, limit_bytes: int) -> int:
    """Return how many batches' gradients and updates can be held at once, at least 2.

    Held in FP32 are f_j, c_j and the FP32 updates, at the last point those at the final rate too:
    16 bytes a weight and batch.
    """
    if num_weights == 0:
        return wanted
    return max(2, min(wanted, limit_bytes // (16 * num_weights)))


def own_parameters(names: Sequence[str], modules: Iterable[str]) -> dict[str, list[int]]:
    """Return module name -> indices of the parameters that it owns itself, not its children.

    Args:
        names: Dotted names of the parameters.
        modules: Dotted names of all modules; the root's is empty.
    """
    owned: dict[str, list[int]] = {name: [] for name in modules}
    for index, name in enumerate(names):
        owner = name.rpartition(".")[0]
        owned.setdefault(owner, []).append(index)
    return owned
