"""Which module an op belongs to, forward and backward, in checkpoints and derivatives."""

import pytest
import torch
from precision_models import CPU, policy
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness.precision.execution import applied
from harness.precision.module_calls import ModuleCalls


class Noting(TorchDispatchMode):
    """Notes (module, direction) of every matrix product."""

    def __init__(self, calls):
        super().__init__()
        self.calls, self.seen = calls, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::addmm"):
            self.seen.append(self.calls.current())
        return func(*args, **(kwargs or {}))


def products(model, step):
    calls = ModuleCalls()
    with calls.watching(model), Noting(calls) as noting:
        step()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return noting.seen


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.own = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.inner(x) @ self.own


def test_forward_and_backward_of_nested_modules():
    model, x = nn.Sequential(Block(), nn.Linear(4, 2)), torch.randn(3, 4)
    seen = products(model, lambda: model(x).sum().backward())
    assert seen == [
        ("0.inner", "forward"),
        ("0", "forward"),
        ("1", "forward"),
        ("1", "backward"),
        ("1", "backward"),
        ("0", "backward"),
        ("0", "backward"),
        ("0.inner", "backward"),
    ]


def test_what_runs_outside_of_module_calls_has_no_module():
    model, x = Block(), torch.randn(3, 4)
    seen = products(model, lambda: (model(x) @ model.own).sum().backward())
    assert seen[:3] == [("inner", "forward"), ("(model)", "forward"), (None, "forward")]
    assert seen[3:5] == [(None, "backward")] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_forward_pass(reentrant):
    model, x = nn.Sequential(Block(), nn.Linear(4, 2)), torch.randn(3, 4, requires_grad=True)
    seen = products(
        model, lambda: model[1](checkpoint(model[0], x, use_reentrant=reentrant)).sum().backward()
    )
    assert seen.count(("0.inner", "forward")) == 2
    assert seen.count(("0.inner", "backward")) == 2
    # The other kind stops as soon as it has what backward needs: not the last product's result.
    assert seen.count(("0", "forward")) == (2 if reentrant else 1)
    assert seen.count(("0", "backward")) == 2


def test_a_derivative_in_the_loss_is_backward_and_then_backward_again():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(3, 4)

    def step():
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
        slope.square().sum().backward()

    seen = products(model, step)
    assert seen[:2] == [("0", "forward"), ("2", "forward")]
    assert {direction for _, direction in seen[2:]} == {"backward"}
    assert ("0", "backward") in seen[2:4]


def test_an_exception_leaves_no_hook_and_no_open_call():
    class Raising(nn.Module):
        def forward(self, x):
            raise RuntimeError("on purpose")

    model, calls = nn.Sequential(nn.Linear(4, 4), Raising()), ModuleCalls()
    with calls.watching(model):
        with pytest.raises(RuntimeError, match="on purpose"):
            model(torch.randn(2, 4))
        assert calls.current() == (None, "forward")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_it_works_under_policies():
    for compute in ("bf16", "fp16", "tf32"):
        model, x = nn.Sequential(Block(), nn.Linear(4, 2)), torch.randn(3, 4)
        with applied(policy(compute), model, device=CPU) as execution:

            def step(e=execution, m=model, x=x):
                with e.forward():
                    loss = m(x).sum()
                loss.backward()

            seen = products(model, step)
        assert seen[:3] == [("0.inner", "forward"), ("0", "forward"), ("1", "forward")], compute
        assert {m for m, d in seen if d == "backward"} == {"0.inner", "0", "1"}, compute
