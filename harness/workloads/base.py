"""The workload protocol: model, data, loss and optimizer, knowing nothing of precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Workload(Protocol):
    """What the trainer needs of a model; the built-in ones and a user's file both become this.

    Attributes:
        name: Model name in reports and experiments.
        clip: Largest global gradient norm, or None for no clipping.
        default_steps: Steps when the command line gives none.
        data_sha256: Hash of the corpus, data set or workload file; part of every run's identity.
        description: One line for the report.
        loss_unit: Unit of the loss, e.g. `nats`.
        settings: Resolved settings, plain data.
    """

    name: str
    clip: float | None
    default_steps: int
    data_sha256: str
    description: str
    loss_unit: str
    settings: dict[str, Any]

    def build_model(self, seed: int) -> nn.Module:
        """Return the model with its FP32 initial weights, determined by `seed`, on the CPU."""
        ...

    def batches(self, seed: int, steps: int) -> Iterator[Any]:
        """Yield `steps` batches on the CPU: a tensor, or nested tuples, lists, dicts of them."""
        ...

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the scalar training loss."""
        ...

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer; called after a policy cast the weights."""
        ...

    def make_scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """Return the learning-rate schedule, stepped once per batch, or None."""
        ...

    def held_out(self, seed: int) -> list[Any] | None:
        """Return the held-out batches, or None if the workload has none."""
        ...

    def eval_fn(self, model: nn.Module) -> float | None:
        """Return the workload's own held-out figure (lower is better), or None if it has none."""
        ...

    def num_items(self, batch: Any) -> int | None:
        """Return how many items a batch predicts (tokens for a language model, else examples)."""
        ...

    def num_tokens(self, batch: Any) -> int | None:
        """Return the tokens in a batch, or None for a workload without tokens."""
        ...
