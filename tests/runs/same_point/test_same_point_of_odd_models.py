"""Models and optimizers that the same-point probe must leave alone, measure, or say why not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_same_point_probe import Ratios, probe, row
from tiny_workloads import BF16, BF16_PURE, CLASSES, FEATURES, TF32, TinyWorkload, cross_entropy
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from harness.runs.same_point.state_now import optimizers_within


class Recursive(nn.Module):
    """Calls itself, so that its inner call returns first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return x if depth == 0 else 4.0 * self(torch.tanh(self.layer(x)), depth - 1)


def test_a_module_that_calls_itself_is_compared_with_its_own_output() -> None:
    model = TinyWorkload(model=lambda: nn.Sequential(Recursive(), nn.Linear(FEATURES, CLASSES)))
    found = row(probe(model, BF16)["bf16"], "0")
    assert 0 < found.local_forward_error < 0.02  # a few BF16 roundings of 2^-8


class Frozen(nn.Module):
    """Computes a part in inference mode and hands FP8 on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(FEATURES, FEATURES)
        self.narrow = _Narrow()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            hidden = self.narrow(self.table(x))
        return self.head(hidden.clone().float())


class _Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float8_e4m3fn)


def test_inference_tensors_and_fp8_outputs_are_measured() -> None:
    found = probe(TinyWorkload(model=Frozen), BF16)["bf16"]
    assert found.failed is None
    assert row(found, "narrow").local_output_max > 0
    assert 0 < row(found, "table").local_forward_error < 0.02


def calls_backward(model: nn.Module, batch: Any) -> Tensor:
    if torch.is_grad_enabled():
        cross_entropy(model, (0.5 * batch[0], batch[1])).backward()
    return cross_entropy(model, batch)


def test_a_loss_that_calls_backward_leaves_no_gradient_behind() -> None:
    found = probe(TinyWorkload(loss=calls_backward), BF16_PURE, BF16)
    for record in found.values():
        assert record.failed is None, record.failed
        assert record.same_trajectory
    assert Ratios.of(found["bf16"]).nu < 0.01


class Outside(nn.Module):
    """Shares a parameter with its optimizer that is none of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.outside = [torch.zeros(CLASSES, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.outside[0]


def with_outside(model: Any) -> Optimizer:
    return SGD([*model.parameters(), *model.outside], lr=0.1)


def test_a_parameter_outside_the_model_is_put_back() -> None:
    found = probe(TinyWorkload(model=Outside, optimizer=with_outside), TF32)["tf32"]
    assert found.same_trajectory


class Both(Optimizer):
    """Steps two optimizers; its own state is empty."""

    def __init__(self, model: nn.Sequential) -> None:
        self.parts = [
            SGD(model[k].parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for k in (0, 3)
        ]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


class Named(Both):
    """The same with a state dict of its own form."""

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: Any) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


def one_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def halving(optimizer: Optimizer, steps: int) -> Any:
    del steps
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)


@pytest.mark.parametrize("wrapper", [Both, Named])
def test_two_optimizers_behind_one_are_measured_as_the_one_they_equal(wrapper: Any) -> None:
    """Their momenta are those of the run, the same for every batch, and their rates change."""
    found = probe(TinyWorkload(optimizer=wrapper, scheduler=halving), BF16)["bf16"]
    plain = probe(TinyWorkload(optimizer=one_sgd, scheduler=halving), BF16)["bf16"]
    assert found.failed is None, found.failed
    assert found.same_trajectory
    assert found.points == plain.points


def test_optimizers_within_one_are_found_once() -> None:
    both = Both(TinyWorkload().build_model(0))
    both.again = both.parts[0]
    assert optimizers_within(both) == (both, *both.parts)


def head_only(model: nn.Sequential) -> Optimizer:
    return SGD(model[3].parameters(), lr=0.1)


def test_gradients_that_nobody_zeroes_do_not_reach_fp64() -> None:
    workload = dataclasses.replace(TinyWorkload(), optimizer=head_only)
    found = probe(workload, BF16, BF16_PURE)
    for record in found.values():
        assert not any("FP64" in note for note in record.notes), record.notes
        assert record.failed is None
