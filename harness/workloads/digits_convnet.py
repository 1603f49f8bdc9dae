"""Convolutional net with BatchNorm on scikit-learn's 8 x 8 handwritten digits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from harness.workloads.optimization import make_adamw, make_warmup_cosine, seeded
from harness.workloads.settings import DigitsConvnetSettings

NUM_CLASSES = 10
NUM_HELD_OUT = 597
_SPLIT_SEED = 0
_SIDE = 8
_HELD_OUT_BATCH = 1024


class DigitsConvnet(nn.Module):
    """Three 3 x 3 convolutions (16, 32, 32 channels) with BatchNorm, then two linear layers."""

    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(32)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(32)
        self.hidden = nn.Linear(32 * (_SIDE // 4) ** 2, 128)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(128, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10) for FP32 `images` (batch, 1, 8, 8)."""
        x = F.relu(self.norm1(self.conv1(images)))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.max_pool2d(F.relu(self.norm3(self.conv3(x))), 2)
        x = F.relu(self.hidden(x.flatten(1)))
        return self.head(self.dropout(x))  # type: ignore[no-any-return]


class DigitsConvnetWorkload:
    """The digits classifier as a `Workload`; a batch is a pair (images, digits).

    Every image is shifted by up to one pixel each way and the targets are smoothed: without them
    the training loss runs to zero, where two percent of it is smaller than the luck of a seed.
    """

    loss_unit = "nats"

    def __init__(self, settings: DigitsConvnetSettings) -> None:
        self._settings = settings
        images, labels, self.data_sha256 = _load_digits()
        order = torch.randperm(len(images), generator=seeded(_SPLIT_SEED))
        train, held_out = order[:-NUM_HELD_OUT], order[-NUM_HELD_OUT:]
        self._train = _shifted(images[train]), labels[train]
        self._held_out = _shifted(images[held_out]), labels[held_out]
        self.name = settings.name or settings.kind
        self.clip = settings.clip
        self.default_steps = settings.steps
        self.description = settings.description or (
            "Convolutional net with BatchNorm on 8 x 8 handwritten digits, shifted by one pixel"
        )
        self.settings: dict[str, Any] = {
            **settings.recorded(),
            "name": self.name,
            "loss_unit": self.loss_unit,
        }

    def build_model(self, seed: int) -> nn.Module:
        """Return the model; the global generators are left as they were."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return DigitsConvnet(dropout=self._settings.dropout)

    def batches(self, seed: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield random images, each shifted at random: FP32 (batch_size, 1, 8, 8), int64."""
        generator = seeded(seed)
        shifted, labels = self._train
        size = self._settings.batch_size
        for _ in range(steps):
            chosen = torch.randint(len(labels), (size,), generator=generator)
            shift = torch.randint(len(shifted), (size,), generator=generator)
            yield shifted[shift, chosen], labels[chosen]

    def loss_fn(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy against smoothed targets, in nats."""
        images, labels = batch
        return F.cross_entropy(
            model(images), labels, label_smoothing=self._settings.label_smoothing
        )

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Return AdamW."""
        return make_adamw(model, self._settings)

    def make_scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """Return warm-up and cosine decay over `steps`."""
        return make_warmup_cosine(optimizer, steps=steps, settings=self._settings)

    def held_out(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Return 597 images in all 9 shifts (5,373 examples), the same for every seed."""
        del seed
        shifted, labels = self._held_out
        images, repeated = shifted.flatten(0, 1), labels.repeat(len(shifted))
        places = range(0, len(repeated), _HELD_OUT_BATCH)
        return [
            (images[k : k + _HELD_OUT_BATCH], repeated[k : k + _HELD_OUT_BATCH]) for k in places
        ]

    def eval_fn(self, model: nn.Module) -> None:
        """Return None: the held-out loss is the figure."""

    def num_items(self, batch: tuple[Tensor, Tensor]) -> int:
        """Return the images in the batch."""
        return len(batch[1])

    def num_tokens(self, batch: tuple[Tensor, Tensor]) -> None:
        """Return None: images have no tokens."""


def _load_digits() -> tuple[Tensor, Tensor, str]:
    """Return images in [0, 1] (1797, 1, 8, 8), labels, and the hash of both arrays."""
    from sklearn.datasets import load_digits  # takes a second to import

    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16  # 17 grey levels, exact in FP32
    labels = torch.from_numpy(digits.target).long()
    content = images.numpy().astype("<f4").tobytes() + labels.numpy().astype("<i8").tobytes()
    return images, labels, hashlib.sha256(content).hexdigest()


def _shifted(images: Tensor) -> Tensor:
    """Return all nine shifts by -1, 0, 1 pixels, zeros moving in: (9, count, 1, 8, 8)."""
    padded = F.pad(images, (1, 1, 1, 1))
    return torch.stack(
        [
            padded[..., down : down + _SIDE, right : right + _SIDE]
            for down in range(3)
            for right in range(3)
        ]
    )
