"""How the built-in models are trained: AdamW, linear warm-up and cosine decay."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from harness.workloads.settings import TrainingSettings


def make_adamw(model: nn.Module, settings: TrainingSettings) -> AdamW:
    """Return AdamW (Loshchilov and Hutter 2019) over all parameters, with torch's defaults else."""
    return AdamW(
        model.parameters(),
        lr=settings.peak_lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )


def make_warmup_cosine(optimizer: Optimizer, *, steps: int, settings: TrainingSettings) -> LambdaLR:
    """Return the schedule over `steps` batches, stepped once per batch.

    Batch k trains at `peak * (k + 1) / warmup` during the warm-up, then along half a cosine that
    reaches `final_lr_ratio * peak` after the last batch; it stays there if stepped further.
    """
    warmup = min(settings.warmup_steps, max(1, steps // 5))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return settings.final_lr_ratio + (1 - settings.final_lr_ratio) * cosine

    return LambdaLR(optimizer, factor)


def seeded(seed: int) -> torch.Generator:
    """Return a CPU generator of its own, so that nothing else can shift its stream."""
    return torch.Generator().manual_seed(seed)
