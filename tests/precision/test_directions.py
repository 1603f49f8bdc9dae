"""Entries with a direction: the values of one computation, the gradients of another."""

import dataclasses
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from precision_models import CPU, policy
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.precision.directions import entries_for, split_direction
from harness.precision.execution import applied
from harness.precision.passes import joined, joined_tree
from harness.runs.dropout import paired_dropout

DIRECTIONS = ("forward", "backward")
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def test_entries_are_split():
    assert split_direction("forward:re:a:b") == ("forward", "re:a:b")
    assert split_direction("sum") == (None, "sum")
    assert entries_for(["sum", "backward:exp"], "forward") == ("sum",)


def seed_host(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what users' code draws from


def outcome(fields, make, x, compute="bf16", seed=0, call=None, steps=1):
    """Return (values, input gradient, weight gradients, buffers, next random numbers)."""
    torch.manual_seed(seed)
    model = nn.Sequential(make())
    x = x.clone().requires_grad_()
    seed_host(seed)
    with (
        paired_dropout(CPU) as masks,
        applied(policy(compute, **fields), model, device=CPU, paused=masks.paused) as execution,
    ):
        for _ in range(steps):
            torch.manual_seed(seed)
            seed_host(seed)
            with masks.recording(), execution.forward():
                # Reaches the module in the compute format, as from a layer before it.
                low = x.to(LOW.get(compute, torch.float32))
                y = (call or (lambda m, v: m(v)))(model, low)
            host = random.random(), np.random.rand()  # noqa: NPY002
            after = torch.rand(2), *host, int(masks.value())
            # Powers of two: the gradient that arrives is the same number in every format.
            weights = 2.0 ** torch.arange(y.numel()).remainder(4).reshape(y.shape)
            (y.float() * weights).sum().backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    return y.detach(), gradients, [b.clone() for b in model.buffers()], after


def same(a, b):
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8)

    def forward(self, x):
        return self.rnn(x)[0]


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return F.silu(x * self.scale, inplace=True)


