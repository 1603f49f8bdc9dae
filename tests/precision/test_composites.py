"""Composite layers, transforms and custom functions: every op in the format of CUDA's lists."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from precision_models import CPU, policy
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.precision.execution import applied
from harness.precision.op_families import family_of

X = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def formats(audit, op):
    return set(audit.get(op, {}))


def run(chosen, model, call=None, grad=True):
    """Return (result, audit) of one call under a policy."""
    with applied(chosen, model, device=CPU) as execution:
        with execution.audit() as audit, execution.forward(), torch.set_grad_enabled(grad):
            result = (call or (lambda m: m(X)))(model)
        if grad and result.requires_grad:
            result.float().square().mean().backward()
    return result, audit


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("evaluating", [False, True])
def test_transformer_layer(low, evaluating):
    """In evaluation torch would take a fused path on a CPU, and does not under CUDA's autocast."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model.train(not evaluating)
    result, audit = run(policy(low), model, grad=not evaluating)
    assert formats(audit, "addmm") == {low}
    assert formats(audit, "native_layer_norm") == {"fp32"}
    assert formats(audit, "_scaled_dot_product_flash_attention_for_cpu") == {low}
    assert "_transformer_encoder_layer_fwd" not in audit
    assert result.dtype is torch.float32  # ends in a layer norm
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("compute", ["fp32", "tf32", "bf16"])
def test_evaluation_takes_the_path_of_training_in_every_policy(compute):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    trained, _ = run(policy(compute), model)
    evaluated, _ = run(policy(compute), model.eval(), grad=False)
    assert torch.equal(trained, evaluated)


@pytest.mark.parametrize("low", LOW)
def test_multi_head_attention_with_weights(low):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    result, audit = run(policy(low), model, lambda m: m(X, X, X)[0])
    assert formats(audit, "bmm") | formats(audit, "baddbmm") == {low}
    assert formats(audit, "_softmax") == {"fp32"}
    assert result.dtype is LOW[low]
    kept = run(policy(low, fp32_selectors=["attention_scores"]), model, lambda m: m(X, X, X)[0])
    assert formats(kept[1], "bmm") | formats(kept[1], "baddbmm") == {"fp32"}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_return_the_compute_format(kind, low):
    """As cuDNN's do under CUDA autocast, which casts weights, input and state."""
    torch.manual_seed(0)
    model = kind(8, 8, num_layers=2, batch_first=True)
    result, audit = run(policy(low), model, lambda m: m(X)[0])
    assert result.dtype is LOW[low]
    products = {op for op in audit if op in ("mm", "addmm", "mkldnn_rnn_layer")}
    assert products
    assert all(formats(audit, op) == {low} for op in products)
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    assert (
        run(policy(low, fp32_modules=["0"]), nn.Sequential(model), lambda m: m(X)[0])[0].dtype
        is torch.float32
    )


def test_packed_sequences_go_through_a_module_kept_in_fp32():
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 8), torch.randn(2, 8)])
    model = nn.Sequential(nn.LSTM(8, 8))
    low = packed._replace(data=packed.data.bfloat16())
    for entry in ("0", "forward:0"):
        result, _ = run(policy(fp32_modules=[entry]), model, lambda m: m(low)[0].data)
        assert result.dtype is torch.float32


@pytest.mark.parametrize("low", LOW)
def test_attention_with_masks_and_dropout(low):
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    model = nn.Linear(8, 8)

    def call(m):
        h = m(X).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(h, h, h, attn_mask=mask, dropout_p=0.1)

    result, audit = run(policy(low), model, call)
    assert result.dtype is LOW[low]
    # Unfused, torch computes 16-bit attention in FP32 and rounds the result, on CUDA too.
    assert formats(audit, "bmm") == {"fp32"}


@pytest.mark.parametrize("low", LOW)
def test_cross_entropy_variants(low):
    model = nn.Linear(8, 5)
    targets = torch.zeros(3, 4, dtype=torch.int64)
    for arguments in ({}, {"label_smoothing": 0.1}, {"weight": torch.ones(5)}):
        _, audit = run(
            policy(low),
            model,
            lambda m, a=arguments: F.cross_entropy(m(X).transpose(1, 2), targets, **a),
        )
        assert formats(audit, "nll_loss2d_forward") == {"fp32"}
        assert formats(audit, "_log_softmax") == {low}
    soft = torch.full((3, 4, 5), 0.2)
    _, audit = run(
        policy(low), model, lambda m: F.cross_entropy(m(X).flatten(0, 1), soft.flatten(0, 1))
    )
    assert formats(audit, "_log_softmax") == {low}


