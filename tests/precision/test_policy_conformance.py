import os
import random
import sys

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers load it: before the first snapshot, then
from precision_models import BUILT_IN, CPU, batch, build, loss_fn, policy, train
from torch import nn

from harness.precision.execution import SWITCHES, applied

OPS = (
    "exp",
    "softmax.int",
    "matmul",
    "linear",
    "avg_pool3d",
    "embedding",
    "lstm.input",
    "scaled_dot_product_attention",
    "batch_norm",
    "mm",
    "convolution",
)
KEYS = ("CPU", "AutogradCPU", "AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1")
# What no built-in policy does.
DIRECTED = policy(
    "bf16",
    fp32_modules=["forward:norm", "backward:attn.out"],
    fp32_ops=["forward:matmul", "backward:gelu"],
    low_precision_ops=["backward:softmax"],
)
CHOSEN = {
    **BUILT_IN,
    "directed": DIRECTED,
    "directed tf32": policy(
        "tf32", fp32_modules=["forward:attn"], fp32_ops=["backward:convolution"]
    ),
}
PRODUCTS = ("mm", "convolution", "_scaled_dot_product_flash_attention_for_cpu")


def global_state():
    """Everything process-wide that a policy may touch."""
    included = torch._C._dispatch_tls_is_dispatch_key_included
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return {
        "switches": {name: switch.fp32_precision for name, switch in SWITCHES.items()},
        "registered": {
            key: torch._C._dispatch_get_registrations_for_dispatch_key(key) for key in KEYS
        },
        # Every kernel of an op, with the place that registered it.
        "kernels": {op: torch._C._dispatch_dump(f"aten::{op}") for op in OPS},
        "cpu kernels": {
            op: repr(torch.library.get_kernel(f"aten::{op}", "CPU")) for op in PRODUCTS
        },
        "keys of the thread": {
            key: (
                included(torch._C.DispatchKey.__members__[key]),
                excluded(torch._C.DispatchKey.__members__[key]),
            )
            for key in KEYS
        },
        "autocast": {
            device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        },
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "random state": torch.get_rng_state().tolist(),
        "python random state": random.getstate(),
        "numpy random state": str(np.random.get_state()),  # noqa: NPY002 - the global one
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "libraries": (torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled()),
        "threads": torch.get_num_threads(),
        "compiler": compiler and compiler._stance,
        "environment": dict(os.environ),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
    }


def model_state(model):
    return {
        name: (id(tensor), tensor.dtype)
        for name, tensor in model.state_dict(keep_vars=True).items()
    } | {name: "forward" in module.__dict__ for name, module in model.named_modules()}


@pytest.mark.parametrize("name", CHOSEN)
def test_everything_is_restored_also_after_an_exception(name):
    """Conformance: every built-in policy, and ones that run parts of the model twice."""
    model, data = build(), batch()
    before, before_model = global_state(), model_state(model)

    def interrupted_step():
        with applied(
            CHOSEN[name], model, device=CPU, trace_forward=lambda: loss_fn(model, data)
        ) as execution:
            with execution.forward():
                loss_fn(model, data).backward()
            raise KeyError

    with pytest.raises(KeyError):
        interrupted_step()
    assert global_state() == before
    assert model_state(model) == before_model


@pytest.mark.parametrize("outer", ["fp32", "fp16", "tf32", "directed"])
@pytest.mark.parametrize("inner", ["fp32", "bf16_pure", "tf32", "directed"])
def test_a_policy_inside_another_leaves_the_outer_one_as_it_was(outer, inner):
    """Also when the inner step ends in the middle of a forward pass, twice over."""

    class Interrupted(nn.Module):
        def forward(self, x):
            raise KeyError

    model, data = build(), batch()
    outside = global_state()
    with applied(CHOSEN[outer], model, device=CPU) as execution, execution.forward():
        before = global_state()
        for _ in range(2):
            broken = build()
            broken.head = Interrupted()
            with pytest.raises(KeyError):
                train(CHOSEN[inner], steps=1, model=broken, data=data)
            assert global_state() == before
        loss_fn(model, data).backward()
    assert global_state() == outside


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_policy_twice_is_bitwise_the_same(name):
    """A/A: every built-in policy."""
    first, second = train(BUILT_IN[name]), train(BUILT_IN[name])
    assert first[0] == second[0]
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert first[2] == second[2]


@pytest.mark.parametrize("name", BUILT_IN)
def test_losses_and_gradients_stay_near_fp32(name):
    losses, gradients, _, _ = train(BUILT_IN[name], steps=1)
    reference, reference_gradients, _, _ = train(BUILT_IN["fp32"], steps=1)
    # 8 roundings at BF16's 2^-8 add up to about 2^-5 of the loss; other formats are finer.
    assert abs(losses[0] - reference[0]) < 2**-5
    norm = torch.stack([g.norm() for g in reference_gradients]).norm()
    error = torch.stack(
        [(a - b).norm() for a, b in zip(gradients, reference_gradients, strict=True)]
    ).norm()
    assert error < 0.1 * norm


def test_every_policy_differs_from_every_other_and_says_what_it_is():
    hashes = {name: policy.content_hash() for name, policy in BUILT_IN.items()}
    assert len(set(hashes.values())) == len(hashes)
    for name, chosen in BUILT_IN.items():
        assert chosen.name == name
        assert chosen.description.endswith(".")


def test_the_moved_fp32_runs_are_controls_and_fp32_the_reference():
    assert BUILT_IN["fp32_twin"].perturbation == 2**-8
    assert BUILT_IN["fp32_ulp"].perturbation == 2**-23
    assert sorted(n for n, p in BUILT_IN.items() if p.is_control) == ["fp32_twin", "fp32_ulp"]
    assert [n for n, p in BUILT_IN.items() if p.is_reference] == ["fp32"]


def test_every_switch_reads_back_as_ieee():
    for name, chosen in BUILT_IN.items():
        execution = train(chosen, steps=1)[3]
        assert set(execution.switches.values()) == {"ieee"}, name
        assert set(execution.switches) == set(SWITCHES)
