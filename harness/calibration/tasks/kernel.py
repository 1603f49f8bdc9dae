"""Kernel ridge regression in a learned embedding: digits told from a few labelled ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from harness.calibration.tasks.digits import SIDE, read_digits
from harness.calibration.tasks.problem import Batch, Problem
from harness.calibration.tasks.seams import Seamed

SUPPORT = 32
QUERIES = 32
WIDTH = 48
EMBEDDED = 8
RIDGE = 0.05
NUM_CLASSES = 10
_HELD_OUT_SUPPORTS = 4


class KernelRidge(Seamed):
    """Embeds support and queries, solves for the support's weights, predicts the queries.

    K = exp(-|z_i - z_j|^2 / 2), alpha = (K + ridge I)^-1 y, prediction K_q alpha (Saunders et al.
    1998).
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(SIDE**2, WIDTH)
        self.out = nn.Linear(WIDTH, EMBEDDED)

    def embed(self, images: Tensor) -> Tensor:
        """Return embeddings (n, 8) of FP32 `images` (n, 64)."""
        return self.out(torch.tanh(self.hidden(images)))  # type: ignore[no-any-return]

    def forward(self, queries: Tensor, targets: Tensor, known: Tensor, values: Tensor) -> Tensor:
        """Return the mean over queries of the squared error summed over classes.

        Args:
            queries: FP32 (q, 64).
            targets: Their centred class indicators (q, 10).
            known: Support images (s, 64).
            values: Their indicators (s, 10).
        """
        seams = self.seams
        z = self.embed(torch.cat([known, queries]))
        support = z[: len(known)]
        kernel = seams["exp"](-0.5 * seams["pairwise_distance"](z, support))
        matrix = kernel[: len(known)] + RIDGE * torch.eye(len(known), device=kernel.device)
        weights = seams["solve"](matrix, values)
        predicted = (kernel[len(known) :, :, None] * weights).sum(1)
        loss: Tensor = seams["reduce_loss"]((predicted - targets).square().sum(1))
        return loss


class KernelOnDigits(Problem):
    """Every batch is 32 labelled digits and 32 to be told from them."""

    loss_unit = "squared error"

    def __init__(self) -> None:
        digits = read_digits()
        indicators = torch.eye(NUM_CLASSES) - 1 / NUM_CLASSES
        self._images, self._values = digits.images.flatten(1), indicators[digits.labels]
        self._held_out = digits.held_out_images.flatten(1), indicators[digits.held_out_labels]
        self.data_sha256 = digits.sha256
        self.settings = {"version": 2, "peak_rate": 5e-3, "optimizer": "adam"}

    def build(self) -> nn.Module:
        """Return the embedding."""
        return KernelRidge()

    def draw(self, generator: torch.Generator) -> Batch:
        """Return queries and support: see `KernelRidge.forward`."""
        chosen = torch.randperm(len(self._images), generator=generator)[: SUPPORT + QUERIES]
        images, values = self._images[chosen], self._values[chosen]
        return images[SUPPORT:], values[SUPPORT:], images[:SUPPORT], values[:SUPPORT]

    def held_out(self) -> list[Batch]:
        """Return 597 held-out queries for each of four supports of the training images (2,388)."""
        batches: list[Batch] = []
        for k in range(_HELD_OUT_SUPPORTS):
            own = slice(k * SUPPORT, (k + 1) * SUPPORT)
            batches.append((*self._held_out, self._images[own], self._values[own]))
        return batches

    def parts(self, batch: Batch, shards: int) -> list[Batch]:
        """Return the queries in equal parts, each with the whole support."""
        queries, targets, known, values = batch
        return [(*part, known, values) for part in super().parts((queries, targets), shards)]

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return Adam."""
        return Adam(model.parameters(), lr=self.settings["peak_rate"], fused=True)

    def num_items(self, batch: Batch) -> int:
        """Return the queries."""
        return len(batch[0])
