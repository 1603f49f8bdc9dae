"""Sets of up to eight vectors, pooled by attention; an additive mask hides the padding."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 100


class Pool(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.query = nn.Parameter(0.3 * torch.randn(2, width))

    def forward(self, items, present):
        scores = self.key(items) @ self.query.T
        # -1e5 is beyond FP16: in a set without any item every score becomes -inf.
        scores = scores + (~present).to(scores.dtype)[..., None] * -1e5
        shares = scores.softmax(1)
        return (shares.transpose(1, 2) @ self.value(items)).flatten(1)


class SetRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pool, self.head = nn.Linear(5, 16), Pool(16), nn.Linear(32, 1)

    def forward(self, items, present):
        return self.head(self.pool(self.embed(items).relu(), present)).squeeze(-1)


def build_model(seed):
    torch.manual_seed(seed)
    return SetRegressor()


def batches(seed, steps):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        items = torch.randn(48, 8, 5, generator=g)
        present = torch.rand(48, 8, generator=g) < torch.rand(48, 1, generator=g)
        present[0] = False
        mean = (items[..., 0].relu() * present).sum(1) / present.sum(1).clamp(min=1)
        yield items, present, 2.0 * mean + 0.5 * torch.randn(48, generator=g)


def loss_fn(model, batch):
    items, present, target = batch
    return F.mse_loss(model(items, present).float(), target)


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)
