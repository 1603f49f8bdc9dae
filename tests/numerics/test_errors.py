import math

import pytest
import torch

from harness.numerics.errors import (
    cosine,
    relative_error,
    relative_error_where_finite,
    sqnr_db,
    ulp_distance,
)


def test_relative_error_and_its_decibels():
    reference = torch.tensor([3.0, 4.0])
    candidate = torch.tensor([3.0, 4.5])
    assert relative_error(candidate, reference) == 0.1
    assert sqnr_db(candidate, reference) == pytest.approx(20.0)
    assert relative_error(reference, reference) == 0.0
    assert sqnr_db(reference, reference) == math.inf


def test_relative_error_at_the_edges():
    zero = torch.zeros(2)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(torch.ones(2), zero) == math.inf
    assert relative_error(torch.tensor([math.nan, 1.0]), torch.ones(2)) == math.inf
    assert sqnr_db(torch.tensor([math.nan, 1.0]), torch.ones(2)) == -math.inf
    with pytest.raises(ValueError, match="reference is not finite"):
        relative_error(zero, torch.tensor([1.0, math.inf]))
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(zero, torch.zeros(3))


def test_infinities_of_the_reference_are_left_out():
    reference = torch.tensor([3.0, 4.0, -math.inf, math.nan])
    assert relative_error_where_finite(torch.tensor([3.0, 4.5, 0.0, 1.0]), reference) == 0.1
    assert relative_error_where_finite(torch.tensor([3.0, math.inf, 0, 0]), reference) == math.inf
    assert relative_error_where_finite(reference, reference) == 0.0
    assert relative_error_where_finite(torch.ones(1), torch.tensor([math.inf])) == 0.0
    assert relative_error_where_finite(torch.zeros(0), torch.zeros(0)) == 0.0
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error_where_finite(torch.zeros(2), torch.zeros(3))


def test_cosine():
    a = torch.tensor([1.0, 0.0])
    assert cosine(a, torch.tensor([1.0, 1.0])) == pytest.approx(math.sqrt(0.5))
    assert cosine(a, -a) == -1.0
    assert math.isnan(cosine(torch.zeros(2), a))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ulp_distance_counts_steps_of_nextafter(dtype):
    a = torch.tensor([1.0, -1.0, 0.0, 2.0], dtype=dtype)
    b = a
    for _ in range(3):
        b = torch.nextafter(b, torch.full_like(b, 100.0))
    assert ulp_distance(a, b).tolist() == [3, 3, 3, 3]
    zeros = torch.zeros(1, dtype=dtype)
    assert ulp_distance(zeros, -zeros).item() == 0


def test_ulp_distance_refuses_other_dtypes():
    with pytest.raises(ValueError, match="FP32, FP16 or BF16"):
        ulp_distance(torch.ones(1).double(), torch.ones(1).double())
