"""One batch in the middle holds a reading that overflows FP16 in front of a BatchNorm."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 120


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.sensor, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.norm(self.sensor(x)).relu())


def build_model(seed):
    torch.manual_seed(seed)
    return Net()


def _readings(generator, number):
    centres = torch.linspace(-1.0, 1.0, 18).reshape(3, 6).sin()
    label = torch.randint(3, (number,), generator=generator)
    return centres[label] + 0.7 * torch.randn(number, 6, generator=generator), label


def batches(seed, steps):
    g = torch.Generator().manual_seed(seed)
    for step in range(steps):
        x, label = _readings(g, 64)
        if step == 30:
            x[5] = 4e5
        yield x, label


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3)
