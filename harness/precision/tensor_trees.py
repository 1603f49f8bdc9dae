"""Changes the tensors inside what modules take and return: tuples, mappings, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


class StructureError(RuntimeError):
    """Two values that should have the same structure have not."""


def map_tensors(change: Callable[..., Any], value: Any, *others: Any) -> Any:
    """Return `value` with its tensors changed; what holds no changed tensor is the same object.

    Args:
        change: Called with a tensor of `value` and those at its place in `others`.
        value: A tensor, a tuple (named ones too), list, mapping or dataclass of such, or anything
            else, which is returned as it is.
        others: Of the same structure.

    Raises:
        StructureError: The structures differ.
    """
    if isinstance(value, Tensor):
        if not all(isinstance(other, Tensor) for other in others):
            raise StructureError("a tensor in one and none in the other")
        return change(value, *others)
    parts = _parts(value)
    if parts is None:
        return value
    other_parts = [_parts(other) for other in others]
    if any(other is None or other.keys() != parts.keys() for other in other_parts):
        raise StructureError(f"{type(value).__name__} of different parts")
    changed = {
        key: map_tensors(change, part, *(other[key] for other in other_parts if other is not None))
        for key, part in parts.items()
    }
    if all(changed[key] is part for key, part in parts.items()):
        return value
    return _rebuilt(value, changed)


def leaves(value: Any) -> Iterator[Any]:
    """Yield what `map_tensors` does not look into, tensors included."""
    parts = None if isinstance(value, Tensor) else _parts(value)
    if parts is None:
        yield value
    else:
        for part in parts.values():
            yield from leaves(part)


def _parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Fields without a value yet (`init=False`) are no parts.
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts.values())
    if isinstance(value, (list, tuple)):
        return type(value)(parts.values())
    result = copy.copy(value)
    for key, part in parts.items():
        if isinstance(value, Mapping):
            result[key] = part
        else:
            object.__setattr__(result, key, part)  # a frozen dataclass too
    return result
