"""Small models and a training step shared by the tests of this folder."""

import pathlib

import torch
import torch.nn.functional as F
import yaml
from torch import nn

from harness.precision.execution import applied
from harness.precision.policy import PrecisionPolicy

CPU = torch.device("cpu")
POLICY_FILES = sorted((pathlib.Path(__file__).parents[2] / "conf" / "policy").glob("*.yaml"))
BUILT_IN = {
    path.stem: PrecisionPolicy.from_mapping(yaml.safe_load(path.read_text()))
    for path in POLICY_FILES
}


def policy(compute="bf16", **fields):
    return PrecisionPolicy.from_mapping({"name": "p", "compute_format": compute, **fields})


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5
        heads = [
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v)
        ]  # the fused kernel's form
        fused = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(scores.softmax(-1) @ v + fused)


class Net(nn.Module):
    """Convolution, normalization, two kinds of attention and a classifier; cross-entropy loss."""

    def __init__(self, width=16):
        super().__init__()
        self.conv = nn.Conv1d(3, width, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(width)
        self.attn, self.norm = Attention(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        h = F.gelu(self.batch_norm(self.conv(x))).transpose(1, 2)
        return self.head(self.norm(h + self.attn(h))).mean(1)


def build(seed=0):
    torch.manual_seed(seed)
    return Net()


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 8, generator=generator)
    return x, torch.randint(0, 5, (4,), generator=generator)


def loss_fn(model, data):
    return F.cross_entropy(model(data[0]), data[1])


def train(policy, steps=3, backend="auto", model=None, data=None):
    """Return (losses, gradients of the last step, audit of the first, execution)."""
    model = build() if model is None else model
    data = batch() if data is None else data
    losses, audit = [], {}
    with applied(
        policy, model, device=CPU, backend=backend, trace_forward=lambda: loss_fn(model, data)
    ) as execution:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            optimizer.zero_grad()
            if step == 0:
                with execution.audit() as audit, execution.forward():
                    loss = loss_fn(model, data)
            else:
                with execution.forward():
                    loss = loss_fn(model, data)
            loss.backward()
            gradients = [p.grad.detach().float().clone() for p in model.parameters()]
            optimizer.step()
            losses.append(loss.detach().float().item())
    return losses, gradients, audit, execution
