"""One held-out evaluation before a sweep starts: does it work, how long does it take."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harness.runs.notes import Note
from harness.runs.workload_code import code_of
from harness.workloads.base import Workload
from harness.workloads.batches import to_device
from harness.workloads.isolation import seed_everything

BUDGET_SECONDS = 2.0
MIN_HELD_OUT_ITEMS = 2048


def evaluate_once(
    workload: Workload, model: nn.Module, *, seed: int, device: torch.device
) -> tuple[float | None, int | None, list[Note]]:
    """Evaluate the model as a run will, with `eval_fn` if there is one, else on held-out batches.

    Returns:
        Seconds of one evaluation (extrapolated from two seconds' worth if it is long), predicted
        items, and notes. Seconds and items are None without anything to evaluate; items also
        when the workload cannot say or has its own figure.

    Raises:
        ValueError: Code of the workload raised, or what it returned cannot serve.
    """
    seed_everything(seed)
    with code_of(workload, "held_out"):
        batches = workload.held_out(seed)
    model.eval()
    started = time.perf_counter()
    with torch.no_grad():
        with code_of(workload, "eval_fn"):
            figure = workload.eval_fn(model)
        if figure is not None:
            return time.perf_counter() - started, None, _check_figure(figure, "eval_fn")
        if batches is None:
            message = "the workload has no held-out data: only the training loss is compared"
            return None, None, [Note(code="HELDOUT_MISSING", message=message)]
        if not batches:
            raise ValueError("held_out returned no batches; leave the function out instead")
        done, notes = _held_out_pass(workload, model, batches, device)
    seconds = (time.perf_counter() - started) * len(batches) / done
    counts = [workload.num_items(batch) for batch in batches]
    items = None if None in counts else sum(count for count in counts if count is not None)
    if items is not None and items < MIN_HELD_OUT_ITEMS:
        message = f"the held-out set has {items} items; {MIN_HELD_OUT_ITEMS} or more are advised"
        notes.append(Note(code="HELDOUT_SMALL", message=message))
    return seconds, items, notes


def _held_out_pass(
    workload: Workload, model: nn.Module, batches: Iterable[Any], device: torch.device
) -> tuple[int, list[Note]]:
    """Return how many batches two seconds allowed, and a note if a loss is not finite."""
    started = time.perf_counter()
    done = 0
    notes: list[Note] = []
    for batch in batches:
        with code_of(workload, "loss_fn on a held-out batch"):
            loss: object = _loss_without_grad(workload, model, to_device(batch, device))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("loss_fn on a held-out batch did not return a scalar tensor")
        done += 1
        notes = notes or _check_figure(loss.item(), "the held-out loss")
        if time.perf_counter() - started > BUDGET_SECONDS:
            break
    return done, notes


def _loss_without_grad(workload: Workload, model: nn.Module, batch: Any) -> Tensor:
    try:
        return workload.loss_fn(model, batch)
    except RuntimeError as error:
        # A loss that contains derivatives of the model (a physics residual, a gradient penalty).
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return workload.loss_fn(model, batch).detach()


def _check_figure(value: float, what: str) -> list[Note]:
    if math.isfinite(value):
        return []
    message = f"{what} is {value} in FP32 after three steps"
    return [Note(code="HELDOUT_NONFINITE", message=message)]
