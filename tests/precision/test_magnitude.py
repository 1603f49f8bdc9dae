"""The largest magnitude of a tensor of any kind, against `abs().max()` where that exists."""

import math

import pytest
import torch
from precision_models import CPU, policy
from torch import nn

from harness.precision.audit import audited_step
from harness.precision.execution import applied
from harness.precision.magnitude import Magnitudes, floating_tensors, magnitude

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_largest_absolute_value(dtype):
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype) * 1000
    for view in (x, x[:, ::3], x.t(), x[0, 0], -x):
        assert float(magnitude(view)) == float(view.double().abs().max())
    assert magnitude(x).dtype is torch.float64
    # The largest finite value is no infinity, also in 16 bits.
    top = torch.finfo(dtype).max
    assert float(magnitude(torch.full((9,), top, dtype=dtype))) == top


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 7, 63])
def test_one_element_that_is_not_finite_shows(dtype, place):
    x = torch.ones(64, dtype=dtype)
    x[place] = -math.inf
    assert float(magnitude(x)) == math.inf
    x[place] = math.nan
    assert math.isnan(float(magnitude(x)))
    x[(place + 1) % 64] = math.inf
    assert not math.isfinite(float(magnitude(x)))


def test_other_kinds_of_tensors():
    assert float(magnitude(torch.empty(0))) == 0.0
    assert float(magnitude(torch.empty(3, 0))) == 0.0
    assert float(magnitude(torch.tensor(-3.0))) == 3.0
    assert float(magnitude(torch.tensor([1 + 4j, -5 + 0j]).conj())) == 5.0
    assert float(magnitude(torch.tensor([1.0, -6.0]).to(torch.float8_e5m2))) == 6.0
    sparse = torch.sparse_coo_tensor([[0, 0]], [2.0, 3.0], (4,), check_invariants=True)
    assert float(magnitude(sparse)) == 5.0  # duplicates add up
    assert float(magnitude(torch.eye(3).mul(-7).to_sparse())) == 7.0
    nested = torch.nested.nested_tensor(
        [torch.ones(2), torch.full((3,), -8.0)], layout=torch.jagged
    )
    assert float(magnitude(nested)) == 8.0


def test_a_changed_tensor_is_looked_at_again():
    known, x = Magnitudes(), torch.ones(4)
    assert float(known.of(x)) == 1.0
    first = known.of(x)
    assert known.of(x) is first
    x.mul_(5)
    assert float(known.of(x)) == 5.0
    x.data.fill_(9.0)  # past autograd's version counter
    assert float(known.renew(x)) == 9.0


def test_floating_tensors_are_found_in_any_nesting():
    x, i = torch.ones(1), torch.ones(1, dtype=torch.int64)
    assert len(list(floating_tensors((x, [x, i, (x, None)], {"a": x, "b": 3.0})))) == 4


class Odd(nn.Module):
    """Uses tensors of unusual kinds in its forward pass."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)
        self.head = nn.Linear(4, 4)

    def forward(self, index):
        x = self.head(self.table(index))
        spectrum = torch.fft.rfft(x.float()).abs().sum()
        product = torch.sparse.mm(torch.eye(len(x)).to_sparse(), x.float()).sum()
        return spectrum + product + x[:0].float().sum() + x.float().to(torch.float64).sum()


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16", "tf32"])
def test_an_audit_survives_them(compute):
    model = Odd()
    with applied(policy(compute), model, device=CPU) as execution:
        with audited_step(execution, model) as audit:
            with execution.forward():
                loss = model(torch.arange(5))
            loss.backward()
    result = audit.result()
    assert result["nonfinite"] == []
    assert {row["module"] for row in result["rows"]} >= {"table", "head", "(model)"}
