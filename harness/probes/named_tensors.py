"""The tensors of a step with their names, as columns that cost little to make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from torch import Tensor

from harness.probes.base import NamedTensor


class NamedTensors(Sequence[NamedTensor]):
    """Named tensors that are made one by one only when asked for; columns cost less.

    Attributes:
        modules: Module of each.
        values: Value of each, as `NamedTensor` describes it.
    """

    def __init__(
        self,
        owners: tuple[tuple[str, ...], tuple[str, ...]],
        values: Sequence[Tensor],
        sources: Sequence[Tensor | None] | None = None,
    ) -> None:
        self.modules, self._names = owners
        self.values = values
        self._sources = [None] * len(values) if sources is None else sources
        self._made: list[NamedTensor] | None = None

    def _named(self) -> list[NamedTensor]:
        if self._made is None:
            columns = zip(self.modules, self._names, self.values, self._sources, strict=True)
            self._made = [
                NamedTensor(module=module, name=name, value=value, source=source)
                for module, name, value, source in columns
            ]
        return self._made

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> NamedTensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[NamedTensor]: ...
    def __getitem__(self, index: int | slice) -> NamedTensor | list[NamedTensor]:
        return self._named()[index]

    def __iter__(self) -> Iterator[NamedTensor]:
        return iter(self._named())


def columns_of(tensors: Sequence[NamedTensor]) -> tuple[tuple[str, ...], Sequence[Tensor]]:
    """Return the modules and the values of named tensors."""
    if isinstance(tensors, NamedTensors):
        return tensors.modules, tensors.values
    return tuple(t.module for t in tensors), [t.value for t in tensors]
