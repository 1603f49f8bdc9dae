"""Scikit-learn's handwritten digits, split once, for several tasks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.workloads.optimization import seeded

SIDE = 8
NUM_HELD_OUT = 597


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Images in [0, 1], FP32 (count, 8, 8), and digits, int64, of both parts.

    Attributes:
        images: For training, 1,200.
        labels: Of them.
        held_out_images: 597.
        held_out_labels: Of them.
        sha256: Hash of all.
    """

    images: Tensor
    labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor
    sha256: str


@lru_cache(maxsize=1)
def read_digits() -> Digits:
    """Return the digits; read once per process."""
    from sklearn.datasets import load_digits  # takes a second to import

    raw = load_digits()
    images = torch.from_numpy(raw.images).float() / 16  # 17 grey levels, exact in FP32
    labels = torch.from_numpy(raw.target).long()
    content = images.numpy().astype("<f4").tobytes() + labels.numpy().astype("<i8").tobytes()
    order = torch.randperm(len(images), generator=seeded(0))
    train, held_out = order[:-NUM_HELD_OUT], order[-NUM_HELD_OUT:]
    return Digits(
        images=images[train],
        labels=labels[train],
        held_out_images=images[held_out],
        held_out_labels=labels[held_out],
        sha256=hashlib.sha256(content).hexdigest(),
    )


def shifted(images: Tensor) -> Tensor:
    """Return all nine shifts by -1, 0, 1 pixels, zeros moving in: (9, count, 8, 8)."""
    padded = F.pad(images, (1, 1, 1, 1))
    return torch.stack(
        [
            padded[..., down : down + SIDE, right : right + SIDE]
            for down in range(3)
            for right in range(3)
        ]
    )


def drawn(
    shifts: Tensor, labels: Tensor, *, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return `size` random images, each in a random shift, and their digits."""
    chosen = torch.randint(len(labels), (size,), generator=generator)
    shift = torch.randint(len(shifts), (size,), generator=generator)
    return shifts[shift, chosen], labels[chosen]
