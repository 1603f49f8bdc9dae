"""How far one tensor is from another, in the measures that numerical analysis uses."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_error(candidate: Tensor, reference: Tensor) -> float:
    """Return the normwise relative error of `candidate` against `reference`.

    Computes ||candidate - reference||_2 / ||reference||_2 in FP64.

    Args:
        candidate: Any shape, any floating dtype.
        reference: Same shape; taken as exact.

    Returns:
        Dimensionless, >= 0. `inf` if `candidate` has a non-finite entry, or if it differs from a
        zero reference; 0.0 if both are zero or empty.

    Raises:
        ValueError: Shapes differ, or `reference` is not finite.

    Source: Higham, Accuracy and Stability of Numerical Algorithms (2002), section 1.2.
    """
    x, y = _flat_pair(candidate, reference)
    if not x.isfinite().all():
        return math.inf
    error, norm = float((x - y).norm()), float(y.norm())
    if error == 0.0:
        return 0.0
    return error / norm if norm > 0 else math.inf


def relative_error_where_finite(candidate: Tensor, reference: Tensor) -> float:
    """Return the normwise relative error over the elements that are finite in `reference`.

    For outputs in which infinity has a meaning, such as masked attention scores. Computed in FP64.

    Args:
        candidate: Any shape, any real floating dtype.
        reference: Same shape; taken as exact.

    Returns:
        Dimensionless, >= 0. `inf` if `candidate` is not finite where `reference` is, or if it
        differs from a zero reference; 0.0 if both are zero or empty there.

    Raises:
        ValueError: Shapes differ.
    """
    if candidate.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(candidate.shape)} and {tuple(reference.shape)}")
    is_finite = reference.detach().isfinite()
    if not is_finite.all():
        candidate, reference = candidate[is_finite], reference[is_finite]
    return relative_error(candidate, reference)


def cosine(candidate: Tensor, reference: Tensor) -> float:
    """Return the cosine of the angle between two tensors taken as vectors, in FP64.

    Returns:
        In [-1, 1]; NaN if either is zero, empty, or `candidate` is not finite.

    Raises:
        ValueError: Shapes differ, or `reference` is not finite.
    """
    x, y = _flat_pair(candidate, reference)
    norms = float(x.norm()) * float(y.norm())
    if not (norms > 0 and math.isfinite(norms)):
        return math.nan
    return min(1.0, max(-1.0, float(x @ y) / norms))


def sqnr_db(candidate: Tensor, reference: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio in dB, `-20 log10(relative_error)`.

    Returns:
        `inf` where the tensors agree exactly, `-inf` where the relative error is infinite.

    Raises:
        ValueError: Shapes differ, or `reference` is not finite.
    """
    error = relative_error(candidate, reference)
    if error == 0.0:
        return math.inf
    return -math.inf if math.isinf(error) else -20.0 * math.log10(error)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return how many representable values lie between elements, counting one end.

    Args:
        a: FP32, FP16 or BF16, finite.
        b: Same shape and dtype.

    Returns:
        int64 tensor of the same shape, >= 0; +0 and -0 are the same value.

    Raises:
        ValueError: Shapes or dtypes differ, or the dtype has no integer view of its size.
    """
    views = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
    if a.shape != b.shape or a.dtype is not b.dtype or a.dtype not in views:
        raise ValueError(
            f"ulp_distance takes two tensors of one shape in FP32, FP16 or BF16, "
            f"got {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
        )
    return (_ordered(a, views[a.dtype]) - _ordered(b, views[b.dtype])).abs()


def _ordered(values: Tensor, integer: torch.dtype) -> Tensor:
    """Map bit patterns to integers that grow with the value: negative ones run backwards."""
    bits = values.contiguous().view(integer).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(integer).min - bits, bits)


def _flat_pair(candidate: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    if candidate.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(candidate.shape)} and {tuple(reference.shape)}")
    x = candidate.detach().to(torch.float64).reshape(-1)
    y = reference.detach().to(torch.float64).reshape(-1)
    if not y.isfinite().all():
        raise ValueError("the reference is not finite")
    return x, y
