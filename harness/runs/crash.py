"""A crash as data: what was raised, at which step, in which module, in one plain sentence."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from harness.precision.module_calls import ModuleCalls, autograd_position
from harness.precision.module_names import ROOT
from harness.runs.record import CrashReport

_OWN_FOLDER = str(Path(__file__).resolve().parents[1])
_TORCH_FOLDER = str(Path(torch.__file__).resolve().parent)


class NotExpressibleError(RuntimeError):
    """The policy asks for something that torch cannot do with this model or optimizer."""


@dataclass
class Position:
    """Where a run is, for the report of a crash.

    Attributes:
        doing: What is being done, as the report says it: `while building the model`, ...
        step: Batch index, None before the first step.
        module: Where it happened, if found out on the spot.
        op: The op that raised, as the report says it, if found out on the spot.
    """

    doing: str = "while starting"
    step: int | None = None
    module: str | None = None
    op: str | None = None


def describe_crash(error: Exception, *, position: Position, model: nn.Module | None) -> CrashReport:
    """Return the report of an exception that ended a run.

    The module is the innermost one of `model` whose code was running; a failed backward pass runs
    outside of modules, and `position.module` names it.
    """
    message = _first_line(error)
    module = position.module or _innermost_module(error.__traceback__, model)
    expressible = not isinstance(error, NotExpressibleError)
    where = position.doing if position.step is None else f"{position.doing} at step {position.step}"
    if expressible:
        inside = f", module `{module}`" if module else ""
        inside += f", {position.op}" if position.op else ""
        line = _users_line(error.__traceback__)
        at = f" ({line})" if line else ""
        sentence = f"{type(error).__name__} {where}{inside}{at}: {message}"
    else:
        sentence = f"Not possible in torch, found {where}: {message}"
    if sentence[-1] not in ".!?":
        sentence += "."
    return CrashReport(
        kind=type(error).__name__,
        message=message,
        sentence=sentence,
        step=position.step,
        module=module,
        traceback="".join(traceback.format_exception(error)),
        not_expressible=not expressible,
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _innermost_module(trace: TracebackType | None, model: nn.Module | None) -> str | None:
    if model is None:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            found = names[id(owner)]
        trace = trace.tb_next
    return found


def _users_line(trace: TracebackType | None) -> str | None:
    """Return `file.py:12` of the innermost frame that is neither torch's nor the harness'."""
    found = None
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if not path.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<")):
            found = f"{Path(path).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def module_of_failed_backward(
    error: Exception, *, model: nn.Module, recorded_from: int, forward_again: Callable[[], object]
) -> str | None:
    """Return the module that recorded the op whose own (Python) backward raised.

    The forward pass is made once more, watching where in autograd's count each module begins and
    ends; the failed op has the same place in it. None when the op's backward is not Python code.

    Args:
        error: What `backward` raised.
        model: The model.
        recorded_from: `autograd_position()` just before the failed step's forward pass.
        forward_again: Repeats that forward pass.
    """
    node = _failed_node(error.__traceback__)
    if node is None:
        return None
    place = node._sequence_nr() - recorded_from
    calls = ModuleCalls()
    try:
        with calls.watching(model):
            start = autograd_position()
            forward_again()
    except RuntimeError:
        return None  # out of memory, say: the crash to report is the first one
    found = calls.recorded_by(start + place)
    return None if found == ROOT else found


def _failed_node(trace: TracebackType | None) -> Any:
    found = None
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            if isinstance(value, torch.autograd.function.BackwardCFunction):
                found = value
        trace = trace.tb_next
    return found
