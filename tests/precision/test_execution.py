import pytest
import torch
import torch.nn.functional as F
from precision_models import BUILT_IN, CPU, batch, build, loss_fn, policy, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.precision.execution import applied


def formats(audit, op):
    return set(audit.get(op, {}))


def audit_of(policy, model, call, backend="auto"):
    with applied(policy, model, device=CPU, backend=backend) as execution:
        with execution.audit() as audit, execution.forward():
            result = call(model)
    return audit, result


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_ops_run_in_the_formats_of_cudas_lists(low):
    """Composite ops (cross_entropy, softmax, LayerNorm) are resolved below Python."""
    audit = train(policy(low), steps=1)[2]
    for op in ("addmm", "bmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu"):
        assert formats(audit, op) == {low}, op
    for op in ("nll_loss_forward", "_softmax", "native_layer_norm"):
        assert formats(audit, op) == {"fp32"}, op
    # cross_entropy asks log_softmax for the format of its input, which CUDA autocast respects: the
    # log-probabilities are rounded to 16 bits there, unless the policy keeps the loss in FP32.
    assert formats(audit, "_log_softmax") == {low}
    kept = train(policy(low, fp32_selectors=["loss"]), steps=1)[2]
    assert formats(kept, "_log_softmax") == {"fp32"}
    assert formats(audit, "gelu") == {low}  # in no list: follows its input


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda h: h.exp(), torch.float32),
        (lambda h: h.pow(2), torch.float32),
        (lambda h: h.sum(-1), torch.float32),
        (lambda h: h.cumsum(-1), torch.float32),
        (lambda h: h.sum(-1, dtype=torch.bfloat16), torch.bfloat16),
        (lambda h: h.norm(), torch.float32),
        (lambda h: h.norm(dim=-1), torch.float32),
        (lambda h: F.softmax(h, -1), torch.float32),
        (lambda h: F.log_softmax(h, -1), torch.float32),
        (lambda h: F.mse_loss(h, torch.zeros(h.shape)), torch.float32),
        (lambda h: F.group_norm(h, 2), torch.float32),
        (lambda h: torch.addcmul(h, h, h.float()), torch.float32),
        (lambda h: torch.addcmul(h, h, h), torch.bfloat16),
        (lambda h: torch.atan2(h, h.float()), torch.float32),
        (lambda h: torch.mv(h, h.float()[0]), torch.bfloat16),
        (lambda h: torch.einsum("ij,kj->ik", h.float(), h), torch.bfloat16),
        (lambda h: F.avg_pool3d(h.view(1, 1, 2, 2, -1), 1), torch.bfloat16),
        (lambda h: F.pad(h.view(1, 1, 4, 4), (1, 1, 1, 1), "reflect"), torch.bfloat16),
        (lambda h: torch.cat([h, h.float()]), torch.float32),
        (lambda h: h.double().exp(), torch.float64),
        (lambda h: h.sqrt(), torch.bfloat16),
    ],
)
def test_result_formats_follow_cuda(call, expected):
    """Each is what CUDA autocast returns for a BF16 input by the lists of its header."""
    model = nn.Linear(4, 4)
    _, result = audit_of(policy(), model, lambda m: call(m(torch.randn(4, 4))))
    assert result.dtype is expected


def test_binary_cross_entropy_is_refused_as_on_cuda_unless_the_loss_is_kept_in_fp32():
    def call(model):
        return F.binary_cross_entropy(
            model(torch.randn(4, 4)).sigmoid(), torch.ones(4, 4).bfloat16()
        )

    with pytest.raises(RuntimeError, match="binary_cross_entropy is unsafe under autocast"):
        audit_of(policy(), nn.Linear(4, 4), call)
    _, loss = audit_of(policy(fp32_selectors=["loss"]), nn.Linear(4, 4), call)
    assert loss.dtype is torch.float32


class HomeMadeRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.square = x.pow(2)
        return self.g * x * torch.rsqrt(self.square.mean(-1, keepdim=True) + 1e-6)


