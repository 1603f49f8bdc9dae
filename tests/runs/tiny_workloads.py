"""Workloads of a few hundred weights for tests of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.trainer import RunSettings, train

FEATURES, CLASSES, BATCH = 12, 4, 16


def dropout_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 24), nn.ReLU(), nn.Dropout(0.25), nn.Linear(24, CLASSES)
    )


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def class_batches(seed: int, steps: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(CLASSES, FEATURES, generator=generator)
    for _ in range(steps):
        y = torch.randint(CLASSES, (BATCH,), generator=generator)
        yield centers[y] + 0.5 * torch.randn(BATCH, FEATURES, generator=generator), y


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@dataclass
class TinyWorkload:
    """A workload of given parts; by default an MLP with dropout on four noisy classes."""

    model: Callable[[], nn.Module] = dropout_mlp
    loss: Callable[[nn.Module, Any], Tensor] = cross_entropy
    data: Callable[[int, int], Iterator[Any]] = class_batches
    optimizer: Callable[[nn.Module], Optimizer] = adamw
    scheduler: Callable[[Optimizer, int], Any] | None = None
    evaluation: Callable[[nn.Module], float] | None = None
    held_out_batches: int = 2
    clip: float | None = 1.0
    name: str = "tiny"
    default_steps: int = 10
    data_sha256: str = "0" * 64
    description: str = "a test"
    loss_unit: str = "nats"
    settings: dict[str, Any] = field(default_factory=dict)

    def build_model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.model()

    def batches(self, seed: int, steps: int) -> Iterator[Any]:
        return self.data(seed, steps)

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss(model, batch)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        return self.optimizer(model)

    def make_scheduler(self, optimizer: Optimizer, steps: int) -> Any:
        return None if self.scheduler is None else self.scheduler(optimizer, steps)

    def held_out(self, seed: int) -> list[Any] | None:
        del seed
        return list(self.data(999, self.held_out_batches)) if self.held_out_batches else None

    def eval_fn(self, model: nn.Module) -> float | None:
        return None if self.evaluation is None else self.evaluation(model)

    def num_items(self, batch: Any) -> int | None:
        return len(batch[0])

    def num_tokens(self, batch: Any) -> int | None:
        return None


FP32 = PrecisionPolicy(name="fp32")
TWIN = PrecisionPolicy(name="fp32_twin", perturbation=2.0**-8)
TF32 = PrecisionPolicy(name="tf32", compute_format="tf32")
BF16 = PrecisionPolicy(name="bf16", compute_format="bf16")
FP16 = PrecisionPolicy(
    name="fp16", compute_format="fp16", loss_scale=LossScaleSettings(kind="dynamic")
)
BF16_PURE = PrecisionPolicy(
    name="bf16_pure", compute_format="bf16", param_format="bf16", low_precision_ops=("all",)
)
POLICIES = (FP32, TWIN, TF32, BF16, FP16, BF16_PURE)


def settings(steps: int = 10, **values: Any) -> RunSettings:
    return RunSettings(
        steps=steps, seed=values.pop("seed", 0), device="cpu", num_threads=1, **values
    )


def run(
    workload: TinyWorkload | None = None,
    policy: PrecisionPolicy = FP32,
    steps: int = 10,
    **values: Any,
) -> RunRecord:
    """Train and return the record; fails on a crash unless `crash_expected`."""
    crash_expected = values.pop("crash_expected", False)
    record = train(
        workload or TinyWorkload(),
        policy,
        settings(steps, **values),
        run_key="key",
        environment={"device_kind": "cpu"},
    )
    if not crash_expected:
        assert record.crash is None, record.crash.traceback
    return record


def numbers(record: RunRecord) -> dict[str, Any]:
    """Return everything of a record that must be bitwise equal between two equal runs."""
    series = {k: v for k, v in record.series.items() if k != "step_time_s"}
    return {
        "series": series,
        "fingerprints": record.fingerprints,
        "held_out": record.held_out,
        "final": record.final,
        "sampled": record.sampled,
        "histograms": record.histograms,
    }
