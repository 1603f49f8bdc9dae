"""Batches as any nesting of tensors: walked in a fixed order, and moved to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def iter_tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in a batch, in an order that depends on its structure only.

    Tuples, lists, named tuples and dataclasses are walked in order, mappings by the text of
    their keys (their own order may come from a set). Anything else is a leaf; leaves that are not
    tensors are passed over.
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            yield from iter_tensors(batch[key])
    elif isinstance(batch, (tuple, list)):
        for part in batch:
            yield from iter_tensors(part)
    elif _is_dataclass_value(batch):
        for field in dataclasses.fields(batch):
            yield from iter_tensors(getattr(batch, field.name))


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a copy of the batch with every tensor on `device`; other leaves are the same objects.

    Containers keep their type and are rebuilt, never changed in place. Tensors are copied even on
    `device`: a loss may change its batch in place, and the data may serve the next run too.
    """
    if isinstance(batch, Tensor):
        copied = batch.detach().to(device, non_blocking=True, copy=True)
        return copied.requires_grad_() if batch.requires_grad else copied
    if isinstance(batch, PackedSequence):
        # Its lengths stay on the CPU, which its own method knows; torch types it for dtypes only.
        moved = batch.to(device, non_blocking=True)  # type: ignore[arg-type]
        return moved._replace(data=moved.data.clone()) if moved is batch else moved
    if isinstance(batch, Mapping):
        return _rebuilt_mapping(batch, device)
    if isinstance(batch, (tuple, list)):
        parts = [to_device(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if _is_dataclass_value(batch):
        return _rebuilt_dataclass(batch, device)
    return batch


def leading_size(batch: Any) -> int | None:
    """Return the first dimension of the first tensor that has one: the examples in a batch."""
    for tensor in iter_tensors(batch):
        if tensor.ndim > 0:
            return tensor.shape[0]
    return None


def _is_dataclass_value(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _rebuilt_mapping(batch: Mapping[Any, Any], device: torch.device) -> Any:
    moved = {key: to_device(value, device) for key, value in batch.items()}
    if type(batch) is dict:
        return moved
    rebuilt: Any = copy.copy(batch)  # keeps what a subclass holds besides its items
    for key, value in moved.items():
        rebuilt[key] = value
    return rebuilt


def _rebuilt_dataclass(batch: Any, device: torch.device) -> Any:
    rebuilt = copy.copy(batch)
    for field in dataclasses.fields(batch):
        # Past a frozen dataclass's own __setattr__; __init__ may take other arguments.
        object.__setattr__(rebuilt, field.name, to_device(getattr(batch, field.name), device))
    return rebuilt
