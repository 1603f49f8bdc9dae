"""Series kept on the device, and the detection of losses that live on a 16-bit grid."""

from __future__ import annotations

import math

import numpy as np
import torch

from harness.runs.series import SeriesBuffer, grid_of
from harness.runs.step import StepOutcome


def outcome(loss: float) -> StepOutcome:
    return StepOutcome(
        loss=torch.tensor(loss),
        grad_norm=torch.tensor(2 * loss),
        nonfinite_grad=torch.tensor(3),
        masks=torch.tensor(-(2**62)),
        learning_rate=0.1,
        loss_scale=8.0,
        skipped=True,
    )


def test_flushes_join_and_checksums_stay_whole_numbers() -> None:
    buffer = SeriesBuffer()
    for i in range(5):
        buffer.add(outcome(float(i)), batch=torch.tensor(2**62 + i))
        buffer.add_time(0.5)
        if i in (1, 2):
            buffer.flush()
    assert len(buffer.series()["loss"]) == len(buffer.series()["learning_rate"]) == 3
    assert buffer.last_loss == 2.0
    buffer.flush()
    buffer.flush()
    series = buffer.series()
    assert series["loss"] == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert series["grad_norm"] == (0.0, 2.0, 4.0, 6.0, 8.0)
    assert series["nonfinite_grad"] == (3.0,) * 5
    assert series["skipped"] == (1.0,) * 5
    assert buffer.checksums("batches") == tuple(2**62 + i for i in range(5))
    assert buffer.checksums("dropout") == (-(2**62),) * 5


def test_streak_counts_over_flushes_and_ends_at_a_finite_loss() -> None:
    buffer = SeriesBuffer()
    for loss in (math.nan, math.inf):
        buffer.add(outcome(loss), batch=torch.tensor(0))
        buffer.flush()
    assert buffer.nonfinite_streak == 2
    buffer.add(outcome(1.0), batch=torch.tensor(0))
    buffer.flush()
    assert buffer.nonfinite_streak == 0


def test_grid() -> None:
    values = np.random.default_rng(0).uniform(0.1, 3, 40).astype(np.float32)
    half = tuple(values.astype(np.float16).astype(float))
    bf16 = tuple(torch.tensor(values).bfloat16().double().tolist())
    assert grid_of(tuple(map(float, values))) is None
    assert grid_of(half) == "fp16"
    assert grid_of(bf16) == "bf16"
    assert grid_of((math.nan, *bf16)) == "bf16"
    assert grid_of((1e6 / 3, *half)) is None
    assert grid_of(bf16[:9]) is None
    assert grid_of((1.0,) * 40) is None
    assert grid_of(()) is None
