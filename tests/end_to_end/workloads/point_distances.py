"""Distances between points far from the origin, by |a|^2 - 2ab + |b|^2, which cancels."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 100


class Distances(nn.Module):
    def forward(self, a, b):
        squares = a.pow(2).sum(-1)[:, :, None] + b.pow(2).sum(-1)[:, None, :]
        return (squares - 2.0 * (a @ b.transpose(1, 2)).float()).clamp(min=0.0)


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.distances = Distances()
        self.energy = nn.Sequential(nn.Linear(4, 24), nn.SiLU(), nn.Linear(24, 1))

    def forward(self, a, b):
        d = self.distances(a, b)
        bumps = torch.stack([torch.exp(-d / s) for s in (0.5, 1.0, 2.0, 4.0)], -1)
        return self.energy(bumps).float().mean((1, 2)).squeeze(-1)


def build_model(seed):
    torch.manual_seed(seed)
    return Potential()


def batches(seed, steps):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        a, b = torch.randn(2, 32, 4, 2, generator=g)
        target = torch.exp(-(a[:, :, None] - b[:, None]).pow(2).sum(-1)).mean((1, 2))
        yield a + 60.0, b + 60.0, 5.0 * target + 0.1 * torch.randn(32, generator=g)


def loss_fn(model, batch):
    a, b, target = batch
    return F.mse_loss(model(a, b), target)


def make_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)
