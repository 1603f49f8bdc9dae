"""A small net under SGD with gradient clipping, where the length of a step matters."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS, CLIP = 100, 0.5


def build_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 3))


def batches(seed, steps):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, 6, generator=g)
    for _ in range(steps):
        label = torch.randint(3, (64,), generator=g)
        yield centres[label] + torch.randn(64, 6, generator=g), label


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
