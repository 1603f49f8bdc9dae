import pytest
import torch
import torch.nn.functional as F
from precision_models import BUILT_IN, CPU, batch, build, loss_fn, policy, train
from product_calls import PRODUCTS, randn, run
from torch import nn

from harness.numerics.errors import relative_error
from harness.precision import backend
from harness.precision.emulation import sixteen_bit
from harness.precision.execution import applied


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_sixteen_bit_products_round_once(name, low):
    """Oracle: the product of the rounded operands in FP32, rounded once; backward likewise."""
    call, *shapes = PRODUCTS[name]
    a, b = randn(*shapes[0]), randn(*shapes[1], seed=1)
    compute = {torch.float16: "fp16", torch.bfloat16: "bf16"}[low]
    result, gradients, grad_out = run(policy(compute), call, a, b, backend="emulated")
    rounded = [x.detach().to(low).float().requires_grad_() for x in (a, b)]
    expected = call(*rounded)
    assert result.dtype is low
    assert torch.equal(result, expected.to(low))
    wanted = torch.autograd.grad(expected, rounded, grad_out.to(low).float())
    for found, want in zip(gradients, wanted, strict=True):
        assert found.dtype is torch.float32
        assert torch.equal(found, want.to(low).float())


@pytest.mark.parametrize("causal", [False, True])
def test_sixteen_bit_attention_rounds_once(causal):
    """Oracle: FP32 attention on the rounded operands."""
    q, k, v = (randn(2, 2, 6, 8, seed=s) for s in range(3))

    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    result, gradients, grad_out = run(policy("fp16"), call, q, k, v)
    rounded = [x.detach().half().float().requires_grad_() for x in (q, k, v)]
    expected = call(*rounded)
    assert torch.equal(result, expected.half())
    wanted = torch.autograd.grad(expected, rounded, grad_out.half().float())
    # Backward starts from the rounded output: one more rounding at FP16's 2^-11 per element.
    for found, want in zip(gradients, wanted, strict=True):
        assert relative_error(found, want) < 2 * 2**-11


@pytest.mark.parametrize("name", ["bf16", "bf16_fallback", "bf16_pure"])
def test_native_and_emulated_bf16_agree_within_a_few_roundings(name):
    """Both sum in FP32 and round to BF16; they differ in the order of summation only."""
    native = train(BUILT_IN[name], steps=1, backend="native")
    emulated = train(BUILT_IN[name], steps=1, backend="emulated")
    reference = train(BUILT_IN["fp32"], steps=1)
    u = 2.0**-8
    assert abs(native[0][0] - emulated[0][0]) < u
    flat = [torch.cat([g.flatten() for g in run[1]]) for run in (native, emulated, reference)]
    # A flipped last bit in each of the ~8 layers: 8 units; against FP32 it is no larger.
    assert relative_error(flat[1], flat[0]) < 8 * u
    assert relative_error(flat[1], flat[0]) < 2 * relative_error(flat[0], flat[2])


def test_an_fp16_product_overflows_to_infinity():
    a = torch.full((1, 64), 100.0)
    with applied(policy("fp16"), nn.Linear(1, 1), device=CPU) as execution, execution.forward():
        assert torch.isinf(a @ a.t()).all()
        assert torch.isfinite(a[:, :6] @ a[:, :6].t()).all()


@pytest.mark.parametrize("name", ["fp16", "bf16", "tf32", "bf16_pure"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_train(kind, name):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = kind(6, 5, batch_first=True, bidirectional=True)

        def forward(self, x):
            return self.layer(x)[0]

    def gradient(policy):
        model = Recurrent()
        with applied(policy, model, device=CPU) as execution:
            with execution.forward():
                loss = model(randn(2, 7, 6)).float().square().mean()
            loss.backward()
            return torch.cat([p.grad.float().flatten() for p in model.parameters()])

    # 7 time steps of at most two BF16 roundings each
    assert relative_error(gradient(BUILT_IN[name]), gradient(BUILT_IN["fp32"])) < 14 * 2**-8


def test_kind_and_detail_say_what_was_emulated():
    execution = train(BUILT_IN["fp16"], steps=1)[3]
    assert execution.kind == "emulated"
    assert "matmul, convolution and attention computed in FP32" in execution.detail
    with applied(BUILT_IN["fp16"], build(), device=CPU) as execution:
        assert execution.kind == "emulated"  # before anything ran: what the plan allows for
    with applied(BUILT_IN["fp16"], build(), device=CPU, backend="native") as execution:
        assert execution.kind == "native"
    assert train(BUILT_IN["fp32"], steps=1)[3].kind == "native"
    assert train(BUILT_IN["tf32"], steps=1)[3].detail.startswith("TF32 emulated")


@pytest.mark.parametrize("has_bf16", [False, True])
def test_the_backend_follows_the_instruction_set(monkeypatch, has_bf16):
    monkeypatch.setattr(backend, "native_bf16_matmul", lambda: has_bf16)
    plan = backend.choose(policy("bf16"), CPU, "auto")
    assert ("mm" in plan.emulated_ops) is not has_bf16
    assert set(sixteen_bit.ATTENTION) <= set(plan.emulated_ops)


def test_fp16_training_is_not_slowed_by_native_kernels():
    """Nothing of a step may reach the CPU's own FP16 products: they are 10 to 60 times slower."""
    reached = []
    lib = torch.library.Library("aten", "IMPL")  # the kernels below ours see what passes through
    original = torch.library.get_kernel("aten::mm", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def mm(a, b):
        reached.append(a.dtype)
        return original.call_boxed(keys, a, b)

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lib.impl("mm", mm, "CPU", allow_override=True)
    try:
        model = build()
        with applied(policy("fp16"), model, device=CPU) as execution:
            with execution.forward():
                loss = loss_fn(model, batch())
            loss.backward()
    finally:
        lib._destroy()
    assert reached
    assert set(reached) == {torch.float32}


def second_derivative(compute, a, b):
    with applied(policy(compute), nn.Linear(1, 1), device=CPU) as execution:
        with execution.forward():
            (inner,) = torch.autograd.grad(torch.tanh(a @ b).sum(), a, create_graph=True)
        return torch.autograd.grad(inner.square().sum(), (a, b))


@pytest.mark.parametrize("name", ["tf32", "bf16", "fp16"])
def test_gradients_of_gradients_are_those_of_fp32_but_for_rounding(name):
    """A gradient penalty goes through the backward products: their rounding must not cut it off."""
    a, b = randn(8, 16), randn(16, 4, seed=1)
    for low, wide in zip(
        second_derivative(name, a, b), second_derivative("fp32", a, b), strict=True
    ):
        # a few roundings of 2^-11 (TF32, FP16) or 2^-8 (BF16) in sums of some ten terms
        assert relative_error(low, wide) < (0.05 if name == "bf16" else 0.01)
