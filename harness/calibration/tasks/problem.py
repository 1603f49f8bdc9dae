"""What one task is made of: data, model, optimizer; `Task` makes a workload of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.calibration.tasks import schedules
from harness.calibration.tasks.seams import Seam

Batch = tuple[Tensor, ...]


class Problem(ABC):
    """One task; made once per process, since it holds the data.

    A model is called with the tensors of a batch and returns the scalar loss.

    Attributes:
        loss_unit: Of the loss.
        steps: Length of a run.
        clip: Largest global gradient norm, or None.
        warmup: Steps of the learning rate's rise.
        can_shard: Whether a batch may be computed in parts. Not where parts would see other batch
            statistics or dropout masks than the whole.
        data_sha256: Hash of the data.
        settings: What identifies the task, plain data; a change of what it computes is one of
            `version`.
    """

    loss_unit: ClassVar[str] = "nats"
    steps: ClassVar[int] = 300
    clip: ClassVar[float | None] = None
    warmup: ClassVar[int] = 20
    can_shard: ClassVar[bool] = True
    data_sha256: str
    settings: dict[str, Any]

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the model, its weights drawn from torch's global generator."""

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Batch:
        """Return one training batch; items along the first dimension of every tensor."""

    @abstractmethod
    def held_out(self) -> list[Batch]:
        """Return the held-out batches."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer at its peak rate."""

    @abstractmethod
    def num_items(self, batch: Batch) -> int:
        """Return how many items a batch predicts."""

    def rate(self, step: int, steps: int) -> float:
        """Return the share of the peak learning rate at a batch."""
        return schedules.cosine(step, steps, warmup=self.warmup)

    def parts(self, batch: Batch, shards: int) -> list[Batch]:
        """Return the batch in equal parts.

        Raises:
            ValueError: The items cannot be divided so.
        """
        if len(batch[0]) % shards:
            raise ValueError(f"a batch of {len(batch[0])} cannot be divided into {shards} shards")
        return list(zip(*(tensor.chunk(shards) for tensor in batch), strict=True))

    def prepare(self, optimizer: Optimizer, model: nn.Module, seams: Mapping[str, Seam]) -> None:
        """Add what the task itself does after each step; nothing by default."""
        del optimizer, model, seams

    def evaluated_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that stand for parameters in evaluations; none by default."""
        del model
        return {}


def sinusoids(place: Tensor, *, width: int, shortest: float, longest: float) -> Tensor:
    """Return sines and cosines of a float place: its shape with `width` appended.

    Periods run geometrically from `shortest` to `longest` (the scheme of Vaswani et al. 2017, with
    the periods given).
    """
    half = width // 2
    exponent = torch.arange(half, device=place.device, dtype=torch.float32) / max(1, half - 1)
    frequency = (2 * math.pi / shortest) * torch.pow(shortest / longest, exponent)
    angle = place.float()[..., None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