def test_a_hand_cast_model_overflows_where_cudas_lists_do_not():
    """Planted fault: the square of 1000 is beyond FP16."""
    for fields, finite in [
        ({}, True),
        ({"low_precision_ops": ["all"]}, False),
        ({"low_precision_ops": ["pow"]}, False),
        ({"low_precision_ops": ["all"], "fp32_modules": ["1"]}, True),
        ({"low_precision_ops": ["all"], "fp32_ops": ["pow"]}, True),
    ]:
        model = nn.Sequential(nn.Linear(4, 4), HomeMadeRMSNorm())
        nn.init.constant_(model[0].weight, 250.0)
        audit_of(policy("fp16", **fields), model, lambda m: m(torch.ones(1, 4)))
        assert bool(model[1].square.isfinite().all()) == finite, fields


def test_losses_stay_in_fp32_in_a_hand_cast_model():
    audit = train(BUILT_IN["bf16_pure"], steps=1)[2]
    assert formats(audit, "_log_softmax") == formats(audit, "nll_loss_forward") == {"fp32"}
    assert formats(audit, "_softmax") == formats(audit, "native_layer_norm") == {"bf16"}


def test_pure_weights_gradients_and_optimizer_state_are_bf16():
    model = build()
    with applied(BUILT_IN["bf16_pure"], model, device=CPU) as execution:
        optimizer = torch.optim.AdamW(model.parameters())
        with execution.forward():
            loss = loss_fn(model, batch())
        loss.backward()
        optimizer.step()
        state = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
        tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *state]
        assert {t.dtype for t in tensors} == {torch.bfloat16}
        assert model.batch_norm.running_mean.dtype is torch.bfloat16
        assert loss.dtype is torch.float32


def test_fallback_keeps_the_four_selected_places_in_fp32():
    model, data = build(), batch()
    _, _, audit, execution = train(BUILT_IN["bf16_fallback"], steps=1, model=model, data=data)
    assert execution.fp32_module_names == ("batch_norm", "norm", "head")
    assert formats(audit, "bmm") == formats(audit, "_softmax") == {"fp32"}
    assert formats(audit, "native_batch_norm") == {"fp32"}
    assert formats(audit, "addmm") == {"bf16", "fp32"}  # attention's linear layers, and the head
    assert formats(audit, "convolution") == {"bf16"}


def test_attention_scores_leaves_products_with_weights_alone():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            h = x @ self.w.t()
            return h, h @ h.transpose(-1, -2)

    _, (with_weight, scores) = audit_of(
        policy(fp32_selectors=["attention_scores"]), Scores(), lambda m: m(torch.randn(2, 3, 4))
    )
    assert (with_weight.dtype, scores.dtype) == (torch.bfloat16, torch.float32)


class TiedLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.body = nn.Embedding(5, 4), nn.Linear(4, 4)

    def forward(self, tokens):
        h = self.body(self.emb(tokens))
        return h, h @ self.emb.weight.t()


@pytest.mark.parametrize("selectors", [["output_head"], ["output_head", "attention_scores"]])
def test_a_head_tied_to_the_embedding_is_kept_in_fp32(selectors):
    model, tokens = TiedLanguageModel(), torch.tensor([1, 2])
    for compute, body in [("bf16", torch.bfloat16), ("tf32", torch.float32)]:
        with applied(
            policy(compute, fp32_selectors=selectors),
            model,
            device=CPU,
            trace_forward=lambda: model(tokens),
        ) as execution:
            with execution.forward():
                h, logits = model(tokens)
        assert (h.dtype, logits.dtype) == (body, torch.float32)
        assert torch.equal(logits, h.float() @ model.emb.weight.t())


def test_ops_that_are_in_no_list_can_be_named():
    _, result = audit_of(
        policy(fp32_ops=["sigmoid"]), nn.Linear(4, 4), lambda m: m(torch.randn(2, 4)).sigmoid()
    )
    assert result.dtype is torch.float32


