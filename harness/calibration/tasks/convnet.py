"""Convolutional net with BatchNorm and dropout on handwritten digits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from harness.calibration.tasks.digits import drawn, read_digits, shifted
from harness.calibration.tasks.problem import Batch, Problem
from harness.calibration.tasks.seams import Seamed

CHANNELS = (8, 16)
BATCH = 32
LABEL_SMOOTHING = 0.1
MOMENTUM = 0.1
NUM_CLASSES = 10
_EPS = 1e-5
# Of the nine shifts: enough for 2,048 items, and no more time than that takes.
_HELD_OUT_SHIFTS = (0, 2, 4, 8)


class BatchNorm(Seamed):
    """Batch normalization through seams (Ioffe and Szegedy 2015), statistics over the batch."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (batch, channels, height, width) normalized per channel."""
        if self.training:
            mean, var = self.seams["batch_statistics"](x)
            self._average(mean.detach(), var.detach(), count=x.numel() // x.shape[1])
        else:
            mean, var = self.running_mean, self.running_var
        factor = (var + _EPS).rsqrt() * self.weight
        shift = self.bias - mean * factor
        return torch.addcmul(shift[:, None, None], x, factor[:, None, None])

    @torch.no_grad()
    def _average(self, mean: Tensor, var: Tensor, *, count: int) -> None:
        average = self.seams["running_statistics"]
        unbiased = var * (count / (count - 1))
        self.running_mean.copy_(average(self.running_mean, mean, MOMENTUM))
        self.running_var.copy_(average(self.running_var, unbiased, MOMENTUM))


class ConvNet(Seamed):
    """Two 3 x 3 convolutions with BatchNorm, the mean over space, dropout, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        first, second = CHANNELS
        self.conv1 = nn.Conv2d(1, first, 3, padding=1, bias=False)
        self.norm1 = BatchNorm(first)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1, bias=False)
        self.norm2 = BatchNorm(second)
        self.hidden = nn.Linear(4 * second, 32)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, NUM_CLASSES)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the loss for FP32 `images` (batch, 1, 8, 8) and target shares (batch, 10)."""
        seams = self.seams
        x = F.max_pool2d(torch.relu(self.norm1(self.conv1(images))), 2)
        x = torch.relu(self.norm2(self.conv2(x)))
        corners = x.view(len(x), -1, 2, 2, 2, 2).transpose(3, 4).flatten(4)  # 4 of 2 x 2 each
        features = seams["pool"](corners, -1).flatten(1)
        h = self.dropout(torch.relu(self.hidden(features)))
        scores = seams["logits"](h, self.head.weight) + self.head.bias
        loss: Tensor = seams["reduce_loss"](seams["token_losses"](scores, targets))
        return loss


class ConvNetOnDigits(Problem):
    """Digits in random shifts by a pixel, against smoothed targets."""

    clip = 1.0
    can_shard = False

    def __init__(self) -> None:
        digits = read_digits()
        self._train = shifted(digits.images)[:, :, None], digits.labels
        images = shifted(digits.held_out_images)[list(_HELD_OUT_SHIFTS), :, None].flatten(0, 1)
        self._held_out = images, digits.held_out_labels.repeat(len(_HELD_OUT_SHIFTS))
        smooth = LABEL_SMOOTHING / NUM_CLASSES
        self._shares = torch.eye(NUM_CLASSES) * (1 - LABEL_SMOOTHING) + smooth
        self.data_sha256 = digits.sha256
        self.settings = {"version": 2, "peak_rate": 3e-3, "optimizer": "adamw"}

    def build(self) -> nn.Module:
        """Return the net."""
        return ConvNet()

    def draw(self, generator: torch.Generator) -> Batch:
        """Return 32 images and their target shares."""
        images, labels = drawn(*self._train, size=BATCH, generator=generator)
        return images, self._shares[labels]

    def held_out(self) -> list[Batch]:
        """Return 597 images in four shifts (2,388)."""
        images, labels = self._held_out
        return [(images, self._shares[labels])]

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return AdamW."""
        rate = self.settings["peak_rate"]
        return AdamW(model.parameters(), lr=rate, weight_decay=0.05, fused=True)

    def num_items(self, batch: Batch) -> int:
        """Return the images."""
        return len(batch[0])
