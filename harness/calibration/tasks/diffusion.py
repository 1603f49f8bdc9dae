"""Denoising diffusion model of handwritten digits, judged by its averaged weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from harness.calibration.tasks.digits import SIDE, read_digits
from harness.calibration.tasks.problem import Batch, Problem, sinusoids
from harness.calibration.tasks.seams import Norm, Seam, Seamed
from harness.workloads.optimization import seeded

WIDTH = 96
TIME_WIDTH = 32
BATCH = 64
NUM_LEVELS = 1000
DECAY = 0.98
_HELD_OUT_DRAWS = 4
_AVERAGED = "averaged_"


class Denoiser(Seamed):
    """Predicts the noise in 64 noisy pixels (Ho et al. 2020), from them and their noise level."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(SIDE**2, WIDTH)
        self.level = nn.Linear(TIME_WIDTH, WIDTH)
        self.norm1, self.norm2 = Norm(WIDTH), Norm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, SIDE**2)
        for name, parameter in list(self.named_parameters()):
            self.register_buffer(averaged_name(name), parameter.detach().clone())

    def forward(self, noisy: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error.

        Args:
            noisy: FP32 (batch, 64).
            level: int64 (batch,), 0 (almost clean) to 999.
            noise: FP32 (batch, 64), to be predicted.
        """
        seams = self.seams
        t = seams["timesteps"](level)
        told = self.level(sinusoids(t, width=TIME_WIDTH, shortest=8.0, longest=4000.0))
        x = self.enter(noisy) + told
        x = seams["residual"](x, torch.relu(self.first(torch.relu(self.norm1(x)) + told)))
        x = seams["residual"](x, torch.relu(self.second(torch.relu(self.norm2(x)) + told)))
        errors = (self.out(x) - noise).square()
        loss: Tensor = seams["reduce_loss"](seams["pool"](errors, 1))
        return loss


def averaged_name(name: str) -> str:
    """Return the buffer's name that holds the moving average of a parameter."""
    return _AVERAGED + name.replace(".", "_")


def _signal_shares() -> Tensor:
    """Return the share of signal energy at each level: the cosine schedule.

    Nichol and Dhariwal 2021, equation 17, with their offset 0.008.
    """
    place = (torch.arange(NUM_LEVELS, dtype=torch.float64) + 1) / NUM_LEVELS
    shares = torch.cos((place + 0.008) / 1.008 * math.pi / 2).square()
    return (shares / math.cos(0.008 / 1.008 * math.pi / 2) ** 2).clamp(1e-5, 1.0).float()


class Diffusion(Problem):
    """Training moves the weights; evaluations take their exponential moving average."""

    loss_unit = "squared error"
    clip = 1.0

    def __init__(self) -> None:
        digits = read_digits()
        self._images = digits.images.flatten(1) * 2 - 1
        self._others = digits.held_out_images.flatten(1) * 2 - 1
        self._shares = _signal_shares()
        self.data_sha256 = digits.sha256
        self.settings = {"version": 2, "peak_rate": 1e-2, "optimizer": "adamw", "decay": DECAY}

    def build(self) -> nn.Module:
        """Return the denoiser, its averages at the first weights."""
        return Denoiser()

    def _noised(self, images: Tensor, generator: torch.Generator) -> Batch:
        level = torch.randint(NUM_LEVELS, (len(images),), generator=generator)
        noise = torch.randn(images.shape, generator=generator)
        share = self._shares[level][:, None]
        return share.sqrt() * images + (1 - share).sqrt() * noise, level, noise

    def draw(self, generator: torch.Generator) -> Batch:
        """Return noisy images, their levels and the noise: see `Denoiser.forward`."""
        chosen = torch.randint(len(self._images), (BATCH,), generator=generator)
        return self._noised(self._images[chosen], generator)

    def held_out(self) -> list[Batch]:
        """Return 597 images, each at four levels (2,388)."""
        return [self._noised(self._others.repeat(_HELD_OUT_DRAWS, 1), seeded(4))]

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return AdamW."""
        rate = self.settings["peak_rate"]
        return AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=True)

    def prepare(self, optimizer: Optimizer, model: nn.Module, seams: Mapping[str, Seam]) -> None:
        """Average the weights after each step that is not skipped."""
        pairs = [(p, model.get_buffer(averaged_name(n))) for n, p in model.named_parameters()]
        average = seams["ema"]

        @torch.no_grad()
        def update(*_: Any) -> None:
            for parameter, averaged in pairs:
                averaged.copy_(average(averaged, parameter, DECAY))

        optimizer.register_step_post_hook(update)

    def evaluated_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the averages in the parameters' places."""
        return {n: model.get_buffer(averaged_name(n)) for n, _ in model.named_parameters()}

    def num_items(self, batch: Batch) -> int:
        """Return the noisy images."""
        return len(batch[0])
