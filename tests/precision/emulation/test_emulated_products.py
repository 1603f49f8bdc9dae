"""Products in formats that no tensor has: TF32, FP8 and any other given by its bits."""

import pytest
import torch
import torch.nn.functional as F
from precision_models import BUILT_IN, CPU, batch, build, loss_fn, policy, train
from product_calls import PRODUCTS, randn, run
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness.numerics.errors import relative_error
from harness.numerics.formats import FP8_E4M3, FP8_E5M2, TF32, get_format
from harness.numerics.rounding import round_to_format
from harness.precision.emulation.product_rounding import ProductRounding
from harness.precision.execution import applied
from harness.precision.rounding_noise import RoundingNoise


def tf32(x):
    return round_to_format(x, TF32)


@pytest.mark.parametrize("name", PRODUCTS)
def test_tf32_rounds_every_operand_forward_and_backward(name):
    """Oracle: FP32 autograd on rounded operands with a rounded incoming gradient, to the bit."""
    call, *shapes = PRODUCTS[name]
    a, b = randn(*shapes[0]), randn(*shapes[1], seed=1)
    result, gradients, grad_out = run(policy("tf32"), call, a, b)
    rounded = [tf32(x.detach()).requires_grad_() for x in (a, b)]
    expected = call(*rounded)
    assert torch.equal(result, expected)
    for found, wanted in zip(
        gradients, torch.autograd.grad(expected, rounded, tf32(grad_out)), strict=True
    ):
        assert torch.equal(found, wanted)
    assert not torch.equal(result, call(a, b))


def test_tf32_keeps_the_bias_and_everything_else_in_fp32():
    x, w, bias = randn(4, 5), randn(3, 5, seed=1), randn(3, seed=2)
    result, _, _ = run(policy("tf32"), F.linear, x, w, bias)
    assert torch.equal(result, F.linear(tf32(x), tf32(w), bias))


def test_tf32_attention_rounds_the_operands_of_both_products():
    q, k, v = (randn(2, 2, 4, 8, seed=s) for s in range(3))
    result, _, _ = run(policy("tf32"), F.scaled_dot_product_attention, q, k, v)
    # The unfused form scales q and k by the square root of the scale each before their product.
    root = 8**-0.25
    scores = tf32(q * root) @ tf32(k * root).transpose(-1, -2)
    expected = tf32(scores.softmax(-1)) @ tf32(v)
    # 4 FP32 roundings of values near 1: the softmax may sum in another order.
    assert torch.allclose(result, expected, rtol=0, atol=4 * 2**-11)
    assert relative_error(result, expected) < relative_error(
        F.scaled_dot_product_attention(q, k, v), expected
    )


def test_tf32_is_off_outside_the_training_step_and_in_fp32_modules():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    x, plain = randn(3, 5), model(randn(3, 5))
    plain_gradients = torch.autograd.grad(plain.sum(), list(model.parameters()))
    with applied(policy("tf32", fp32_modules=["0", "1"]), model, device=CPU) as execution:
        with execution.forward():
            kept = model(x)
        gradients = torch.autograd.grad(kept.sum(), list(model.parameters()))
    assert torch.equal(kept, plain)
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain_gradients, strict=True))
    with applied(policy("tf32"), model, device=CPU) as execution:
        assert torch.equal(model(x), plain)
        with execution.forward():
            assert not torch.equal(model(x), plain)


def test_tf32_keeps_named_ops_in_fp32():
    a, b = randn(2, 4, 5), randn(2, 5, 3, seed=1)
    for fields, exact in [({"fp32_ops": ["matmul"]}, True), ({"fp32_ops": ["convolution"]}, False)]:
        result, _, _ = run(policy("tf32", **fields), torch.matmul, a, b)
        assert torch.equal(result, a @ b) == exact
    scores, _, _ = run(policy("tf32", fp32_selectors=["attention_scores"]), torch.matmul, a, b)
    assert torch.equal(scores, a @ b)


