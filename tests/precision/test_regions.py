import pytest
import torch
from torch import nn

from harness.precision.regions import fp32_region, ieee_region, in_region


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        ctx.log(ctx.name)
        return grad, None, None


class Layer(nn.Module):
    def __init__(self, name, log):
        super().__init__()
        self.name, self.log, self.w = name, log, nn.Parameter(torch.ones(2))

    def forward(self, x):
        self.log(f"{self.name} forward")
        return Noting.apply(x * self.w, self.log, f"{self.name} backward")


def test_ieee_region_covers_forward_and_backward_of_its_module_only():
    """The switch is a stand-in for a GPU's; the order of autograd's nodes is the real one."""
    state, seen = ["tf32"], {}

    def log(name):
        seen[name] = state[0]

    net = nn.Sequential(*(Layer(name, log) for name in "abc"))
    region = ieee_region(lambda: state[0], lambda value: state.__setitem__(0, value))
    with in_region(net, ["1"], region):
        net(torch.ones(2)).sum().backward()
    expected = {"a": "tf32", "b": "ieee", "c": "tf32"}
    assert seen == {
        f"{name} {phase}": switch
        for name, switch in expected.items()
        for phase in ("forward", "backward")
    }


def test_ieee_region_ends_with_backward_where_no_input_takes_a_gradient():
    state = ["tf32"]
    net = nn.Sequential(Layer("a", lambda name: None))
    region = ieee_region(lambda: state[0], lambda value: state.__setitem__(0, value))
    with in_region(net, ["0"], region):
        net(torch.ones(2)).sum().backward()
    assert state == ["tf32"]


def test_ieee_regions_nest():
    """The rest of the outer module after the inner one, in both passes, and what comes after."""
    state, seen = ["tf32"], {}

    def log(name):
        seen[name] = state[0]

    inside = nn.Sequential(*(Layer(name, log) for name in "bcd"))
    net = nn.Sequential(Layer("a", log), inside, Layer("e", log))
    region = ieee_region(lambda: state[0], lambda value: state.__setitem__(0, value))
    with in_region(net, ["1", "1.1"], region):
        for _ in range(2):  # the second pass starts from what the first has left
            net(torch.ones(2)).sum().backward()
            assert state == ["tf32"]
            assert {name[0]: switch for name, switch in seen.items()} == {
                "a": "tf32", "b": "ieee", "c": "ieee", "d": "ieee", "e": "tf32",
            }  # fmt: skip
            assert len(seen) == 10


@pytest.mark.parametrize("found", ["ieee", "tf32"])
def test_an_ieee_region_leaves_the_switch_as_it_found_it(found):
    """A held-out evaluation switches to IEEE and then runs the model through its regions."""
    state, seen = [found], {}

    def log(name):
        seen[name] = state[0]

    net = nn.Sequential(*(Layer(name, log) for name in "ab"))
    region = ieee_region(lambda: state[0], lambda value: state.__setitem__(0, value))
    with in_region(net, ["0"], region):
        net(torch.ones(2)).sum().backward()
    assert seen["a forward"] == seen["a backward"] == "ieee"
    assert seen["b forward"] == seen["b backward"] == state[0] == found


class Nested(nn.Module):
    def forward(self, pair, *, extra):
        self.seen = (
            pair[0].dtype,
            pair[1]["x"].dtype,
            extra.dtype,
            torch.is_autocast_enabled("cpu"),
        )
        return pair[0]


def test_fp32_region_casts_nested_inputs_and_switches_autocast_off():
    from contextlib import nullcontext

    net = nn.Sequential(Nested())
    low = torch.ones(2, dtype=torch.bfloat16)
    with in_region(net, ["0"], fp32_region("cpu", nullcontext)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net[0]((low, {"x": low}), extra=torch.ones(2, dtype=torch.int64))
    assert net[0].seen == (torch.float32, torch.float32, torch.int64, False)
    assert "forward" not in net[0].__dict__


def test_an_instance_forward_of_the_users_is_put_back():
    net = nn.Sequential(nn.Linear(2, 2))
    own = net[0].forward = lambda x: x
    with in_region(net, ["0"], lambda forward, args, kwargs: forward(*args)):
        assert net[0].forward is not own
    assert net[0].forward is own
