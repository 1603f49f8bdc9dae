"""A regression that trains in a blink and whose first product is too large for FP16."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 60
LARGE = 400.0


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 16, bias=False)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        # A product of about 160 000 times one.
        h = F.linear(x * LARGE, self.first.weight * LARGE) / LARGE**2
        return self.head(F.gelu(h))


def build_model(seed):
    torch.manual_seed(seed)
    return Wide()


def batches(seed, steps):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(32, 4, generator=g)
        yield x, x.sum(1, keepdim=True) + 0.3 * torch.randn(32, 1, generator=g)


def held_out(seed):
    return list(batches(77, 64))


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]).float(), batch[1])


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-2)


def make_scheduler(optimizer, steps):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
