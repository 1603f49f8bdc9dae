"""Faults of gradients that come in parts: accumulated or sent in a low format."""

from __future__ import annotations

import functools

from torch import Tensor

from harness.calibration.faults.fault import Fault, Plant
from harness.calibration.faults.rounded import nearest
from harness.calibration.tasks.shards import ShardRule


def add(total: Tensor, part: Tensor) -> Tensor:
    """Return the FP32 sum: parts are added, and nothing is wrong."""
    return total + part


def add_rounded(total: Tensor, part: Tensor, *, name: str) -> Tensor:
    """Return the sum of two gradients in format `name`, both and the result rounded to it."""
    return nearest(nearest(total, name) + nearest(part, name), name)


def unchanged(part: Tensor) -> Tensor:
    """Return a part as it is sent in FP32."""
    return part


def sent_rounded(part: Tensor, *, name: str, gain: float = 1.0) -> Tensor:
    """Return a part as it arrives when it is sent in format `name`.

    Args:
        part: FP32 gradient of one part of the batch.
        name: The format on the wire.
        gain: Gradients are that much larger on the wire than here (smaller below 1).
    """
    return nearest(part * gain, name) / gain


def _accumulation(dose: str) -> Plant:
    name, _, shards = dose.rpartition("_")
    accumulate = functools.partial(add_rounded, name=name)
    return Plant(shards=ShardRule(shards=int(shards), accumulate=accumulate, send=unchanged))


def _all_reduce(dose: str) -> Plant:
    name, _, power = dose.rpartition("_")
    send = functools.partial(sent_rounded, name=name, gain=2.0 ** int(power))
    return Plant(shards=ShardRule(shards=4, accumulate=add, send=send))


FAULTS = (
    Fault(
        name="gradient_accumulation",
        sentence="Gradients of micro-batches are accumulated in a low format: late ones are small "
        "beside the sum and lose their bits.",
        source="deepspeedai/DeepSpeed#1800",
        dose="the accumulator's format and the number of micro-batches",
        plant=_accumulation,
    ),
    Fault(
        name="all_reduce",
        sentence="Gradients are sent between workers in a low format: in FP16 small ones become "
        "zero and large ones infinite, in fewer bits all lose some.",
        source="deepspeedai/DeepSpeed#2071",
        dose="the format on the wire, and k: gradients are 2^k larger than here",
        plant=_all_reduce,
    ),
)
