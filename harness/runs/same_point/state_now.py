"""Where a run is between two steps, copied so that steps beside it can start from there."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.precision.tensor_trees import leaves
from harness.runs.gradients import optimized_parameters


@dataclass(frozen=True, kw_only=True)
class StateNow:
    """A run between two steps, as steps beside it start from it.

    Attributes:
        model: The run's own; weights FP32.
        optimizer_states: `state_dict()` of its optimizer and of those that it steps in turn.
        learning_rate: Of the first group; NaN where it has none.
        parameters: What is optimized, in the optimizer's order, real and complex only.
    """

    model: nn.Module
    optimizer_states: tuple[dict[str, Any], ...]
    learning_rate: float
    parameters: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> StateNow:
        """Copy what a step beside the run could change and does not put back by itself."""
        parameters = tuple(
            p for p in optimized_parameters(optimizer) if p.is_floating_point() or p.is_complex()
        )
        states = tuple(_copied(one.state_dict()) for one in optimizers_within(optimizer))
        rate = optimizer.param_groups[0].get("lr")
        return cls(
            model=model,
            optimizer_states=states,
            learning_rate=math.nan if rate is None else float(rate),
            parameters=parameters,
        )


def optimizers_within(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return an optimizer and those that it holds in attributes, as one that wraps others does."""
    found = [optimizer]
    for one in found:
        parts = {k: v for k, v in vars(one).items() if k not in ("state", "param_groups")}
        for leaf in leaves(parts):
            if isinstance(leaf, Optimizer) and all(leaf is not known for known in found):
                found.append(leaf)
    return tuple(found)


class OptimizerState:
    """What an optimizer holds now, to be put back after each step; faster than loading it anew."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._saved = [
            (
                one,
                {key: _copied(value) for key, value in one.state.items()},
                [
                    {name: _copied(value) for name, value in group.items() if name != "params"}
                    for group in one.param_groups
                ],
            )
            for one in optimizers_within(optimizer)
        ]

    def put_back(self) -> None:
        """Give the optimizer copies of what it held; its parameters are the caller's to restore."""
        for optimizer, state, groups in self._saved:
            optimizer.state.clear()
            optimizer.state.update({key: _copied(value) for key, value in state.items()})
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(_copied(saved))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {name: _copied(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(part) for part in value)
    return copy.deepcopy(value)


def load_copies(
    optimizer: Optimizer, states: Sequence[dict[str, Any]], *, cast_to_weights: bool
) -> None:
    """Load what `StateNow` holds into an optimizer that was made anew.

    Args:
        optimizer: Of the same kind; an optimizer moves what it loads in, so it gets copies.
        states: One for each of `optimizers_within`.
        cast_to_weights: Whether state is held in the weights' format, as torch loads it, or in its
            own.
    """
    for one, state in zip(optimizers_within(optimizer), states, strict=True):
        loaded = _copied(state)
        one.load_state_dict(loaded)
        if not cast_to_weights:
            _undo_casts(one, loaded)


def _undo_casts(optimizer: Optimizer, state: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state.get("state", {}).items():
        own = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, Tensor) and own[name].dtype is not value.dtype:
                own[name] = value


def own_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return by group of an optimizer its settings, learning rates left out."""
    left_out = ("params", "lr", "initial_lr")
    return [
        {name: value for name, value in group.items() if name not in left_out}
        for group in optimizer.param_groups
    ]


def run_post_step_hooks(optimizer: Optimizer) -> None:
    """Do what hooks do after a step, such as rounding the state that is kept until the next.

    State that was loaded from another optimizer then is as this one would have kept it.
    """
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply the learning rate of every group, those of optimizers within it too, once."""
    groups = [group for one in optimizers_within(optimizer) for group in one.param_groups]
    for group in {id(group): group for group in groups}.values():
        if group.get("lr") is not None:
            group["lr"] = group["lr"] * factor


def clear_gradients(state: StateNow) -> None:
    """Drop every gradient of the model and of what is optimized beside it."""
    for parameter in (*state.model.parameters(), *state.parameters):
        parameter.grad = None


@contextmanager
def without_gradients(state: StateNow) -> Iterator[None]:
    """Take gradients away until the end: those of weights that no optimizer has just add up."""
    kept = [(p, p.grad) for p in (*state.model.parameters(), *state.parameters)]
    clear_gradients(state)
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def flat_gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient as a flat real copy, FP64 or FP32; zeros where it has none."""
    gradient = parameter.grad
    return torch.zeros_like(flat(parameter)) if gradient is None else flat(gradient)


def flat(tensor: Tensor) -> Tensor:
    """Return a flat real copy, FP64 for an FP64 tensor and FP32 for any other."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    return tensor.to(dtype, copy=True).reshape(-1)