class ScaledMatmul(torch.autograd.Function):
    """Not autocast-aware: no custom_fwd."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.mm(x, w.t())

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return torch.mm(grad, w), torch.mm(grad.t(), x)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return ScaledMatmul.apply(x, self.w)


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("backend", ["auto", "native", "emulated"])
def test_a_custom_function_fails_as_natively_and_works_in_an_fp32_module(low, backend):
    def step(**fields):
        model = nn.Sequential(nn.Linear(4, 4), Custom())
        with applied(policy(low, **fields), model, device=CPU, backend=backend) as execution:
            with execution.forward():
                loss = model(torch.randn(3, 4)).float().sum()
            loss.backward()
        return model

    with pytest.raises(RuntimeError, match="same dtype"):
        step()
    assert step(fp32_modules=["1"])[1].w.grad.isfinite().all()


def test_user_code_that_switches_autocast_off_stays_in_fp32():
    class Off(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            with torch.autocast("cpu", enabled=False):
                return h, self.b(h.float())

    _, (inside, outside) = audit_of(policy(), Off(), lambda m: m(torch.randn(2, 4)))
    assert (inside.dtype, outside.dtype) == (torch.bfloat16, torch.float32)


def test_a_gradient_taken_inside_the_step_meets_no_foreign_format():
    """A gradient penalty differentiates inside loss_fn; kernels' own inner sums are left alone."""
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.GELU())
    with applied(policy(), model, device=CPU) as execution, execution.forward():
        x = torch.randn(2, 3, 8, requires_grad=True)
        h = model(x).transpose(1, 2)  # a transposed gradient takes batch_norm's slow path
        (grad,) = torch.autograd.grad(h.softmax(-1).float().square().sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert model[0].weight.grad.isfinite().all()


def test_small_gradients_are_flushed_without_a_scale_and_kept_with_one():
    """Planted fault: gradients below 2^-25 vanish in FP16."""
    for scale, alive in [(1.0, False), (2.0**16, True)]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        with applied(policy("fp16"), model, device=CPU) as execution:
            with execution.forward():
                loss = model(torch.randn(8, 4)).float().mean() * 1e-8 * scale
            loss.backward()
        assert bool((model[0].weight.grad != 0).any()) == alive


@pytest.mark.parametrize("name", ["tf32", "fp16", "bf16"])
def test_activation_checkpointing_changes_no_gradient(name):
    class Checkpointed(nn.Module):
        def __init__(self, use):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8))
            self.use = use

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False) if self.use else self.body(x)

    gradients = []
    for use in (False, True):
        model = Checkpointed(use)
        with applied(BUILT_IN[name], model, device=CPU) as execution:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
            with execution.forward():
                loss = model(x).float().square().mean()
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_policies_nest():
    alone = {name: train(BUILT_IN[name], steps=1)[0] for name in ("fp32", "fp16", "tf32")}
    for outer in ("fp32", "bf16", "tf32", "fp16"):
        with applied(BUILT_IN[outer], build(), device=CPU):
            for inner, losses in alone.items():
                assert train(BUILT_IN[inner], steps=1)[0] == losses, (outer, inner)
    assert train(BUILT_IN["fp16"], steps=1)[0] == alone["fp16"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fp32_ops": ["sofmax"]}, "policy.fp32_ops: 'sofmax' is no op"),
        ({"low_precision_ops": ["exponent"]}, "policy.low_precision_ops: 'exponent' is no op"),
        ({"fp32_modules": ["nrm"]}, "policy.fp32_modules: 'nrm' matches no module"),
        ({"param_format": "fp16"}, "policy.param_format='fp16' is not allowed"),
        ({"compute_format": "fp32", "fp32_ops": ["sum"]}, "policy.fp32_ops=.* has no effect"),
        ({"compute_format": "fp32", "fp32_modules": ["norm"]}, "fp32_modules=.* has no effect"),
        ({"compute_format": "fp32", "fp32_selectors": ["loss"]}, "fp32_selectors=.* has no effect"),
    ],
)
def test_a_policy_that_cannot_be_applied_is_refused(fields, message):
    model = build()
    with pytest.raises(ValueError, match=message):
        with applied(
            policy(**{"compute": fields.pop("compute_format", "bf16"), **fields}), model, device=CPU
        ):
            pass


def test_backends_are_checked():
    with pytest.raises(ValueError, match="backend='fast' is not allowed; allowed: auto, native"):
        train(policy(), backend="fast")
    with pytest.raises(ValueError, match="backend='native' is not allowed for tf32"):
        train(policy("tf32"), backend="native")
