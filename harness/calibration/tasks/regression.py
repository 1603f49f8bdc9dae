"""Regression whose loss goes near zero: a smooth function of diabetes patients' measurements."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from harness.calibration.tasks.problem import Batch, Problem
from harness.calibration.tasks.seams import Norm, Seamed
from harness.workloads.optimization import seeded

WIDTH = 64
PATH = 64
BATCH = 64
NUM_HELD_OUT_PATIENTS = 142
NUM_HELD_OUT = 2048


class PathRegressor(Seamed):
    """Takes running sums of a path's increments; three layers with a norm, mean of many terms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(PATH, WIDTH)
        self.norm = Norm(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.terms = nn.Parameter(torch.randn(WIDTH))

    def forward(self, increments: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error for FP32 `increments` (batch, 64), `targets` (batch,)."""
        seams = self.seams
        path = seams["cumulative_sum"](increments, 1)
        x = torch.relu(self.norm(self.first(path)))
        x = seams["residual"](x, torch.relu(self.second(x)))
        x = seams["residual"](x, torch.relu(self.third(x)))
        predicted = seams["pool"](x * self.terms, 1)
        loss: Tensor = seams["reduce_loss"]((predicted - targets).square())
        return loss


@lru_cache(maxsize=1)
def _patients() -> tuple[Tensor, str]:
    """Return standardized measurements, FP32 (442, 10), and their hash."""
    from sklearn.datasets import load_diabetes  # takes a second to import

    raw = torch.from_numpy(load_diabetes(scaled=False).data.copy())
    digest = hashlib.sha256(raw.numpy().astype("<f8").tobytes()).hexdigest()
    return ((raw - raw.mean(0)) / raw.std(0)).float(), digest


class Regression(Problem):
    """Inputs are mixtures of two patients, so that there are more than 442 of them.

    Each is written as the increments of a path of 64 points, whose running sums the model takes.
    """

    loss_unit = "squared error"
    warmup = 10

    def __init__(self) -> None:
        patients, self.data_sha256 = _patients()
        order = torch.randperm(len(patients), generator=seeded(1))
        self._patients = patients[order[:-NUM_HELD_OUT_PATIENTS]]
        self._others = patients[order[-NUM_HELD_OUT_PATIENTS:]]
        fixed = seeded(2)
        features = patients.shape[1]
        self._to_path = torch.randn(features, PATH, generator=fixed) / features**0.5
        self._waves = torch.randn(features, 3, generator=fixed) / features**0.5
        self.settings = {"version": 2, "peak_rate": 0.4, "optimizer": "sgd"}

    def _mixed(self, patients: Tensor, size: int, generator: torch.Generator) -> Batch:
        pair = torch.randint(len(patients), (2, size), generator=generator)
        share = torch.rand(size, 1, generator=generator)
        x = torch.lerp(patients[pair[0]], patients[pair[1]], share)
        first, second, third = (x @ self._waves).unbind(1)
        targets = torch.sin(first) + 0.3 * second * third
        return torch.diff(x @ self._to_path, dim=1, prepend=torch.zeros(size, 1)), targets

    def build(self) -> nn.Module:
        """Return the model."""
        return PathRegressor()

    def draw(self, generator: torch.Generator) -> Batch:
        """Return 64 increments and targets."""
        return self._mixed(self._patients, BATCH, generator)

    def held_out(self) -> list[Batch]:
        """Return 2,048 mixtures of patients not trained on."""
        return [self._mixed(self._others, NUM_HELD_OUT, seeded(3))]

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return SGD with momentum, matrices and the rest in two groups."""
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim <= 1]},
        ]
        # Not fused: torch 2.13's fused SGD on a CPU leaves BF16 weights where they are.
        return SGD(groups, lr=self.settings["peak_rate"], momentum=0.9, foreach=True)

    def num_items(self, batch: Batch) -> int:
        """Return the mixtures."""
        return len(batch[0])
