"""Compiled models run eagerly under a policy, and compiled again afterwards."""

import os
import sys
import warnings

import pytest
import torch
from precision_models import CPU, batch, build, loss_fn, policy
from torch import nn

from harness.precision import eager
from harness.precision.execution import applied
from harness.precision.policy import PrecisionPolicy

FP32 = PrecisionPolicy(name="fp32")


class Backend:
    """A compiler that counts the graphs it gets and runs them as they are."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def step(model, chosen):
    with applied(chosen, model, device=CPU) as execution:
        with execution.audit() as audit, execution.forward():
            loss = loss_fn(model, batch())
        loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return loss.item(), gradients, audit, execution.detail


@pytest.mark.parametrize("how", ["torch.compile", "Module.compile", "function"])
@pytest.mark.parametrize("chosen", [FP32, policy("bf16"), policy("tf32")], ids=lambda p: p.name)
def test_a_compiled_model_computes_what_the_plain_one_does(how, chosen):
    backend, plain, inner = Backend(), build(), build()
    compiled = inner
    if how == "torch.compile":
        compiled = torch.compile(inner, backend=backend)
    elif how == "Module.compile":
        inner.compile(backend=backend)
    else:
        inner.attn.forward = torch.compile(inner.attn.forward, backend=backend)
    loss, gradients, audit, detail = step(compiled, chosen)
    expected = step(plain, chosen)
    assert loss == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected[1], strict=True))
    assert audit == expected[2]
    assert backend.graphs == 0
    assert ("without torch.compile" in detail) == (how != "function")
    assert "without torch.compile" not in expected[3]
    # Planted fault: without the policy the compiler is asked, so that the count above can fail.
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled(batch()[0])
    assert backend.graphs > 0


def test_modules_kept_in_fp32_are_found_inside_a_compiled_model():
    model = torch.compile(build(), backend=Backend())
    with applied(policy("bf16", fp32_modules=["head"]), model, device=CPU) as execution:
        with execution.forward():
            assert model(batch()[0]).dtype is torch.float32
    assert execution.fp32_module_names == ("_orig_mod.head",)


def test_compiled_modules_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert eager.compiled_modules(model) == ()
    model[1][0].compile(backend=Backend())
    assert eager.compiled_modules(model) == ("1.0",)
    assert eager.compiled_modules(torch.compile(model, backend=Backend())) == (
        "(model)",
        "_orig_mod.1.0",
    )


@pytest.mark.parametrize("before", [None, "0"])
def test_a_compiler_that_is_not_loaded_stays_so_and_is_off(monkeypatch, before):
    monkeypatch.setattr(eager, "sys", type("Sys", (), {"modules": {}}))
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    if before is not None:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", before)
    backend = Backend()
    with eager.eager():
        compiled = torch.compile(torch.sin, backend=backend)
        compiled(torch.ones(1))
    assert backend.graphs == 0
    assert os.environ.get("TORCHDYNAMO_DISABLE") == before
    assert "torch" in sys.modules
