"""Three FP32 steps before a sweep starts, to find what is wrong with a workload in seconds.

Errors are for what would waste every run; what only weakens a verdict is a note.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from harness.precision.execution import applied
from harness.precision.policy import PrecisionPolicy
from harness.runs.determinism import (
    ask_for_deterministic_cublas,
    tensors_sha256,
    weights_sha256,
)
from harness.runs.loss_check import checked_loss, kind_of, sixteen_bit_format
from harness.runs.notes import Note
from harness.runs.preflight_evaluation import evaluate_once
from harness.runs.step import needs_closure
from harness.runs.workload_code import code_of
from harness.workloads.base import Workload
from harness.workloads.batches import iter_tensors, to_device
from harness.workloads.isolation import global_state_kept, seed_everything

NUM_STEPS = 3
BUDGET_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """What the three steps saw.

    Attributes:
        step_seconds: Wall time of one FP32 step, without fetching the batch; the faster of the two
            after the first.
        held_out_seconds: Time of one held-out evaluation (extrapolated if it is long); None
            without one.
        num_parameters: Elements of all parameters, tied ones once.
        parameter_bytes: Their size as the model was built.
        held_out_items: Predicted items in the held-out batches; None without any, or if the
            workload cannot say.
        notes: Caveats for the report.
    """

    step_seconds: float
    held_out_seconds: float | None
    num_parameters: int
    parameter_bytes: int
    held_out_items: int | None
    notes: tuple[Note, ...]


def check_workload(
    workload: Workload, *, seed: int, steps: int, device: torch.device
) -> PreflightReport:
    """Build the model, train three FP32 steps, evaluate once, and say what is wrong.

    Random state, thread count and default dtype are left as they were found.

    Args:
        workload: Any workload.
        seed: The first seed of the sweep.
        steps: Steps of a run; the batch iterator must yield that many.
        device: Where the runs will be trained.

    Raises:
        ValueError: Code of the workload raised (function and line are named), the loss is not a
            finite scalar with a gradient at step 0, or the batches end early. One line.
    """
    ask_for_deterministic_cublas()
    with global_state_kept():
        notes = [Note(code="UNUSED_NAME", message=hint) for hint in getattr(workload, "hints", ())]
        notes += _check_batches(workload, seed=seed, steps=steps)
        model = _built(workload, seed)
        notes += _check_model(workload, model, seed)
        sizes = [p.numel() for p in model.parameters()]
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        with code_of(workload, f"moving the model to {device}"):
            model.to(device)
        with applied(PrecisionPolicy(name="fp32"), model, device=device) as execution:
            losses, step_seconds = _train(workload, model, seed=seed, steps=steps, device=device)
            held_out_seconds, items, held_out_notes = evaluate_once(
                workload, model, seed=seed, device=device
            )
            for switch, value in execution.changed_switches().items():
                raise ValueError(
                    f"code of the workload sets the backend switch {switch} to {value} while it "
                    "trains (torch.set_float32_matmul_precision, allow_tf32); leave that to the "
                    "policies"
                )
    if name := sixteen_bit_format(losses):
        message = f"loss_fn computes the loss in {name} even in FP32 runs, which hides differences"
        notes.append(Note(code="LOSS_LOGGED_LOW_PRECISION", message=message))
    return PreflightReport(
        step_seconds=step_seconds,
        held_out_seconds=held_out_seconds,
        num_parameters=sum(sizes),
        parameter_bytes=num_bytes,
        held_out_items=items,
        notes=(*notes, *held_out_notes),
    )


def _built(workload: Workload, seed: int) -> nn.Module:
    seed_everything(seed)
    with code_of(workload, "build_model"):
        model: object = workload.build_model(seed)
    if not isinstance(model, nn.Module):
        raise ValueError(f"build_model returned {kind_of(model)}, not a torch.nn.Module")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise ValueError(
                f"build_model returned a model whose {name!r} has no values yet (lazy or on the "
                "meta device); run one batch through it, or fill it, inside build_model"
            )
    return model


def _fresh_batches(workload: Workload, seed: int, steps: int) -> Iterator[Any]:
    seed_everything(seed)
    with code_of(workload, "batches"):
        return iter(workload.batches(seed, steps))


def _next_batch(workload: Workload, iterator: Iterator[Any], *, step: int, steps: int) -> Any:
    with code_of(workload, f"batches (step {step})"):
        for batch in iterator:
            return batch
    raise ValueError(
        f"batches(seed, steps={steps}) ended early: it yielded {step} of {steps} batches, "
        f"so step {step} has none"
    )


def _check_batches(workload: Workload, *, seed: int, steps: int) -> list[Note]:
    """Iterate as far as two seconds allow, and compare the first batches with a second pass."""
    first: list[Any] = []
    notes = []
    iterator = _fresh_batches(workload, seed, steps)
    # The built-in workloads yield what is asked for: their tests say so.
    reach = steps if workload.settings.get("kind") == "custom" else min(NUM_STEPS, steps)
    started = time.perf_counter()
    for step in range(reach):
        batch = _next_batch(workload, iterator, step=step, steps=steps)
        if step < NUM_STEPS:
            first.append(batch)
        elif time.perf_counter() - started > BUDGET_SECONDS and step + 1 < steps:
            message = f"that batches() yields {steps} batches was not checked beyond step {step}"
            notes.append(Note(code="BATCHES_NOT_CHECKED", message=message))
            break
    if not any(True for _ in iter_tensors(first)):
        message = "no tensor was found in the batches, so equal data in two runs cannot be proven"
        return [*notes, Note(code="BATCHES_WITHOUT_TENSORS", message=message)]
    with code_of(workload, "batches"):
        again = [b for _, b in zip(first, _fresh_batches(workload, seed, steps), strict=False)]
    if tensors_sha256(iter_tensors(first)) != tensors_sha256(iter_tensors(again)):
        message = f"batches(seed={seed}) yields other data when it is called again"
        notes.append(Note(code="BATCHES_NOT_REPRODUCIBLE", message=message))
    return notes


def _check_model(workload: Workload, model: nn.Module, seed: int) -> list[Note]:
    notes = []
    # The trainer seeds every generator before it builds; only other sources of chance remain.
    if weights_sha256(model) != weights_sha256(_built(workload, seed)):
        message = f"build_model(seed={seed}) gives other weights when it is called again"
        notes.append(Note(code="MODEL_NOT_REPRODUCIBLE", message=message))
    others = sorted(
        {
            str(p.dtype).removeprefix("torch.")
            for p in model.parameters()
            if p.is_floating_point() and p.dtype != torch.float32
        }
    )
    if others:
        message = f"the model has {', '.join(others)} parameters; its FP32 runs are not all FP32"
        notes.append(Note(code="WEIGHTS_NOT_FP32", message=message))
    return notes


def _train(
    workload: Workload, model: nn.Module, *, seed: int, steps: int, device: torch.device
) -> tuple[list[Tensor], float]:
    """Return the detached losses of three steps and the seconds of one."""
    with code_of(workload, "make_optimizer"):
        optimizer = workload.make_optimizer(model)
    if not callable(getattr(optimizer, "step", None)):
        raise ValueError(f"make_optimizer returned {kind_of(optimizer)}, not an optimizer")
    with code_of(workload, "make_scheduler"):
        scheduler = workload.make_scheduler(optimizer, steps)
    model.train()
    iterator = _fresh_batches(workload, seed, steps)
    losses, seconds = [], []
    for step in range(min(NUM_STEPS, steps)):
        batch = to_device(_next_batch(workload, iterator, step=step, steps=steps), device)
        started = time.perf_counter()
        losses.append(_step(workload, model, optimizer, batch, step))
        if scheduler is not None:
            with code_of(workload, "the scheduler"):
                scheduler.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    # The first step allocates and picks kernels.
    return losses, min(seconds[1:] or seconds)


def _step(
    workload: Workload, model: nn.Module, optimizer: Optimizer, batch: Any, step: int
) -> Tensor:
    seen: list[Tensor] = []

    def forward_and_backward() -> Tensor:
        optimizer.zero_grad()
        with code_of(workload, "loss_fn"):
            loss: object = workload.loss_fn(model, batch)
        checked = checked_loss(loss, first=step == 0)
        with code_of(workload, "the backward pass"):
            checked.backward()  # type: ignore[no-untyped-call]
        seen.append(checked.detach())
        return checked

    if needs_closure(optimizer):
        with code_of(workload, "optimizer.step"):
            optimizer.step(forward_and_backward)  # type: ignore[arg-type]
    else:
        forward_and_backward()
        with code_of(workload, "optimizer.step"):
            optimizer.step()
    return seen[0]
