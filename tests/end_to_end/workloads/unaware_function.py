"""A layer written as an autograd function of its own that knows nothing of autocast."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 100


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class Mixing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x):
        return Product.apply(x, self.weight)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mixing, self.last = nn.Linear(5, 16), Mixing(16), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.mixing(self.first(x).tanh()).relu()).squeeze(-1)


def build_model(seed):
    torch.manual_seed(seed)
    return Net()


def batches(seed, steps):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(64, 5, generator=g)
        yield x, x[:, 0] * x[:, 1] + 0.3 * torch.randn(64, generator=g)


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]).float(), batch[1])


def make_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=5e-3)
