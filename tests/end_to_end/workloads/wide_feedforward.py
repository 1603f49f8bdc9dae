"""A residual block whose second projection sums far beyond 65504 before it is normalized."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 100


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        with torch.no_grad():
            self.up.weight.mul_(300.0)
            self.down.weight.mul_(3000.0)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


def build_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 24), Block(24, 48), nn.LayerNorm(24), nn.Linear(24, 5))


def batches(seed, steps):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, 8, generator=g)
    for _ in range(steps):
        label = torch.randint(5, (64,), generator=g)
        yield centres[label] + 1.2 * torch.randn(64, 8, generator=g), label


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3)
