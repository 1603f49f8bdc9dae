"""Errors module by module: the guilty one stands out, and the model is as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from harness.precision.execution import applied
from harness.precision.policy import PrecisionPolicy
from harness.runs.dropout import paired_dropout
from harness.runs.same_point import local_errors
from harness.runs.same_point.local_errors import LocalError, LocalErrors

CPU = torch.device("cpu")
BF16 = PrecisionPolicy(name="bf16", compute_format="bf16")
FP16 = PrecisionPolicy(name="fp16", compute_format="fp16")
TF32 = PrecisionPolicy(name="tf32", compute_format="tf32")


def errors(model, policy: PrecisionPolicy, *inputs) -> dict[str, LocalError]:
    torch.manual_seed(0)

    def forward():
        torch.manual_seed(1)
        return model(*inputs)

    with paired_dropout(CPU):
        recorded = LocalErrors.record(model, forward, device=CPU)
        with applied(policy, model, device=CPU) as execution:

            def candidate():
                with execution.forward():
                    forward()

            dtypes = recorded.handed_over(candidate)
        recorded.prepare(dtypes)
        with applied(policy, model, device=CPU) as execution:
            return recorded.compare(execution, dtypes)


class Distances(nn.Module):
    """Squared distances by |a|^2 + |b|^2 - 2ab: cancels far from the origin."""

    def forward(self, x):
        n = (x * x).sum(-1)
        return n[:, None] + n[None, :] - 2 * x @ x.T


class Geometry(nn.Module):
    def __init__(self):
        super().__init__()
        self.distances = Distances()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.exp(-self.distances(x).float()))


@pytest.mark.parametrize("policy", [TF32, BF16], ids=lambda p: p.name)
def test_a_module_without_parameters_stands_out(policy):
    """Planted fault: the cancelling module's error is orders above its neighbours'."""
    x = torch.randn(8, 3) + torch.tensor([40.0, -25.0, 30.0])
    found = errors(Geometry(), policy, x)
    assert found["distances"].error > 30 * found["head"].error


def test_it_is_clean_when_kept_in_fp32():
    kept = PrecisionPolicy(name="kept", compute_format="bf16", fp32_modules=("distances",))
    found = errors(Geometry(), kept, torch.randn(8, 3) + 40)
    assert found["distances"].error == 0
    assert found["head"].error > 0


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.inner(x))


def test_what_lies_inside_a_kept_module_is_kept_too():
    kept = PrecisionPolicy(name="kept", compute_format="bf16", fp32_modules=("inner",))
    found = errors(Outer(), kept, torch.randn(4, 6))
    assert {n: e.error for n, e in found.items() if n.startswith("inner")} == {
        "inner": 0.0,
        "inner.0": 0.0,
        "inner.1": 0.0,
    }
    assert found["last"].error > 0


def test_a_linear_layer_has_the_error_of_its_format():
    """Oracle: operands and result rounded by hand."""
    layer, x = nn.Linear(16, 8, bias=False), torch.randn(5, 16)
    weight = layer.weight.detach()
    exact = x @ weight.T
    rounded = (x.bfloat16().float() @ weight.bfloat16().float().T).bfloat16().float()
    expected = float((rounded - exact).double().norm() / exact.double().norm())
    # The root is the layer; its sums may run in another order before the last rounding.
    assert errors(layer, BF16, x)["(model)"].error == pytest.approx(expected, rel=0.05)


class Embedding(nn.Module):
    def forward(self, t):
        return torch.sin(t.float()[:, None] * torch.arange(1, 5))


class Diffusion(nn.Module):
    """Casts whole numbers to the format that its first layer returns."""

    def __init__(self):
        super().__init__()
        self.inp, self.embed = nn.Linear(3, 4), Embedding()

    def forward(self, x, t):
        h = self.inp(x)
        return h + self.embed(t.to(h.dtype))


def test_whole_numbers_that_become_others():
    """Planted fault: integers above 256 are rounded in BF16; FP16 holds them up to 2048."""
    t = torch.tensor([3, 257, 999])
    found = errors(Diffusion(), BF16, torch.randn(3, 3), t)
    assert found["embed"].integer_input_max == 999
    # Its own arithmetic is FP32: the fault is where the numbers were rounded.
    assert found["embed"].error == 0
    assert found["(model)"].error > 0.1
    assert found["inp"].integer_input_max is None
    assert errors(Diffusion(), FP16, torch.randn(3, 3), t)["embed"].integer_input_max is None
    even = torch.tensor([3, 256, 998])
    assert errors(Diffusion(), BF16, torch.randn(3, 3), even)["embed"].integer_input_max == 998
    exact = torch.tensor([3, 256, 512])
    assert errors(Diffusion(), BF16, torch.randn(3, 3), exact)["embed"].integer_input_max is None


class Rotation(nn.Module):
    """Makes 16-bit values of integers inside: by a cast, by promotion, or counting in them."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, q, t):
        if self.how == "cast":
            t = t.to(q.dtype)
        elif self.how == "count":
            t = torch.arange(len(t), dtype=q.dtype)
        elif self.how == "fp32":
            t = t.float()
        return q * torch.sin(t * torch.ones(1, dtype=q.dtype if self.how != "fp32" else None))


