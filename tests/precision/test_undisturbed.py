"""A pass beside the training leaves nothing behind: weights, buffers, attributes, registrations."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from harness.precision.undisturbed import undisturbed


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("poisoned", torch.full((2,), math.nan))
        self.calls, self.hidden = 0, None

    def forward(self, x):
        self.calls += 1
        self.hidden = self.online(x)
        with torch.no_grad():
            self.target.weight.lerp_(self.online.weight, 0.5)
            self.poisoned.zero_()
        self.average = self.average + 1  # assigned, not changed in place
        self.extra = nn.Linear(1, 1)
        return self.hidden


def test_everything_is_as_before():
    model = Stateful()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffer = model.average
    with undisturbed(model):
        model.eval()
        model(torch.ones(1, 2))
        assert model.calls == 1
        assert not torch.equal(model.target.weight, before["target.weight"])
    assert (model.calls, model.hidden, model.training) == (0, None, True)
    assert model.average is buffer
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value.nan_to_num(7.0), before[name].nan_to_num(7.0)), name


def test_also_after_an_exception():
    model = Stateful()

    def fail():
        with undisturbed(model):
            model(torch.ones(1, 3))

    with pytest.raises(RuntimeError, match="shapes"):
        fail()
    assert model.calls == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit itself
def test_a_scripted_model():
    model = torch.jit.script(nn.BatchNorm1d(2))
    before = model.running_mean.clone()
    with undisturbed(model):
        model(torch.randn(8, 2))
        assert not torch.equal(model.running_mean, before)
        model.eval()
    assert model.training
    assert torch.equal(model.running_mean, before)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(0), lambda g: torch.rand(3, generator=g).tolist()),
        (lambda: np.random.default_rng(0), lambda g: g.random(3).tolist()),
        (lambda: np.random.RandomState(0), lambda g: g.rand(3).tolist()),
        (lambda: random.Random(0), lambda g: g.random()),
    ],
    ids=["torch", "numpy", "numpy_legacy", "python"],
)
def test_generators_of_the_models_own_are_put_back(make, draw):
    """A trace that draws from one would shift all of the run's later draws."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].generator = make()
    expected = draw(make())
    with undisturbed(model):
        assert draw(model[0].generator) == expected
    assert draw(model[0].generator) == expected
