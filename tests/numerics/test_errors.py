import math

import pytest
import torch

from harness.numerics.errors import decibels, relative_error, relative_error_where_finite


def test_relative_error():
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), reference) == 0.1
    assert relative_error(reference, reference) == 0.0


def test_decibels():
    assert decibels(0.1) == pytest.approx(20.0)
    assert decibels(0.0) == math.inf
    assert decibels(math.inf) == -math.inf
    assert decibels(math.nan) == -math.inf


def test_relative_error_at_the_edges():
    zero = torch.zeros(2)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(torch.ones(2), zero) == math.inf
    assert relative_error(torch.tensor([math.nan, 1.0]), torch.ones(2)) == math.inf
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