class Counting(nn.Module):
    """Keeps a count, an average and draws from every generator there is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        self.calls += 1
        h = F.dropout(self.linear(x), 0.5)
        self.average.mul_(0.5).add_(h.detach().float().mean((0, 1)))
        noise = torch.randn(8, generator=self.generator)
        host = random.random() + float(np.random.rand())  # noqa: NPY002
        return h + noise + host + torch.rand_like(h)


MODULES = {
    "linear": lambda: nn.Linear(8, 8),
    "layer_norm": lambda: nn.LayerNorm(8),
    "batch_norm": lambda: nn.BatchNorm1d(5),
    "recurrent": Recurrent,
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3),
    "inplace": InPlace,
    "counting": Counting,
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)),
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "reentrant": lambda: Checkpointed(use_reentrant=True),
}


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.use_reentrant)


X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_the_values_of_one_policy_and_the_gradients_of_another(name, compute):
    """Oracle: the same module alone under the two policies that it is made of, bit for bit."""
    make = MODULES[name]
    both = outcome({"fp32_modules": ["0"]}, make, X, compute)
    low = outcome({}, make, X, compute)
    forward = outcome({"fp32_modules": ["forward:0"]}, make, X, compute)
    backward = outcome({"fp32_modules": ["backward:0"]}, make, X, compute)
    for result, values, graph in [(forward, both, low), (backward, low, both)]:
        assert same([result[0]], [values[0]])
        assert same(result[1], graph[1])
        assert same(result[2], values[2])  # running statistics follow the values
        assert torch.equal(result[3][0], values[3][0])
        assert result[3][1:] == values[3][1:]
    if name not in ("layer_norm", "batch_norm", "inplace"):  # hardly rounded, if at all
        assert not same([low[0].float()], [both[0]])
        assert not same(low[1], both[1])


@pytest.mark.parametrize("compute", ["tf32", "fp8_e4m3", "e5m3"])
def test_a_rounded_product_keeps_one_direction_in_fp32(compute):
    make = MODULES["linear"]
    fp32, low = outcome({"fp32_modules": ["0"]}, make, X, compute), outcome({}, make, X, compute)
    for field in ("fp32_modules", "fp32_ops"):
        entry = "0" if field == "fp32_modules" else "matmul"
        forward = outcome({field: [f"forward:{entry}"]}, make, X, compute)
        backward = outcome({field: [f"backward:{entry}"]}, make, X, compute)
        assert same([forward[0]], [fp32[0]]), field
        assert same(forward[1], low[1]), field
        assert same([backward[0]], [low[0]]), field
        assert same(backward[1], fp32[1]), field


def test_both_directions_named_apart_are_both():
    make = MODULES["attention"]
    plain = outcome({"fp32_modules": ["0"]}, make, X)
    apart = outcome({"fp32_modules": ["forward:0", "backward:0"]}, make, X)
    assert same([plain[0]], [apart[0]])
    assert same(plain[1], apart[1])


OPS = {
    "softmax": (lambda v: v.softmax(-1), "low_precision_ops"),
    "exp": (lambda v: v.exp(), "low_precision_ops"),
    "layer_norm": (lambda v: F.layer_norm(v, (8,)), "low_precision_ops"),
    "sum": (lambda v: v.sum(-1), "low_precision_ops"),
    "sigmoid": (lambda v: v.sigmoid(), "fp32_ops"),
    "matmul": (lambda v: v @ v.transpose(-1, -2), "fp32_ops"),
    "linear": (lambda v: F.linear(v, torch.ones(3, 8)), "fp32_ops"),
    "convolution": (lambda v: F.conv1d(v, torch.ones(3, 5, 3)), "fp32_ops"),
    "cross_entropy_loss": (
        lambda v: F.cross_entropy(v.transpose(1, 2), torch.zeros(4, 5, dtype=torch.int64)),
        "fp32_ops",
    ),
    "scaled_dot_product_attention": (
        lambda v: F.scaled_dot_product_attention(v, v, v, dropout_p=0.3),
        "fp32_ops",
    ),
    "batch_norm": (
        lambda v: F.batch_norm(v, torch.zeros(5), torch.ones(5), training=True),
        "fp32_ops",
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_the_values_of_one_policy_and_the_gradients_of_another(name):
    op, field = OPS[name]
    arguments = {"make": nn.Identity, "x": X, "call": lambda m, v: op(v)}
    changed, plain = outcome({field: [name]}, **arguments), outcome({}, **arguments)
    forward = outcome({field: [f"forward:{name}"]}, **arguments)
    backward = outcome({field: [f"backward:{name}"]}, **arguments)
    for result, values, graph in [(forward, changed, plain), (backward, plain, changed)]:
        assert same([result[0]], [values[0]])
        assert same(result[1], graph[1])
        assert torch.equal(result[3][0], plain[3][0])
        assert result[3][1:] == plain[3][1:]
    # Each entry does something, at least in one direction.
    assert not (same([changed[0]], [plain[0]]) and same(changed[1], plain[1]))


def test_running_statistics_are_updated_once():
    model = nn.Sequential(nn.BatchNorm1d(5))
    fields = {"fp32_ops": ["forward:batch_norm"]}
    with applied(policy(**fields), model, device=CPU) as execution, execution.forward():
        model(X.bfloat16())
    expected = nn.BatchNorm1d(5)
    expected(X.bfloat16().float())
    assert torch.equal(model[0].running_mean, expected.running_mean)
    assert int(model[0].num_batches_tracked) == 1


def test_hand_cast_in_one_direction():
    """`forward:all` drops the FP32 lists of the forward pass only."""
    call = {"make": nn.Identity, "x": X, "call": lambda m, v: v.exp()}
    both, forward = (
        outcome({"low_precision_ops": [entry]}, **call) for entry in ("all", "forward:all")
    )
    plain = outcome({}, **call)
    assert forward[0].dtype is torch.bfloat16
    assert same([forward[0]], [both[0]])
    assert same(forward[1], plain[1])


def test_a_directed_module_leaves_counts_and_own_generators_as_one_call_does():
    for entry in ("0", "forward:0", "backward:0"):
        module = Counting()
        outcome({"fp32_modules": [entry]}, lambda module=module: module, X, steps=3)
        expected = torch.Generator().manual_seed(1)
        for _ in range(3):
            torch.randn(8, generator=expected)
        assert module.calls == 3
        assert torch.equal(module.generator.get_state(), expected.get_state())


def test_an_evaluation_runs_once_and_has_the_values_of_the_forward_entry():
    calls = []

    class Noting(nn.Linear):
        def forward(self, x):
            calls.append(x.dtype)
            return super().forward(x)

    model = nn.Sequential(Noting(8, 8))
    fields = {"fp32_modules": ["forward:0"]}
    with applied(policy(**fields), model, device=CPU) as execution, execution.forward():
        with torch.no_grad():
            y = model(X.bfloat16())
    assert calls == [torch.float32]
    assert y.dtype is torch.float32


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extras: dict
    name: str = "out"


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs):
        h = self.linear(inputs["x"])
        return Output(hidden=h, extras={"pair": (h, h.argmax(-1)), "none": None})


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_structures_go_in_and_out(direction):
    model = nn.Sequential(Structured())
    fields = {"fp32_modules": [f"{direction}:0"]}
    with applied(policy(**fields), model, device=CPU) as execution:
        with execution.forward():
            result = model({"x": X.bfloat16(), "y": 3})
        assert result.extras["pair"][0] is result.hidden
        assert result.hidden.dtype is (torch.float32 if direction == "forward" else torch.bfloat16)
        assert not result.extras["pair"][1].is_floating_point()
        result.hidden.float().sum().backward()
    assert model[0].linear.weight.grad.isfinite().all()


@pytest.mark.parametrize("entry", ["0.1", "forward:0.1", "backward:0.1"])
def test_an_input_changed_in_place_is_changed_for_its_caller(entry):
    class Caller(nn.Sequential):
        def forward(self, x):
            h = self[0](x)
            self[1](h)  # in place, result unused
            return h

    def make():
        return Caller(nn.Linear(8, 8), nn.ReLU(inplace=True))

    plain = outcome({}, make, X)
    kept = outcome({"fp32_modules": [entry]}, make, X)
    # ReLU rounds nothing, so that FP32 changes nothing.
    assert same([kept[0]], [plain[0]])
    assert same(kept[1], plain[1])
    assert bool((kept[0] == 0).any())


def test_double_backward_goes_through():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    fields = {"fp32_modules": ["backward:1"]}
    with applied(policy(**fields), model, device=CPU) as execution, execution.forward():
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert model[0].weight.grad.abs().sum() > 0


class LosesGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.distributions.Normal(self.linear(x).float(), 1.0)


class DependsOnRounding(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((8,), 1.0 + 2**-12))

    def forward(self, x):
        return (x * self.w)[: 1 + int((x * self.w).float().sum() != x.float().sum())]


class MovesItsWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x):
        with torch.no_grad():
            self.w.add_(1)
        return x * self.w.clone()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (LosesGradients, "returns a Normal, whose gradients would be lost"),
        (MovesItsWeights, "changes its own weights in its forward pass"),
    ],
)
def test_what_cannot_run_twice_is_refused_in_one_line(make, message):
    model = nn.Sequential(make())
    fields = {"fp32_modules": ["forward:0"]}
    with applied(policy(**fields), model, device=CPU) as execution, execution.forward():
        with pytest.raises(RuntimeError, match=message):
            model(X)


def test_shapes_that_depend_on_rounding_are_refused():
    with pytest.raises(RuntimeError, match="two runs returned shapes"):
        joined(torch.ones(2, requires_grad=True), torch.ones(3))
    with pytest.raises(RuntimeError, match="two runs returned different results"):
        joined_tree((torch.ones(2),), [torch.ones(2), torch.ones(2)])


def test_a_weight_or_buffer_that_is_returned_stays_what_it_is():
    weight = nn.Parameter(torch.ones(2))
    result = joined((weight * 2), weight)
    assert result is not weight
    result.sum().backward()
    assert weight.grad.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fp32_modules": ["forward:nrm"]}, "'forward:nrm' matches no module"),
        ({"fp32_ops": ["backward:sofmax"]}, "'sofmax' is no op.*closest: softmax"),
        ({"low_precision_ops": ["forward:exponent"]}, "'exponent' is no op"),
        ({"fp32_ops": ["forwards:softmax"]}, "'forwards:softmax' is no op"),
        (
            {"fp32_modules": ["forward:0"], "param_format": "bf16"},
            "policy.fp32_modules='forward:0' has a direction, which makes no sense with",
        ),
        ({"fp32_selectors": ["forward:loss"]}, "policy.fp32_selectors='forward:loss'"),
    ],
)
def test_entries_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        with applied(policy(**fields), nn.Sequential(nn.Linear(2, 2)), device=CPU):
            pass
    assert "\n" not in str(caught.value)


def test_torch_func_around_a_directed_module_is_refused_in_one_line():
    model = nn.Sequential(nn.Linear(8, 8))
    fields = {"fp32_modules": ["forward:0"]}
    with applied(policy(**fields), model, device=CPU) as execution, execution.forward():
        with pytest.raises(RuntimeError, match=r"torch\.func"):
            torch.func.grad(lambda x: model(x).float().sum())(X)


def test_the_audit_counts_the_run_that_gives_the_values():
    for entry, expected in [("forward:0", {"fp32"}), ("backward:0", {"bf16"})]:
        model = nn.Sequential(nn.Linear(8, 8))
        with applied(policy(fp32_modules=[entry]), model, device=CPU) as execution:
            with execution.audit() as audit, execution.forward():
                model(X[0].bfloat16())
        assert set(audit["addmm"]) == expected
        assert sum(audit["addmm"].values()) == 1
