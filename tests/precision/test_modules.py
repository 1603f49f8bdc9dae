import pytest
import torch
from torch import nn

from harness.precision.modules import OutputHead, normalizations, output_head, resolve, select
from harness.precision.policy import PrecisionPolicy


class RMSNorm(nn.Module):
    def forward(self, x):
        return x


class NormalizingFlow(nn.Module):
    def forward(self, x):
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.norm, self.ff = (
            nn.Linear(4, 4),
            RMSNorm(),
            nn.ModuleDict({"wo": nn.Linear(4, 4)}),
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)  # registered first, called last
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(4)
        self.flow = NormalizingFlow()

    def forward(self, x):
        for block in self.blocks:
            x = block.attn(x)
        return self.head(self.norm(torch.dropout(x, 0.5, True)))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("norm", ["blocks.0.norm", "blocks.1.norm", "norm"]),
        ("blocks.*.attn", ["blocks.0.attn", "blocks.1.attn"]),
        ("0.attn", ["blocks.0.attn"]),
        ("ff.wo", ["blocks.0.ff.wo", "blocks.1.ff.wo"]),
        ("a*", ["blocks.0.attn", "blocks.1.attn"]),
        ("re:blocks\\.1\\..*n.*", ["blocks.1.attn", "blocks.1.norm"]),
        ("ff", ["blocks.0.ff.wo", "blocks.1.ff.wo"]),  # a container is never called itself
        ("blocks", ["blocks.0", "blocks.1"]),
    ],
)
def test_patterns(pattern, expected):
    assert list(resolve([pattern], Net())) == expected


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("atn", "attn"), ("block.*.attn", "closest"), ("re:norm.", "norm"), ("orm", "norm")],
)
def test_a_pattern_without_a_match_is_an_error_with_the_closest_names(pattern, hint):
    with pytest.raises(ValueError, match=rf"policy.fp32_modules: .*matches no module.*{hint}"):
        resolve([pattern], Net())


def test_a_broken_regular_expression_is_named():
    with pytest.raises(ValueError, match=r"'re:\(' is not a regular expression"):
        resolve(["re:("], Net())


def test_normalizations_are_found_by_type_and_by_class_name():
    assert normalizations(Net()) == ("blocks.0.norm", "blocks.1.norm", "norm")


def test_output_head_is_the_layer_called_last_and_tracing_leaves_no_trace():
    net = Net()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    state = torch.get_rng_state()
    assert output_head(net, lambda: net(torch.randn(3, 4))) == OutputHead(module="head")
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training
    assert not net.head._forward_hooks


def test_output_head_without_a_trace_is_the_last_registered_and_may_be_missing():
    assert output_head(Net()) == OutputHead(module="blocks.1.ff.wo")
    assert output_head(nn.ReLU()) == OutputHead()


def test_selectors_may_match_nothing():
    policy = PrecisionPolicy(
        name="p", compute_format="bf16", fp32_selectors=("normalization", "output_head")
    )
    assert select(policy, nn.Sequential(nn.ReLU()), OutputHead()) == ()
    assert select(
        policy, nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), OutputHead(module="0")
    ) == ("0", "1")


@pytest.mark.parametrize(
    "product",
    [
        lambda h, w: h @ w.t(),
        lambda h, w: nn.functional.linear(h, w),
        lambda h, w: torch.einsum("bd,vd->bv", h, w),
    ],
)
def test_a_product_with_a_tied_weight_is_the_head(product):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.body = nn.Embedding(5, 4), nn.Linear(4, 4)

        def forward(self, tokens):
            return product(self.body(self.emb(tokens)), self.emb.weight)

    model = Tied()
    head = output_head(model, lambda: model(torch.tensor([1, 2])))
    assert head.module is None
    assert head.weight is model.emb.weight


def test_the_head_of_a_loss_with_derivatives_of_the_model_is_found():
    model = Net()

    def physics_residual():
        x = torch.randn(3, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    assert output_head(model, physics_residual) == OutputHead(module="head")


def test_a_close_name_is_offered_once() -> None:
    model = nn.Sequential()
    model.add_module("head", nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"closest: head$"):
        resolve(["haed"], model)
