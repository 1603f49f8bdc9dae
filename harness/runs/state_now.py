"""Where a run is between two steps, copied so that steps beside it can start from there."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.runs.gradients import optimized_parameters


@dataclass(frozen=True, kw_only=True)
class StateNow:
    """A run between two steps, as steps beside it start from it.

    Attributes:
        model: The run's own; weights FP32.
        optimizer_state: `state_dict()` of its optimizer.
        parameters: What is optimized, in the optimizer's order, real and complex only.
    """

    model: nn.Module
    optimizer_state: dict[str, Any]
    parameters: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> StateNow:
        """Copy what a step beside the run could change and does not put back by itself."""
        parameters = tuple(
            p for p in optimized_parameters(optimizer) if p.is_floating_point() or p.is_complex()
        )
        state = copy.deepcopy(optimizer.state_dict())
        return cls(model=model, optimizer_state=state, parameters=parameters)

    @property
    def learning_rate(self) -> float:
        """The first group's rate; NaN where it has none."""
        rate = self.optimizer_state["param_groups"][0].get("lr")
        return math.nan if rate is None else float(rate)


class OptimizerState:
    """What an optimizer holds now, to be put back after each step; faster than loading it anew."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {key: _copied(value) for key, value in optimizer.state.items()}
        self._groups = [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    def put_back(self) -> None:
        """Give the optimizer copies of what it held; its parameters are the caller's to restore."""
        state = self._optimizer.state
        state.clear()
        state.update({key: _copied(value) for key, value in self._state.items()})
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(_copied(saved))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {name: _copied(part) for name, part in value.items()}
    return copy.deepcopy(value)


def undo_casts(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Put the FP32 state back that loading cast to its weights' format."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["state"].items():
        own = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, Tensor) and own[name].dtype is not value.dtype:
                own[name] = value


def clear_gradients(state: StateNow) -> None:
    """Drop every gradient of the model and of what is optimized beside it."""
    for parameter in (*state.model.parameters(), *state.parameters):
        parameter.grad = None


def flat_gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient as a flat real copy, FP64 or FP32; zeros where it has none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(flat(parameter))
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    return flat(gradient)


def flat(tensor: Tensor) -> Tensor:
    """Return a flat real copy, FP64 for an FP64 tensor and FP32 for any other."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    return tensor.to(dtype, copy=True).reshape(-1)
