"""What the bytes of a training step are: weights, gradients, optimizer state, activations.

Result layout: `{"step", "weights", "gradients", "optimizer_state", "activations",
"low_precision_copies", "loss_scaler", "total": bytes, "largest": one sentence}`. A breakdown of
tensors by their storage, not a peak: temporaries of kernels, and what activation checkpointing
computes again, are not in it. The peak is measured apart, as `peak_memory_bytes`. Under an emulated
policy the rounded copies have FP32's size and count as activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from harness.precision.composites import WatchingMode, run_below
from harness.probes.base import Metric, NamedTensor, StepProbe

# What torch.amp.GradScaler keeps on the device: an FP32 scale and an int32 count of clean steps.
_SCALER_BYTES = 8
_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_WHAT = {
    "weights": "weights and buffers",
    "gradients": "gradients",
    "optimizer_state": "{optimizer}'s state",
    "activations": "activations kept for the backward pass",
    "low_precision_copies": "16-bit copies of the weights",
    "loss_scaler": "the loss scaler's state",
}


def _bytes(description: str) -> Metric:
    return Metric(unit="bytes", description=description)


class MemoryProbe(StepProbe):
    """Takes stock in one step: the second, when the optimizer has its state, else the only one."""

    name = "memory"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "weights": _bytes("Parameters and buffers of the model, tied ones once."),
        "gradients": _bytes("Weight gradients; of sparse ones the stored values."),
        "optimizer_state": _bytes("Tensors in the optimizer's state after its step."),
        "activations": _bytes(
            "What the forward pass made and is alive when it ends: kept for the backward pass."
        ),
        "low_precision_copies": _bytes("The part of it that is 16-bit copies of weights, apart."),
        "loss_scaler": _bytes("Scale and counter of a loss scaler."),
        "total": _bytes("Sum of the above."),
    }

    def __init__(self, *, num_steps: int, every: int = 1) -> None:
        super().__init__(every=every, num_steps=num_steps)
        self._step = min(1, num_steps - 1)
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._found: dict[str, int] = {}
        self._forward = _ForwardBytes(weights=())

    def due(self, step: int) -> bool:
        """Return whether it is the one step."""
        return step == self._step

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Remember whose tensors to count."""
        self._model, self._optimizer = model, optimizer

    def start(self, step: int, *, loss_scale: float) -> None:
        """Begin the step."""
        self._found = {"loss_scaler": _SCALER_BYTES if loss_scale != 1.0 else 0}

    def around_forward(self) -> AbstractContextManager[None]:
        """Return the context that counts what the forward pass leaves for the backward pass."""
        self._forward = _ForwardBytes(weights=self._weights())
        return self._forward.counting()

    def gradients(self, gradients: Sequence[NamedTensor]) -> None:
        """Count the weight gradients."""
        self._found["gradients"] = storage_bytes(g.value for g in gradients)

    def after_update(self, parameters: Sequence[NamedTensor], *, skipped: bool) -> None:
        """Count weights and optimizer state, and sum up."""
        weights = [*self._weights(), *(p.value for p in parameters)]
        state = tensors_of(self._optimizer.state) if self._optimizer is not None else ()
        known = {key for weight in weights for key, _ in _storages(weight)}
        self._found |= {
            "weights": storage_bytes(weights),
            "optimizer_state": storage_bytes(
                t for t in state if not known & {key for key, _ in _storages(t)}
            ),
            "activations": self._forward.activations,
            "low_precision_copies": self._forward.copies,
        }

    def result(self) -> dict[str, Any]:
        """Return the bytes; empty when the run ended before the step did."""
        if "weights" not in self._found:
            return {}
        parts = {name: self._found.get(name, 0) for name in _WHAT}
        total = sum(parts.values())
        return {
            "step": self._step,
            **parts,
            "total": total,
            "largest": largest_part(parts, optimizer=type(self._optimizer).__name__),
        }

    def _weights(self) -> list[Tensor]:
        model = self._model
        return [] if model is None else [*model.parameters(), *model.buffers()]


def largest_part(parts: Mapping[str, int], *, optimizer: str) -> str:
    """Return a sentence on the largest part: what it is, its share, and of how much.

    Args:
        parts: Part -> bytes, named as in the result.
        optimizer: Name of the optimizer's class.

    Examples:
        >>> parts = {"weights": 2**20, "optimizer_state": 3 * 2**20}
        >>> largest_part(parts, optimizer="AdamW")
        "AdamW's state is 75 % of 4.0 MiB"
    """
    total = sum(parts.values())
    if total == 0:
        return "nothing was held"
    name = max(parts, key=lambda part: parts[part])
    what = _WHAT[name].format(optimizer=optimizer)
    verb = "is" if what.endswith("state") else "are"
    return f"{what} {verb} {100 * parts[name] / total:.0f} % of {_readable(total)}"


def _readable(size: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


class _ForwardBytes(WatchingMode):
    """Follows the storages that a forward pass makes, and counts those that outlive it.

    Not by autograd's hooks on saved tensors: those are refused inside `torch.func` transforms, and
    what activation checkpointing drops has to be left out. Below autocast, whose own casts of
    weights are seen too.

    Attributes:
        activations: Bytes that are alive when the forward pass ends, without copies of weights.
        copies: Bytes of 16-bit copies of weights that are.
    """

    def __init__(self, *, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {key for weight in weights for key, _ in _storages(weight)}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._copies: set[int] = set()
        self.activations = self.copies = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        with self:
            yield
        for key, (reference, size) in self._made.items():
            if reference.expired():  # type: ignore[no-untyped-call]
                continue
            if key in self._copies:
                self.copies += size
            else:
                self.activations += size
        self._made, self._copies = {}, set()

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op and note the storages that it made."""
        result = run_below(func, args, kwargs)
        given = {key for tensor in tensors_of((args, kwargs)) for key, _ in _storages(tensor)}
        for tensor in tensors_of(result):
            for key, storage in _storages(tensor):
                if key not in given and key not in self._weights and storage is not None:
                    self._made[key] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
                    if _is_copy(func, tensor) and given & self._weights:
                        self._copies.add(key)
                    else:
                        self._copies.discard(key)
        return result


def _is_copy(func: Any, result: Tensor) -> bool:
    return func is torch.ops.aten._to_copy.default and result.dtype in _SIXTEEN_BIT


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes behind tensors, each storage once; of views all that they keep alive."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        for key, storage in _storages(tensor):
            whole = tensor.numel() * tensor.element_size() if storage is None else storage.nbytes()
            sizes[key] = whole
    return sum(sizes.values())


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings and sequences, as an optimizer's state has them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def _storages(tensor: Tensor) -> list[tuple[int, Any]]:
    """Return the storages of a tensor with what tells them apart.

    A sparse tensor has two; one that wraps others (an 8-bit state with its scales) has theirs; one
    without any stands for itself, with None.
    """
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._values(), tensor._indices()]
        return [pair for part in parts for pair in _storages(part)]
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [pair for name in names for pair in _storages(getattr(tensor, name))]
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return [(id(tensor), None)]
    return [(storage._cdata, storage)]