TRANSFORMS = {
    "grad": lambda a, b: torch.func.grad(lambda w: torch.tanh(a @ w).sum())(b),
    "per_sample": lambda a, b: torch.func.vmap(
        torch.func.grad(lambda w, row: torch.tanh(row @ w).sum()), (None, 0)
    )(b, a),
    "jacfwd": lambda a, b: torch.func.jacfwd(lambda x: torch.tanh(x @ b))(a[:1]),
    "hessian": lambda a, b: torch.func.hessian(lambda x: torch.tanh(x @ b).sum())(a[:1]),
    "vmap": lambda a, b: torch.func.vmap(lambda row: F.linear(row, b.t()))(a),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize("name", TRANSFORMS)
def test_tf32_goes_through_function_transforms(name):
    a, b = randn(6, 16), randn(16, 4, seed=1)
    result, gradients, _ = run(policy("tf32"), TRANSFORMS[name], a, b)
    exact, exact_gradients, _ = run(policy("fp32"), TRANSFORMS[name], a, b)
    for low, wide in zip((result, *gradients), (exact, *exact_gradients), strict=True):
        # between one rounding (2^-11 = 5e-4, less in a mean) and some ten of them
        assert 1e-5 < relative_error(low, wide) < 0.01


def scaled(x, fmt, rounding="nearest"):
    """Round as one tensor that is scaled to the format's largest value; the textbook formula."""
    scale = torch.tensor(fmt.max_finite) / x.abs().max()
    return round_to_format(x * scale, fmt, rounding=rounding) / scale


def fp8(**fields):
    return policy("fp8_e4m3", gradient_format="fp8_e5m2", operand_scaling="per_tensor", **fields)


# A policy, and how it rounds an operand, a gradient and a result.
SCHEMES = {
    "fp8": (fp8(), lambda x: scaled(x, FP8_E4M3), lambda g: scaled(g, FP8_E5M2), None),
    "e5m3": (policy("e5m3"), *2 * (lambda x: round_to_format(x, get_format("e5m3")),), None),
    "truncating": (
        policy("e8m10", rounding="toward_zero"),
        *2 * (lambda x: round_to_format(x, TF32, rounding="toward_zero"),),
        None,
    ),
    "results": (
        policy("e6m9", gradient_format="e5m10", round_results=True),
        lambda x: round_to_format(x, get_format("e6m9")),
        lambda g: g.half().float(),
        True,
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_rounds_operands_forward_and_gradients_backward(name, scheme):
    """Oracle: FP32 autograd on rounded operands with a rounded incoming gradient, to the bit."""
    rule, operand, gradient, rounds_results = SCHEMES[scheme]
    call, *shapes = PRODUCTS[name]
    a, b = randn(*shapes[0]), randn(*shapes[1], seed=1)
    result, gradients, grad_out = run(rule, call, a, b)
    rounded = [operand(x.detach()).requires_grad_() for x in (a, b)]
    expected = call(*rounded)
    wanted = torch.autograd.grad(expected, rounded, gradient(grad_out))
    if rounds_results:
        expected, wanted = operand(expected.detach()), [gradient(g) for g in wanted]
    assert torch.equal(result, expected)
    for found, want in zip(gradients, wanted, strict=True):
        assert torch.equal(found, want)
    assert not torch.equal(result, call(a, b))


@pytest.mark.parametrize(
    ("call", "beta", "dims"),
    [
        (lambda x, w, b: F.linear(x[0], w[..., 0], b), 1, (0,)),
        (lambda x, w, b: torch.addmm(b, x[0], w[..., 0].t(), beta=3), 3, (0,)),
        (F.conv1d, 1, (0, 2)),
    ],
)
def test_a_bias_and_its_gradient_are_not_rounded(call, beta, dims):
    x, w, b = randn(2, 3, 3), randn(4, 3, 1, seed=1), randn(4, seed=2)
    rule, operand, _, _ = SCHEMES["e5m3"]
    result, gradients, grad_out = run(rule, call, x, w, b)
    expected = call(operand(x.detach()), operand(w.detach()), b)
    assert torch.equal(result, expected)
    # the sum of six FP32 values, in whatever order
    assert torch.allclose(gradients[2], beta * grad_out.sum(dims), rtol=6 * 2**-24, atol=2**-22)


def test_attention_is_scaled_per_tensor_in_both_products():
    q, k, v = (randn(2, 2, 4, 8, seed=s) for s in range(3))
    result, _, _ = run(fp8(), F.scaled_dot_product_attention, q, k, v)
    root = 8**-0.25  # the unfused form scales q and k each
    scores = scaled(q * root, FP8_E4M3) @ scaled(k * root, FP8_E4M3).transpose(-1, -2)
    expected = scaled(scores.softmax(-1), FP8_E4M3) @ scaled(v, FP8_E4M3)
    # The softmax may sum in another order, which turns a tie into the other neighbour now and then.
    assert relative_error(result, expected) < 2.0**-6
    plain = F.scaled_dot_product_attention(q, k, v)
    assert relative_error(result, expected) < relative_error(plain, expected) / 2


@pytest.mark.parametrize("rule", [policy("tf32"), policy("e5m3")], ids=["tf32", "e5m3"])
def test_recurrent_layers_round_the_products_of_every_time_step(rule):
    """Oracle: a loop over the cell's formula with rounded operands."""
    torch.manual_seed(0)
    layer = nn.LSTM(6, 5, batch_first=True)
    x = randn(2, 4, 6, requires_grad=False)
    with applied(rule, layer, device=CPU) as execution, execution.forward():
        result = layer(x)[0]
    fmt = get_format(rule.compute_format)

    def product(a, w, b):
        return F.linear(round_to_format(a, fmt), round_to_format(w, fmt), b)

    h = c = torch.zeros(2, 5)
    for t in range(4):
        gates = product(x[:, t], layer.weight_ih_l0, layer.bias_ih_l0)
        gates = gates + product(h, layer.weight_hh_l0, layer.bias_hh_l0)
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        # A few FP32 roundings of values below 1; a product that was not rounded is off by 2^-11.
        assert torch.allclose(result[:, t], h, rtol=0, atol=2**-19)
    assert not torch.allclose(result, layer(x)[0], rtol=0, atol=2**-19)


def test_per_tensor_scaling_of_awkward_tensors():
    rounding = ProductRounding(forward=FP8_E4M3, backward=FP8_E5M2, per_tensor=True)

    def rounded(values, fmt=FP8_E4M3):
        return rounding(torch.tensor(values), fmt, RoundingNoise())

    assert rounded([0.0, -0.0]).tolist() == [0.0, 0.0]
    assert rounded([]).shape == (0,)
    # The largest magnitude becomes the format's largest value, and comes back.
    assert rounded([3.0, -1.5]).tolist() == pytest.approx([3.0, -1.5], rel=2**-22)
    assert rounded([1e-30, 2e-30])[1].item() == pytest.approx(2e-30, rel=2**-22)
    assert rounded([3.3e38, 1.0]).isfinite().all()
    assert rounded([1e-45, 0.0]).isfinite().all()
    # One infinity must not turn the rest into zeros or NaN; E4M3 has no infinity itself.
    assert rounded([torch.inf, 2.0], FP8_E5M2).tolist() == [torch.inf, 2.0]
    assert rounded([torch.inf, 2.0])[1].item() == 2.0
    assert rounded([torch.inf, 2.0])[0].isnan()
    assert rounded([torch.nan, 2.0])[1].item() == 2.0


def test_truncation_never_shrinks_the_largest_value_of_a_scaled_tensor():
    """max_finite / amax is rounded: truncating what it gives could lose a spacing, a fifteenth."""
    rounding = ProductRounding(
        forward=FP8_E4M3, backward=FP8_E4M3, per_tensor=True, rounding="toward_zero"
    )
    for value in torch.linspace(0.1, 7.0, 500):
        found = rounding(value.reshape(1), FP8_E4M3, RoundingNoise())
        assert found.item() == pytest.approx(value.item(), rel=2**-22)


def test_gradients_of_a_wide_format_are_not_rounded():
    a, b = randn(4, 5), randn(5, 3, seed=1)
    _, gradients, grad_out = run(policy("e5m3", gradient_format="fp32"), torch.matmul, a, b)
    rounded = round_to_format(b.detach(), get_format("e5m3"))
    assert torch.equal(gradients[0], grad_out @ rounded.t())


class Formats(TorchDispatchMode):
    """Notes under which format each matrix product runs, in order."""

    def __init__(self, execution):
        super().__init__()
        self.execution, self.seen = execution, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::addmm"):
            self.seen.append(self.execution.rounded_format("mm"))
        return func(*args, **(kwargs or {}))


def test_the_running_format_is_the_gradients_in_backward_products():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with applied(fp8(fp32_modules=["1"]), model, device=CPU) as execution:
        with Formats(execution) as formats:
            with execution.forward():
                loss = model(randn(3, 4)).sum()
            loss.backward()
    forward, backward = formats.seen[:2], formats.seen[2:]
    assert forward == ["fp8_e4m3", None]
    assert backward == [None, None, "fp8_e5m2", "fp8_e5m2"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("entry", ["matmul", "mm"])
def test_an_op_is_kept_in_fp32_in_one_direction(entry, direction):
    """Oracle: the values of one computation and the gradients of another, to the bit."""
    a, b = randn(4, 5), randn(5, 3, seed=1)
    rule = policy("e5m3", fp32_ops=[f"{direction}:{entry}"])
    result, gradients, _ = run(rule, torch.mm, a, b)
    low, low_gradients, _ = run(policy("e5m3"), torch.mm, a, b)
    exact, exact_gradients, _ = run(policy("fp32"), torch.mm, a, b)
    values, wanted = (exact, low_gradients) if direction == "forward" else (low, exact_gradients)
    assert torch.equal(result, values)
    assert all(torch.equal(x, y) for x, y in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_is_kept_in_fp32_in_one_direction(direction):
    q, k, v = (randn(2, 2, 4, 8, seed=s) for s in range(3))
    call = F.scaled_dot_product_attention
    rule = policy("e5m3", fp32_ops=[f"{direction}:scaled_dot_product_attention"])
    result, gradients, _ = run(rule, call, q, k, v)
    low, low_gradients, _ = run(policy("e5m3"), call, q, k, v)
    exact, exact_gradients, _ = run(policy("fp32"), call, q, k, v)
    values = exact if direction == "forward" else low
    # Another order of summation in the fused kernel; rounding to 3 bits moves the values by 1e-2.
    assert relative_error(result, values) < 1e-6
    if direction == "forward":
        assert relative_error(gradients[2], exact_gradients[2]) > 1e-2
    else:
        assert relative_error(gradients[2], low_gradients[2]) > 1e-2
        assert relative_error(gradients[2], exact_gradients[2]) < 0.1


@pytest.mark.parametrize("name", ["fp8", "e5m3"])
def test_kept_modules_ops_and_selectors_are_exact(name):
    compute = SCHEMES[name][0].content()
    x = batch()
    exact, exact_gradients, _, _ = train(policy("fp32"), steps=1)
    for fields in (
        {"fp32_modules": ["conv", "attn", "head"]},
        {"fp32_ops": ["matmul", "convolution", "scaled_dot_product_attention"]},
    ):
        rule = policy(**{**compute, "compute": compute["compute_format"], **fields})
        losses, gradients, audit, execution = train(rule, steps=1, data=x)
        assert losses == exact
        assert all(torch.equal(a, b) for a, b in zip(gradients, exact_gradients, strict=True))
        assert not any("e4m3" in f or "e5m3" in f for formats in audit.values() for f in formats)
        assert execution.kind == "native"  # nothing was rounded
    rule = policy(
        **{
            **compute,
            "compute": compute["compute_format"],
            "fp32_selectors": ["attention_scores", "output_head"],
        }
    )
    _, _, audit, _ = train(rule, steps=1)
    assert "fp32" in audit["bmm"]
    assert audit["addmm"].keys() == {"fp32", rule.compute_format}


def test_rounding_off_outside_the_step_and_after_the_context():
    model, data = build(), batch()
    plain = loss_fn(model, data)
    with applied(fp8(), model, device=CPU) as execution:
        assert torch.equal(loss_fn(model, data), plain)
        with execution.forward():
            assert not torch.equal(loss_fn(model, data), plain)
            with applied(policy("fp32"), model, device=CPU) as inner, inner.forward():
                assert torch.equal(loss_fn(model, data), plain)
            assert not torch.equal(loss_fn(model, data), plain)
    assert torch.equal(loss_fn(model, data), plain)


def test_a_repeated_forward_pass_of_checkpointing_rounds_too():
    model, data = build(), batch()[0]

    def gradient(use_checkpoint):
        model.zero_grad()
        with applied(fp8(), model, device=CPU) as execution:
            with execution.forward():
                h = F.gelu(model.conv(data)).transpose(1, 2)
                out = (
                    checkpoint(model.attn, h, use_reentrant=False)
                    if use_checkpoint
                    else model.attn(h)
                )
                loss = model.head(out).square().mean()
            loss.backward()
        return [p.grad.clone() for p in model.attn.parameters()]

    for found, wanted in zip(gradient(True), gradient(False), strict=True):
        assert torch.equal(found, wanted)


def test_sparse_operands_stay_in_fp32():
    dense = randn(4, 5, requires_grad=False)
    sparse, b = dense.relu().to_sparse(), randn(5, 3, seed=1, requires_grad=False)
    rule = policy("e5m3")
    with applied(rule, nn.Linear(1, 1), device=CPU) as execution, execution.forward():
        result = torch.sparse.mm(sparse, b)
    assert torch.allclose(result, dense.relu() @ b, rtol=0, atol=1e-6)


def stochastic_step(seed, *, name="e4m3"):
    model, data = build(), batch()
    with applied(policy(name, rounding="stochastic"), model, device=CPU) as execution:
        torch.manual_seed(5)
        execution.noise.start(seed)
        with execution.forward():
            loss = loss_fn(model, data)
        loss.backward()
        drawn = torch.rand(3)
        return [loss.detach(), *(p.grad for p in model.parameters())], drawn


def test_stochastic_rounding_has_a_generator_of_its_own():
    first, draws = stochastic_step(1)
    again, _ = stochastic_step(1)
    other, other_draws = stochastic_step(2)
    torch.manual_seed(5)
    assert torch.equal(draws, torch.rand(3))  # what a model draws is not disturbed
    assert torch.equal(draws, other_draws)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_products_rounded_at_random_are_right_on_average():
    """Both operands are drawn independently, so the expected product is the product itself."""
    a, b = randn(8, 16, requires_grad=False), randn(16, 4, seed=1, requires_grad=False)
    rule, n = policy("e4m3", rounding="stochastic"), 2000
    with applied(rule, nn.Linear(1, 1), device=CPU) as execution, execution.forward():
        products = torch.stack([torch.mm(a, b) for _ in range(n)]).double()
    error = products.mean(0) - a.double() @ b.double()
    # 32 means at a fixed seed, each within 5 of its standard errors
    assert (error.abs() < 5 * products.std(0) / n**0.5).all()
    assert (products.std(0) > 0).all()


@pytest.mark.parametrize("rule", [fp8(), policy("e5m3")], ids=["fp8", "e5m3"])
def test_gradient_penalties_pass_through_emulated_products(rule):
    a, b = randn(8, 16), randn(16, 4, seed=1)

    def second(rule):
        with applied(rule, nn.Linear(1, 1), device=CPU) as execution:
            with execution.forward():
                (inner,) = torch.autograd.grad(torch.tanh(a @ b).sum(), a, create_graph=True)
            return torch.autograd.grad(inner.square().sum(), (a, b))

    for low, wide in zip(second(rule), second(policy("fp32")), strict=True):
        # 3 or 2 mantissa bits: each rounding is off by 2^-4 or 2^-3 at most, 2^-5 on average
        assert 1e-3 < relative_error(low, wide) < 0.3


def test_detail_says_what_is_rounded_and_what_is_not_modelled():
    detail = train(fp8(), steps=1)[3].detail
    assert "FP8 E4M3 emulated" in detail
    assert "gradients to FP8 E5M2 (5 exponent and 2 mantissa bits)" in detail
    assert "not modelled" in detail
    rule = policy("e5m3", rounding="toward_zero", round_results=True)
    detail = train(rule, steps=1)[3].detail
    assert "rounded toward zero to e5m3" in detail
    assert "results are rounded likewise" in detail


def test_a_native_backend_is_refused():
    with pytest.raises(ValueError, match="backend='native' is not allowed for fp8_e4m3"):
        train(fp8(), backend="native")


@pytest.mark.parametrize("name", ["fp8", "tf32"])
def test_training_goes_down(name):
    losses = train(BUILT_IN[name], steps=20)[0]
    assert losses[-1] < losses[0] / 2


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_emulation_on_a_gpu_rounds_as_on_a_cpu(scheme):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    rule = SCHEMES[scheme][0]
    device = torch.device("cuda")
    a, b = randn(64, 32, requires_grad=False), randn(32, 16, seed=1, requires_grad=False)
    results = []
    for where in (CPU, device):
        with applied(rule, nn.Linear(1, 1).to(where), device=where) as execution:
            with execution.forward():
                results.append(torch.mm(a.to(where), b.to(where)).cpu())
    # FP32 sums of 32 terms in another order; the operands' rounding would show as 2^-11 or more
    assert relative_error(results[1], results[0]) < (2**-9 if rule.round_results else 32 * 2**-24)
