"""A healthy model: dropout, tied weights, batches and outputs as dicts, a held-out set."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS, CLIP = 100, 1.0
SYMBOLS = 12


class NextSymbol(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, width)
        self.body = nn.Sequential(nn.Linear(2 * width, 48), nn.GELU(), nn.Linear(48, width))
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.head = nn.Linear(width, SYMBOLS)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.2)

    def forward(self, context):
        hidden = self.drop(self.embed(context).flatten(-2))
        return {"logits": self.head(self.norm(self.body(hidden))), "hidden": hidden}


def build_model(seed):
    torch.manual_seed(seed)
    return NextSymbol()


def _pairs(generator, number):
    a, b = torch.randint(SYMBOLS, (2, number), generator=generator)
    noise = (torch.rand(number, generator=generator) < 0.3).long()
    target = (a + 2 * b + noise * torch.randint(SYMBOLS, (number,), generator=generator)) % SYMBOLS
    return {"context": torch.stack([a, b], 1), "target": target}


def batches(seed, steps):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield _pairs(g, 96)


def held_out(seed):
    g = torch.Generator().manual_seed(987)
    return [_pairs(g, 1024) for _ in range(2)]


def loss_fn(model, batch):
    logits = model(batch["context"])["logits"]
    return F.cross_entropy(logits.float(), batch["target"])


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3)


def make_scheduler(optimizer, steps):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
