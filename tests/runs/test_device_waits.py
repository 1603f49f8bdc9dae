"""Nothing inside a step reads a value from the device, but for a loss scaler's one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_workloads import BATCH, CLASSES, FEATURES, FP32, TinyWorkload, class_batches
from torch import Tensor, nn

from harness.precision.execution import applied
from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.probes.step_probes import StepProbes
from harness.runs.crash import Position
from harness.runs.determinism import Checksum
from harness.runs.dropout import MaskRecorder
from harness.runs.series import SeriesBuffer
from harness.runs.settings import ProbeSettings
from harness.runs.step import TrainingStep
from harness.workloads.batches import iter_tensors

STEPS = 10
EVERY_STEP = ProbeSettings(
    exponents_every=1, weight_gradients_every=1, norms_every=1, lost_updates_every=1
)
# A device that holds no values: whoever reads one raises, and so does mixing it with the CPU. Code
# that asks whether the device is a CPU takes the branch for a GPU.
META = torch.device("meta")


def mlp(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 24, device=device, dtype=dtype),
        nn.ReLU(),
        nn.Linear(24, CLASSES, device=device, dtype=dtype),
    )


def ten_steps(model: nn.Module, batches: list[Any], *, policy: PrecisionPolicy) -> SeriesBuffer:
    """Do what the trainer does between two flushes, every step observed."""
    device = next(model.parameters()).device
    workload, masks, series = TinyWorkload(clip=0.1), MaskRecorder(device), SeriesBuffer()
    probes = StepProbes(EVERY_STEP.chosen(STEPS), num_steps=STEPS)
    optimizer = workload.make_optimizer(model)
    with applied(policy, model, device=device) as execution:
        step = TrainingStep(
            workload,
            model,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.LinearLR(optimizer),
            policy=policy,
            execution=execution,
            masks=masks,
            seed=0,
            position=Position(),
        )
        probes.attach(model, optimizer, step.parameters)
        for index, batch in enumerate(batches):
            checksum = Checksum(masks.weights)
            for tensor in iter_tensors(batch):
                checksum.add(tensor)
            series.add(step.run(batch, step=index, observer=probes), batch=checksum.value())
    return series


def meta_batches(dtype: torch.dtype) -> list[Any]:
    x = torch.empty(BATCH, FEATURES, device=META, dtype=dtype)
    return [(x, torch.empty(BATCH, dtype=torch.int64, device=META))] * STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ten_steps_read_nothing_from_the_device(dtype: torch.dtype) -> None:
    model, batches = mlp(META, dtype), meta_batches(dtype)
    series = ten_steps(model, batches, policy=FP32)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        series.flush()  # the detector works: this one does read


def test_a_read_inside_a_step_would_be_noticed() -> None:
    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    model = nn.Sequential(mlp(META), Reading())
    with pytest.raises(RuntimeError, match="meta"):
        ten_steps(model, meta_batches(torch.float32), policy=FP32)


def test_the_lengths_of_a_packed_sequence_stay_on_the_cpu_and_are_fingerprinted() -> None:
    data = torch.empty(5, FEATURES, device=META)
    batch = torch.nn.utils.rnn.PackedSequence(data, torch.tensor([2, 2, 1]))
    checksum = Checksum(MaskRecorder(META).weights)
    for tensor in iter_tensors(batch):
        checksum.add(tensor)
    assert checksum.value().device == META


def reads(policy: PrecisionPolicy) -> int:
    torch.manual_seed(0)
    model, batches = mlp(torch.device("cpu")), list(class_batches(0, STEPS))
    # Not with a dispatch mode: probes put those aside.
    with torch.autograd.profiler.profile() as profile:
        ten_steps(model, batches, policy=policy)
    return sum(event.name == "aten::_local_scalar_dense" for event in profile.function_events)


def test_a_loss_scaler_reads_once_per_step() -> None:
    scaled = PrecisionPolicy(
        name="scaled", loss_scale=LossScaleSettings(kind="dynamic", init_scale=8.0)
    )
    # On a CPU, where it waits for nothing, clipping and counting read the norm too: in both.
    assert reads(scaled) - reads(FP32) == STEPS