class Aware(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.seen = torch.is_autocast_enabled("cpu")
        return x @ w.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        assert torch.is_autocast_enabled("cpu") == ctx.seen
        return grad @ w, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class InFP32(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Plain(torch.autograd.Function):
    """Elementwise, without products: needs no knowledge of autocast."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w[0]

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        gradient = torch.zeros_like(w)
        gradient[0] = (grad * x).flatten(0, -2).sum(0)
        return grad * w[0], gradient


class Custom(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.w = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.function = function

    def forward(self, x):
        return self.function.apply(self.linear(x), self.w)


@pytest.mark.parametrize("compute", ["bf16", "fp16", "tf32", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("function", "expected"), [(Aware, "low"), (InFP32, "fp32"), (Plain, "fp32")]
)
def test_custom_functions(function, expected, compute):
    """`custom_fwd` with and without a format; FP32 weights make the plain one's product FP32."""
    torch.manual_seed(0)
    model = Custom(function)
    result, _ = run(policy(compute), model)
    low = LOW.get(compute, torch.float32)
    assert result.dtype is (low if expected == "low" else torch.float32)
    gradients = [p.grad.clone() for p in model.parameters()]
    reference = Custom(function)
    reference.load_state_dict(model.state_dict())
    run(policy("fp32"), reference)
    for a, b in zip(gradients, (p.grad for p in reference.parameters()), strict=True):
        # FP8's unit roundoff of 2^-4, three products deep; the others are finer.
        assert (a - b).norm() < 0.3 * b.norm()


@pytest.mark.parametrize("compute", ["fp32", "tf32", "bf16", "fp16", "fp8_e4m3"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"fp32_modules": ["kept"]}, {"fp32_modules": ["backward:kept"]}]
)
def test_checkpointing_changes_no_gradient(use_reentrant, compute, fields):
    """Also inside a module kept in FP32, which backward enters by its inner modules only."""

    class Inner(nn.Module):
        def __init__(self, use):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
            self.use = use

        def forward(self, x):
            if self.use:
                return checkpoint(self.body, x, use_reentrant=use_reentrant)
            return self.body(x)

    class Outer(nn.Module):
        def __init__(self, use):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.kept, self.free = nn.Linear(8, 8), Inner(use), Inner(use)

        def forward(self, x):
            return self.free(self.kept(self.first(x)))

    if compute == "fp32":
        fields = {}
    gradients = []
    for use in (False, True):
        model = Outer(use)
        run(policy(compute, **fields), model)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_checkpointing_around_modules_with_a_direction_changes_no_gradient():
    gradients = []
    for use in (False, True):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        torch.manual_seed(1)
        fields = {"fp32_modules": ["forward:0", "backward:2"], "fp32_ops": ["backward:dropout"]}
        run(
            policy("bf16", **fields),
            body,
            lambda m, use=use: checkpoint(m, X, use_reentrant=False) if use else m(X),
        )
        gradients.append([p.grad for p in body.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("low", LOW)
def test_function_transforms(low):
    """What a transform does to plain tensors is cast as everything else.

    It takes composites apart before autocast sees them, on CUDA too: a `softmax` under `vmap` is a
    `_softmax`, which is in no list.
    """
    model = nn.Linear(8, 8)
    weight = model.weight.detach()

    def one(w, row):
        return F.softmax(F.linear(row, w), -1)

    rows = X[0]
    for transformed, expected in [
        (lambda: torch.func.vmap(F.linear, (0, None))(rows, weight), LOW[low]),
        (lambda: torch.func.vmap(one, (None, 0))(weight, rows), LOW[low]),
        (lambda: torch.func.vmap(lambda row: F.linear(row, weight).exp())(rows), torch.float32),
    ]:
        assert (
            run(policy(low), model, lambda m, t=transformed: t(), grad=False)[0].dtype is expected
        )
    per_sample = torch.func.vmap(
        torch.func.grad(lambda w, row: one(w, row).float().square().sum()), (None, 0)
    )
    got = run(policy(low), model, lambda m: per_sample(weight, rows), grad=False)[0]
    want = per_sample(weight, rows)
    assert got.dtype is torch.float32
    # A few roundings of 2^-8 each.
    assert (got - want).norm() < 2**-5 * want.norm()


def by_family(audit):
    counted = Counter()
    for op, counts in audit.items():
        for fmt, count in counts.items():
            counted[family_of(op), fmt] += count
    return counted


class FrozenTeacher(nn.Module):
    """A part that runs in inference mode, as teachers and target networks do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x, context):
        with context():
            return self.attention(self.layers(x)).softmax(-1).cumsum(-1)


@pytest.mark.parametrize(
    "chosen",
    [
        policy("bf16"),
        policy("fp16"),
        policy("bf16", fp32_ops=["linear", "gelu"]),
        policy("bf16", low_precision_ops=["softmax", "layer_norm"]),
        policy("bf16", fp32_ops=["forward:gelu"], fp32_modules=["layers.0"]),
        policy("tf32"),
        policy("e4m3"),
    ],
    ids=lambda chosen: "-".join([chosen.compute_format, *chosen.fp32_ops]),
)
def test_inference_mode_changes_no_format(chosen):
    """Values are those without gradients, and the audit tells as much of them."""
    model = FrozenTeacher()
    results, audits = zip(
        *(
            run(chosen, model, lambda m, c=c: m(X, c), grad=False)
            for c in (torch.no_grad, torch.inference_mode)
        ),
        strict=True,
    )
    assert results[0].dtype is results[1].dtype
    # Two orders of summation in FP32; a format that is not kept is 2^-11 away and more.
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)
    # By family: torch multiplies three dimensions as `mm` in one mode and as `bmm` in the other.
    assert by_family(audits[0]) == by_family(audits[1])
