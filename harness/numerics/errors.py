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


def decibels(relative_error: float) -> float:
    """Return the signal-to-quantization-noise ratio in dB, `-20 log10(relative_error)`.

    Returns:
        `inf` for an error of 0, `-inf` for an infinite one and for NaN.
    """
    if relative_error == 0.0:
        return math.inf
    return -20.0 * math.log10(relative_error) if relative_error < math.inf else -math.inf


def _flat_pair(candidate: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    if candidate.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(candidate.shape)} and {tuple(reference.shape)}")
    x = candidate.detach().to(torch.float64).reshape(-1)
    y = reference.detach().to(torch.float64).reshape(-1)
    if not y.isfinite().all():
        raise ValueError("the reference is not finite")
    return x, y
