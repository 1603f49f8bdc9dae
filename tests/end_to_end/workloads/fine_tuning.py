"""Fine-tuning close to a good solution: updates are small beside the weights."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 150


def build_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))


def batches(seed, steps):
    g = torch.Generator().manual_seed(seed)
    target = build_model(seed)
    with torch.no_grad():
        for p in target.parameters():
            p.add_(0.015 * torch.randn(p.shape, generator=g).sign())
    for _ in range(steps):
        x = torch.randn(64, 12, generator=g)
        with torch.no_grad():
            clean = target(x)
        yield x, clean + 0.03 * torch.randn(64, 4, generator=g)


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]).float(), batch[1])


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
