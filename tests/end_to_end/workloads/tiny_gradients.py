"""Regression in very small units: FP16 gradients vanish unless the loss is scaled."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 120
UNIT = 2.0**-12


def build_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 24), nn.GELU(), nn.Linear(24, 2))


def batches(seed, steps):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(4, 2, generator=g)
    for _ in range(steps):
        x = torch.randn(128, 4, generator=g)
        yield x, UNIT * (torch.cos(x @ mix) + 0.3 * torch.randn(128, 2, generator=g))


def loss_fn(model, batch):
    # The unit is applied behind the model, so that only gradients are small, not activations.
    return F.mse_loss(UNIT * model(batch[0]), batch[1])


def make_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)
