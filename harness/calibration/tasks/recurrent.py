"""Gated recurrent net that reads handwritten digits row by row."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from harness.calibration.tasks import schedules
from harness.calibration.tasks.digits import SIDE, drawn, read_digits, shifted
from harness.calibration.tasks.problem import Batch, Problem
from harness.calibration.tasks.seams import Seamed

WIDTH = 32
BATCH = 32
NUM_CLASSES = 10
_HELD_OUT_SHIFTS = (0, 2, 4, 8)


class Gated(Seamed):
    """Minimal gated unit (Zhou et al. 2016), its gate a sigmoid written as 1 / (1 + exp(-x))."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(SIDE, 2 * WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.candidate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss for FP32 `images` (batch, 8, 8), read from the top."""
        seams = self.seams
        entering = self.enter(images)
        h = images.new_zeros(len(images), WIDTH)
        states = []
        for row in entering.unbind(1):
            to_gate, to_candidate = row.chunk(2, dim=1)
            gate = 1 / (1 + seams["exp"](-(to_gate + self.gate(h))))
            candidate = torch.tanh(to_candidate + self.candidate(gate * h))
            h = seams["residual"](h, gate * (candidate - h))
            states.append(h)
        h = seams["pool"](torch.stack(states[SIDE // 2 :]), 0)
        scores = seams["logits"](h, self.head.weight) + self.head.bias
        loss: Tensor = seams["reduce_loss"](seams["token_losses"](scores, labels))
        return loss


class Recurrent(Problem):
    """Digits in random shifts by a pixel."""

    clip = 1.0

    def __init__(self) -> None:
        digits = read_digits()
        self._train = shifted(digits.images), digits.labels
        images = shifted(digits.held_out_images)[list(_HELD_OUT_SHIFTS)]
        self._held_out = images.flatten(0, 1), digits.held_out_labels.repeat(len(images))
        self.data_sha256 = digits.sha256
        self.settings = {"version": 2, "peak_rate": 3e-2, "optimizer": "adam"}

    def build(self) -> nn.Module:
        """Return the net."""
        return Gated()

    def draw(self, generator: torch.Generator) -> Batch:
        """Return 32 images and their digits."""
        return drawn(*self._train, size=BATCH, generator=generator)

    def held_out(self) -> list[Batch]:
        """Return 597 images in four shifts (2,388)."""
        return [self._held_out]

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return Adam."""
        return Adam(model.parameters(), lr=self.settings["peak_rate"], fused=True)

    def rate(self, step: int, steps: int) -> float:
        """Return the share of the peak learning rate: a straight line to zero."""
        return schedules.linear(step, steps, warmup=self.warmup)

    def num_items(self, batch: Batch) -> int:
        """Return the images."""
        return len(batch[0])
