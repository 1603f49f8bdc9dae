"""Where the time of a training step goes: torch's profiler over a few steps, op by op.

Only time that ops really take counts: on a CPU inside their kernels, on a GPU of the kernels that
they launched. What Python and autograd's engine do in between is in nobody's share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from harness.precision.op_families import CAST, family_of

OPTIMIZER = "optimizer"
_OPTIMIZER_PREFIX = "Optimizer.step#"
# As the profiler spells them.
_FORMATS = {
    "float": "fp32",
    "double": "fp64",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8_e4m3",
    "c10::Float8_e5m2": "fp8_e5m2",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}
LOW_PRECISION = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
_COPIES = ("aten::copy_", "aten::_to_copy")


@dataclass(frozen=True, kw_only=True)
class OpTime:
    """Time of all calls of one op in one format.

    Attributes:
        name: Registry name without `aten::`.
        family: As `op_families` has it; `optimizer` for what the optimizer's step runs.
        format: Of its first floating-point argument; empty without one. A cast's `copy_` has the
            format that it writes, its `_to_copy` the one that it reads.
        is_cast: Whether it converts from one format into another.
        seconds: Without what it calls in turn.
    """

    name: str
    family: str
    format: str
    is_cast: bool
    seconds: float


def profiled_ops(run: Callable[[], object], *, device: torch.device) -> list[OpTime]:
    """Run something under torch's profiler; return its ops, those that took longest first.

    Args:
        run: Is called once; waits for nothing (the profiler does).
        device: Whose time counts: `cpu`, or `cuda` where kernels run.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    profiler = profile(activities=activities, record_shapes=True)
    with _native_messages_dropped():
        profiler.start()
    try:
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    finally:
        with _native_messages_dropped():
            profiler.stop()
    events = profiler.events()  # type: ignore[no-untyped-call]
    return _added_up(events or (), on_gpu=on_gpu)


@contextmanager
def _native_messages_dropped() -> Iterator[None]:
    """Keep the profiler's own start and stop lines off the terminal; no log level governs them."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _added_up(events: Iterable[Any], *, on_gpu: bool) -> list[OpTime]:
    seconds: dict[tuple[str, str, str, bool], float] = {}
    for event in events:
        if event.device_type != DeviceType.CPU or event.is_user_annotation:
            continue
        micro = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if micro <= 0 or not (on_gpu or _is_op(event.name)):
            continue
        key = _described(event)
        seconds[key] = seconds.get(key, 0.0) + micro * 1e-6
    found = [
        OpTime(name=name, family=family, format=fmt, is_cast=is_cast, seconds=spent)
        for (name, family, fmt, is_cast), spent in seconds.items()
    ]
    return sorted(found, key=lambda op: -op.seconds)


def _is_op(name: str) -> bool:
    """Return whether an event is an op of the dispatcher, not a node or an annotation."""
    return "::" in name and not name.startswith(("autograd::", "torch::autograd::"))


def _described(event: Any) -> tuple[str, str, str, bool]:
    name = str(event.name).removeprefix("aten::")
    is_cast = event.name in _COPIES and _converts(event)
    formats = _formats(event)
    family = CAST if is_cast else OPTIMIZER if _in_optimizer(event) else family_of(name)
    if family == CAST and not is_cast:
        family = "copy"
    return name, family, formats[0] if formats else "", is_cast


def _formats(event: Any) -> list[str]:
    return [_FORMATS[dtype] for dtype in event.input_dtypes or () if dtype in _FORMATS]


def _converts(event: Any) -> bool:
    """Return whether a copy, or one that it makes, reads another format than it writes.

    A mask of booleans that becomes floating-point was in no format, and a Python number that takes
    the format of the tensor it multiplies (0-dim) is none of the model's values.
    """
    if event.name == "aten::copy_" and not (event.input_shapes or [[]])[0]:
        return False
    if event.name == "aten::copy_":
        return len({_FORMATS.get(dtype) for dtype in (event.input_dtypes or ())[:2]} - {None}) == 2
    return any(_converts(child) for child in event.cpu_children if child.name == "aten::copy_")


def _in_optimizer(event: Any) -> bool:
    while event is not None:
        if str(event.name).startswith(_OPTIMIZER_PREFIX):
            return True
        event = event.cpu_parent
    return False
