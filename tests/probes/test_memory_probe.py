"""Memory breakdown against sizes worked out by hand, for several optimizers and odd models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.probes.base import NamedTensor
from harness.probes.memory import MemoryProbe, largest_part, storage_bytes, tensors_of
from harness.runs.settings import ProbeSettings, RunSettings
from harness.runs.trainer import train
from harness.workloads.registry import make_workload

PARAMETERS = 6 * 8 + 8 + 8 * 3 + 3
BATCH = 10


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def stock(
    model: nn.Module,
    make: Callable[[Any], Optimizer],
    *,
    loss: Callable[[nn.Module], Tensor] = lambda m: m(torch.ones(BATCH, 6)).square().mean(),
    loss_scale: float = 1.0,
    steps: int = 2,
) -> dict[str, Any]:
    optimizer = make(model.parameters())
    probe = MemoryProbe(num_steps=steps)
    probe.attach(model, optimizer)
    for step in range(steps):
        if probe.due(step):
            probe.start(step, loss_scale=loss_scale)
            with probe.around_forward():
                value = loss(model)
        else:
            value = loss(model)
        value.backward()
        if probe.due(step):
            probe.gradients([named(p.grad) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        if probe.due(step):
            probe.after_update([named(p.detach()) for p in model.parameters()], skipped=False)
        optimizer.zero_grad()
    return probe.result()


def named(value: Tensor) -> NamedTensor:
    return NamedTensor(module="m", name="w", value=value)


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4 * PARAMETERS),
        # Two moments, and an FP32 step count for each of four tensors.
        (lambda p: torch.optim.AdamW(p, lr=0.1), 8 * PARAMETERS + 16),
        # Factored: of a matrix the means of rows and of columns; of a vector all of it.
        (lambda p: torch.optim.Adafactor(p, lr=0.1), 4 * ((8 + 6) + 8 + (3 + 8) + 3) + 16),
        (lambda p: torch.optim.RMSprop(p, lr=0.1), 4 * PARAMETERS + 16),
    ],
)
def test_weights_gradients_and_state(make: Callable[[Any], Optimizer], state: int) -> None:
    found = stock(mlp(), make)
    assert found["step"] == 1
    assert found["weights"] == found["gradients"] == 4 * PARAMETERS
    assert found["optimizer_state"] == state
    assert found["loss_scaler"] == found["low_precision_copies"] == 0
    assert found["total"] == sum(
        found[part] for part in ("weights", "gradients", "optimizer_state", "activations")
    )
    assert set(found) == set(MemoryProbe.metrics) | {"step", "largest"}


def test_activations_are_what_outlives_the_forward_pass() -> None:
    """Kept: input, rectified hidden layer (what came before it is not), output, and the loss."""
    found = stock(mlp(), lambda p: torch.optim.SGD(p, lr=0.1))
    assert found["activations"] == 4 * (BATCH * (6 + 8 + 3) + 1)


def test_checkpointed_activations_are_not_kept() -> None:
    model = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def loss(again: bool) -> Callable[[nn.Module], Tensor]:
        def inner(x: Tensor) -> Tensor:
            for layer in model:
                x = layer(x).tanh()
            return x

        def outer(_: nn.Module) -> Tensor:
            x = torch.ones(BATCH, 6, requires_grad=True)
            return (checkpoint(inner, x, use_reentrant=False) if again else inner(x)).sum()

        return outer

    kept, recomputed = (
        stock(model, lambda p: torch.optim.SGD(p, lr=0.1), loss=loss(again))["activations"]
        for again in (False, True)
    )
    # A tanh keeps its output: the first layer's is given up.
    assert kept - recomputed >= BATCH * 6 * 4


def test_functional_transforms_are_left_alone() -> None:
    """Hooks on saved tensors would raise in here."""

    def loss(model: nn.Module) -> Tensor:
        gradient = torch.func.grad(lambda x: model(x).square().sum())(torch.ones(6))
        return model(gradient).sum()

    found = stock(mlp(), lambda p: torch.optim.SGD(p, lr=0.1), loss=loss)
    assert found["activations"] > 0


def test_autocast_copies_are_told_apart() -> None:
    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(torch.ones(BATCH, 6)).float().square().mean()

    found = stock(mlp(), lambda p: torch.optim.SGD(p, lr=0.1), loss=loss, loss_scale=8.0)
    # The second layer's weight, for the gradient of its input; the first one's input needs none,
    # and biases are never needed again: those copies went with autocast's cache.
    assert found["low_precision_copies"] == 2 * 24
    assert found["loss_scaler"] == 8


def test_tied_weights_and_buffers() -> None:
    model = nn.Sequential(
        nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False)
    )
    model[2].weight = model[0].weight
    found = stock(model, lambda p: torch.optim.SGD(p, lr=0.1))
    # One matrix, weight and bias of the norm, two statistics, and an int64 counter.
    assert found["weights"] == 4 * (36 + 12 + 12) + 8
    assert found["gradients"] == 4 * (36 + 12)


def test_one_step_and_none() -> None:
    assert stock(mlp(), lambda p: torch.optim.SGD(p, lr=0.1), steps=1)["step"] == 0
    probe = MemoryProbe(num_steps=5)
    probe.start(1, loss_scale=1.0)
    assert probe.result() == {}


def test_state_of_any_nesting() -> None:
    a, b = torch.zeros(3), torch.zeros(2, dtype=torch.float64)
    nested = {"x": [a, {"y": (b, 7)}], "z": None, "view": a[:1]}
    assert storage_bytes(tensors_of(nested)) == 3 * 4 + 2 * 8
    sparse = torch.sparse_coo_tensor([[1]], [2.0], (5,), check_invariants=True)
    assert storage_bytes([sparse]) == 4 + 8


def test_sentence_names_the_largest_part() -> None:
    parts = {"weights": 2**20, "gradients": 2**20, "optimizer_state": 3 * 2**20}
    assert largest_part(parts, optimizer="Adam") == "Adam's state is 60 % of 5.0 MiB"
    assert "activations" in largest_part({**parts, "activations": 2**30}, optimizer="Adam")
    assert largest_part({"weights": 0}, optimizer="Adam") == "nothing was held"


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_training_with_it_is_bitwise_the_training_without(policy: str) -> None:
    workload = make_workload({"kind": "digits_convnet", "name": "small"})
    scaling = LossScaleSettings(kind="dynamic") if policy == "fp16" else LossScaleSettings()
    only_memory = ProbeSettings(
        exponents_every=None,
        weight_gradients_every=None,
        norms_every=None,
        lost_updates_every=None,
        memory=True,
    )
    watched, plain = (
        train(
            workload,
            PrecisionPolicy(name=policy, compute_format=policy, loss_scale=scaling),
            RunSettings(steps=3, seed=0, device="cpu", num_threads=1, probes=probes),
            run_key="key",
            environment={},
        )
        for probes in (only_memory, ProbeSettings.off())
    )
    assert watched.crash is None, watched.crash.traceback
    assert watched.series["loss"] == plain.series["loss"]
    assert watched.series["grad_norm"] == plain.series["grad_norm"]
    assert watched.final == plain.final
    found = watched.probes["memory"]
    assert found["step"] == 1
    assert found["optimizer_state"] > 2 * found["gradients"] * (policy == "fp32")
    assert found["activations"] > 0
