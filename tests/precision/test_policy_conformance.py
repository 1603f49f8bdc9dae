import pytest
import torch
from precision_models import BUILT_IN, CPU, batch, build, loss_fn, train

from harness.precision.execution import SWITCHES, applied

OPS = ("exp", "softmax.int", "matmul", "avg_pool3d", "embedding")
PRODUCTS = ("mm", "convolution", "_scaled_dot_product_flash_attention_for_cpu")


def global_state():
    """Everything process-wide that a policy may touch."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    key = torch._C.DispatchKey.AutocastPrivateUse1
    return {
        "switches": {name: switch.fp32_precision for name, switch in SWITCHES.items()},
        "autocast kernels": {op: has_kernel(f"aten::{op}", "AutocastCPU") for op in OPS},
        "cpu kernels": {
            op: repr(torch.library.get_kernel(f"aten::{op}", "CPU")) for op in PRODUCTS
        },
        "tf32 key": (
            torch._C._dispatch_tls_is_dispatch_key_included(key),
            torch._C._dispatch_tls_is_dispatch_key_excluded(key),
        ),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "default dtype": torch.get_default_dtype(),
        "random state": torch.get_rng_state().tolist(),
    }


def model_state(model):
    return {
        name: (id(tensor), tensor.dtype)
        for name, tensor in model.state_dict(keep_vars=True).items()
    } | {name: "forward" in module.__dict__ for name, module in model.named_modules()}


@pytest.mark.parametrize("name", BUILT_IN)
def test_everything_is_restored_also_after_an_exception(name):
    """Conformance: every built-in policy."""
    model, data = build(), batch()
    before, before_model = global_state(), model_state(model)

    def interrupted_step():
        with applied(
            BUILT_IN[name], model, device=CPU, trace_forward=lambda: loss_fn(model, data)
        ) as execution:
            with execution.forward():
                loss_fn(model, data).backward()
            raise KeyError

    with pytest.raises(KeyError):
        interrupted_step()
    assert global_state() == before
    assert model_state(model) == before_model


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
    for name, policy in BUILT_IN.items():
        assert policy.name == name
        assert policy.description.endswith(".")


def test_the_twin_is_the_control_and_fp32_the_reference():
    assert BUILT_IN["fp32_twin"].perturbation == 2**-8
    assert [n for n, p in BUILT_IN.items() if p.is_control] == ["fp32_twin"]
    assert [n for n, p in BUILT_IN.items() if p.is_reference] == ["fp32"]


def test_every_switch_reads_back_as_ieee():
    for name, policy in BUILT_IN.items():
        execution = train(policy, steps=1)[3]
        assert set(execution.switches.values()) == {"ieee"}, name
        assert set(execution.switches) == set(SWITCHES)