class Rotating(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inp, self.rotate = nn.Linear(3, 1), Rotation(how)

    def forward(self, x, t):
        return self.rotate(self.inp(x).squeeze(-1), t)


@pytest.mark.parametrize("how", ["cast", "promote", "count"])
def test_whole_numbers_that_become_others_inside_of_a_module(how):
    x, t = torch.randn(600, 3), torch.arange(600)
    found = errors(Rotating(how), BF16, x, t)
    assert found["rotate"].integer_input_max == 599
    assert found["inp"].integer_input_max is None
    assert errors(Rotating(how), FP16, x, t)["rotate"].integer_input_max is None
    few = errors(Rotating(how), BF16, x[:200], t[:200])
    assert few["rotate"].integer_input_max is None


def test_whole_numbers_that_stay_what_they_are():
    found = errors(Rotating("fp32"), BF16, torch.randn(600, 3), torch.arange(600))
    assert all(e.integer_input_max is None for e in found.values())
    kept = PrecisionPolicy(name="kept", compute_format="bf16", fp32_modules=("rotate",))
    found = errors(Rotating("cast"), kept, torch.randn(600, 3), torch.arange(600))
    assert all(e.integer_input_max is None for e in found.values())


class HalfNorm(nn.Module):
    """Squares in the format that it is given: overflows in FP16 and returns zeros."""

    def forward(self, x):
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True))


class BeforeNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4, bias=False), HalfNorm()
        nn.init.eye_(self.up.weight)

    def forward(self, x):
        return self.norm(self.up(x))


def test_inputs_come_in_the_format_that_the_policy_hands_over():
    """Planted fault: given FP32, the norm would be innocent."""
    found = errors(
        BeforeNorm(),
        PrecisionPolicy(name="all", compute_format="fp16", low_precision_ops=("all",)),
        torch.full((2, 4), 500.0),
    )
    assert found["norm"].error > 0.9
    assert found["up"].error < 1e-3


class Masked(nn.Module):
    def forward(self, x):
        return (x @ x.T).masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf)


def test_infinities_that_fp32_has_too_are_no_error():
    error = errors(Masked(), BF16, torch.randn(6, 6))["(model)"].error
    assert 0 < error < 0.02


def test_an_overflow_is_an_infinite_error():
    layer = nn.Linear(4, 4, bias=False)
    nn.init.constant_(layer.weight, 300.0)
    found = errors(layer, FP16, torch.full((1, 4), 300.0))["(model)"]
    assert found.error == torch.inf
    assert found.output_max == 360000


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.linear = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.drop(torch.relu_(self.norm(self.linear(x))))


def test_dropout_masks_agree_and_the_model_is_as_before():
    model, x = Stateful(), torch.randn(32, 6)
    before = copy.deepcopy(model.state_dict())
    found = errors(model, BF16, x)
    # Another mask would give an error near 1.
    assert found["drop"].error < 0.02
    assert found["(model)"].error < 0.05
    assert model.calls == 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act = nn.Linear(6, 6), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.first(x)
        self.act(y)
        return y.mul_(2)


def test_what_is_changed_in_place_later_is_compared_as_it_was():
    found = errors(InPlace(), BF16, torch.randn(8, 6))
    assert all(e.error < 0.01 for e in found.values())


class TwiceAndStructured(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.never = nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, batch, *, scale):
        return {"out": [self.shared(self.shared(batch["x"])) * scale], "count": 3}


def test_structures_shared_modules_and_modules_that_are_never_called():
    model = TwiceAndStructured()
    inputs = {"x": torch.randn(3, 4)}
    with paired_dropout(CPU):
        recorded = LocalErrors.record(model, lambda: model(inputs, scale=2.0), device=CPU)
        with applied(BF16, model, device=CPU) as execution:
            found = recorded.compare(execution, {})
    assert set(found) == {"(model)", "shared"}
    assert 0 < found["(model)"].error < 0.05


class Integers(nn.Module):
    def forward(self, x):
        return x.argmax(-1)


def test_a_module_without_floating_outputs_has_no_error():
    found = errors(nn.Sequential(nn.Linear(4, 4), Integers()), BF16, torch.randn(3, 4))
    assert found["1"] == LocalError(error=None, output_max=None, integer_input_max=None)


def test_a_module_that_cannot_be_called_alone_has_none():
    class Once(nn.Module):
        def forward(self, x):
            if torch.is_autocast_enabled("cpu"):
                raise RuntimeError("planted")
            return x

    model = nn.Sequential(nn.Linear(4, 4), Once())
    x = torch.randn(3, 4)
    recorded = LocalErrors.record(model, lambda: model(x), device=CPU)
    with applied(BF16, model, device=CPU) as execution:
        found = recorded.compare(execution, {})
    assert found["1"].error is None
    assert found["0"].error > 0


def test_too_much_memory_leaves_modules_out(monkeypatch):
    monkeypatch.setattr(local_errors, "MEMORY_LIMIT_BYTES", 100)
    model, x = Outer(), torch.randn(64, 6)
    recorded = LocalErrors.record(model, lambda: model(x), device=CPU)
    assert recorded.is_partial
    with applied(BF16, model, device=CPU) as execution:
        assert set(recorded.compare(execution, {})) == {"(model)"}
