"""The probe's sums against the formulas written out over a matrix of gradients (oracle)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.probes import gradient_error
from harness.probes.gradient_error import (
    GradientSums,
    batches_that_fit,
    gradient_sums,
    measures,
    own_parameters,
)


def _pair(num_batches: int, size: int, *, seed: int = 0, error: float = 1e-2):
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(num_batches, size, generator=generator) + 0.3
    c = f * (1 + error * torch.randn(num_batches, size, generator=generator))
    f[:, ::7] = 0
    c[:, 1::5] = 0
    return c, f


def _written_out(c: np.ndarray, f: np.ndarray) -> dict[str, float]:
    """Return every sum by its definition, pair by pair and batch by batch."""
    k = len(f)
    e = c - f
    mean_f, mean_e = f.mean(0), e.mean(0)
    elements = list(zip(f.ravel(), c.ravel(), strict=True))
    pairs = [(i, j) for i in range(k) for j in range(k) if i != j]
    return {
        "noise": sum(np.linalg.norm(f[j] - mean_f) ** 2 for j in range(k)) / (k - 1),
        "mean_gradient_sq": np.linalg.norm(mean_f) ** 2,
        "error_sq": np.mean([np.linalg.norm(e[j]) ** 2 for j in range(k)]),
        "mean_error_sq": np.linalg.norm(mean_e) ** 2,
        "error_noise": sum(np.linalg.norm(e[j] - mean_e) ** 2 for j in range(k)) / (k - 1),
        "cross": sum(c[i] @ f[j] for i, j in pairs),
        "self_cross": sum(f[i] @ f[j] for i, j in pairs),
        "reference_sq": sum(f[j] @ f[j] for j in range(k)),
        "candidate_sq": sum(c[j] @ c[j] for j in range(k)),
        "product": sum(c[j] @ f[j] for j in range(k)),
        "nonzero": sum(x != 0 for x in f.ravel()),
        "same_sign": sum(x != 0 and np.sign(x) == np.sign(y) for x, y in elements),
        "flushed": sum(x != 0 and y == 0 for x, y in elements),
    }


@pytest.mark.parametrize(("num_batches", "size"), [(2, 1), (3, 40), (16, 101)])
def test_every_sum_is_the_formula(num_batches, size):
    c, f = _pair(num_batches, size)
    found = vars(gradient_sums(c, f))
    for name, expected in _written_out(c.double().numpy(), f.double().numpy()).items():
        # FP64 sums of a few thousand terms: 1e-12 leaves room for another order of summation.
        assert found[name] == pytest.approx(expected, rel=1e-12, abs=1e-12), name


def test_blocks_of_columns_add_up(monkeypatch):
    c, f = _pair(4, 1000)
    whole = vars(gradient_sums(c, f))
    monkeypatch.setattr(gradient_error, "_BLOCK_ELEMENTS", 4 * 17)
    assert vars(gradient_sums(c, f)) == pytest.approx(whole, rel=1e-12)


def test_sums_of_parts_are_the_sums_of_the_whole():
    c, f = _pair(5, 60)
    parts = [gradient_sums(c[:, i : i + 20], f[:, i : i + 20]) for i in (0, 20, 40)]
    assert vars(GradientSums.total(parts)) == pytest.approx(vars(gradient_sums(c, f)), rel=1e-12)


def test_squares_that_leave_fp32_are_kept():
    # 1e-30 squared is 0 in FP32, 1e30 squared is infinite.
    for scale in (1e-30, 1e30):
        c, f = torch.full((2, 3), 2 * scale), torch.full((2, 3), scale)
        sums = gradient_sums(c, f)
        assert sums.error_sq == pytest.approx(3 * scale**2, rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), num_batches=st.integers(2, 8), size=st.integers(1, 30))
def test_unbiased_estimates_obey_their_identities(seed, num_batches, size):
    """The cross sums need no batch twice, and the mean's energy splits into signal and noise."""
    c, f = _pair(num_batches, size, seed=seed)
    sums, k = gradient_sums(c, f), num_batches
    # |mean f|^2 - noise/K is sum over i != j of <f_i, f_j> / (K (K-1)), exactly.
    signal = sums.mean_gradient_sq - sums.noise / k
    scale = sums.mean_gradient_sq + sums.noise
    assert signal == pytest.approx(sums.self_cross / (k * (k - 1)), abs=1e-12 * scale)
    assert sums.error_sq >= sums.mean_error_sq - 1e-12 * scale


def test_no_error_is_no_error():
    _, f = _pair(4, 30)
    sums = gradient_sums(f, f)
    assert (sums.error_sq, sums.mean_error_sq, sums.error_noise) == (0, 0, 0)
    assert sums.cross == sums.self_cross
    found = measures(sums, num_batches=4)
    assert found.gradient_error == 0
    assert found.cosine == pytest.approx(1)
    assert (found.sign_agreement, found.flushed_share, found.noise_ratio) == (1, 0, 0)
    assert found.sqnr_db == math.inf


def test_measures_are_those_of_the_flat_vectors():
    c, f = _pair(4, 90)
    found = measures(gradient_sums(c, f), num_batches=4)
    x, y = c.double().flatten(), f.double().flatten()
    error = float((x - y).norm() / y.norm())
    assert found.gradient_error == pytest.approx(error, rel=1e-12)
    assert found.cosine == pytest.approx(float(x @ y / x.norm() / y.norm()), rel=1e-12)
    assert found.sqnr_db == pytest.approx(-20 * math.log10(error), rel=1e-12)
    alive = y != 0
    assert found.flushed_share == pytest.approx(float((x[alive] == 0).double().mean()))
    assert found.sign_agreement == pytest.approx(
        float((x[alive].sign() == y[alive].sign()).double().mean())
    )


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(value):
    c, f = _pair(3, 10)
    c[1, 2] = value
    sums = gradient_sums(c, f)
    assert not math.isfinite(sums.error_sq)
    found = measures(sums, num_batches=3)
    assert not math.isfinite(found.gradient_error)
    assert not found.noise_ratio < 1e300  # infinite or NaN, either fails every threshold
    assert found.sqnr_db == -math.inf or math.isnan(found.sqnr_db)


def test_a_module_without_gradients_has_no_measures():
    nothing = measures(gradient_sums(torch.zeros(2, 5), torch.zeros(2, 5)), num_batches=2)
    assert set(vars(nothing).values()) == {None}
    empty = gradient_sums(torch.zeros(2, 0), torch.zeros(2, 0))
    assert empty == GradientSums()


@pytest.mark.parametrize(
    ("candidate", "reference"),
    [((2, 3), (2, 4)), ((1, 3), (1, 3)), ((6,), (6,))],
)
def test_wrong_shapes_are_refused(candidate, reference):
    with pytest.raises(ValueError, match="K >= 2"):
        gradient_sums(torch.zeros(candidate), torch.zeros(reference))


def test_fewer_batches_where_memory_ends():
    # Three matrices of FP32: 12 bytes a weight and batch.
    assert batches_that_fit(1000, wanted=16, limit_bytes=2 << 30) == 16
    assert batches_that_fit(100, wanted=16, limit_bytes=100 * 16 * 5) == 5
    assert batches_that_fit(10**9, wanted=16, limit_bytes=1) == 2
    assert batches_that_fit(0, wanted=16, limit_bytes=1) == 16


def test_a_parameter_belongs_to_the_module_that_holds_it():
    names = ["scale", "block.weight", "block.inner.bias", "block.bias"]
    owned = own_parameters(names, ["", "block", "block.inner", "activation"])
    assert owned == {"": [0], "block": [1, 3], "block.inner": [2], "activation": []}
