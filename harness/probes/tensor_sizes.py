"""L2 norm, largest magnitude and zeros of many tensors at once, by module, without waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.probes.base import NamedTensor
from harness.probes.flat import CHUNK_ELEMENTS

Floats = NDArray[np.float64]
_WIDE = (torch.float32, torch.float64)
# Up to this many elements tensors are copied into one table first: a kernel costs more than it
# computes then. Above, each is measured where it lies.
TABLE_ELEMENTS = 1 << 21
_WIDTH = 128


@dataclass(frozen=True)
class Layout:
    """Which tensors were measured together.

    Attributes:
        modules: The module of each tensor.
        elements: The number of elements of each.
        width: Elements per row of the table that holds them, every tensor in rows of its own; None
            without a table: one row is one tensor then.
    """

    modules: tuple[str, ...]
    elements: tuple[int, ...]
    width: int | None = None

    @property
    def rows(self) -> list[int]:
        """The number of rows of each tensor."""
        if self.width is None:
            return [1] * len(self.elements)
        return [-(-n // self.width) for n in self.elements]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Tensors measured together; the numbers, one per row, are on the device still."""

    layout: Layout
    l2: Tensor
    largest: Tensor
    zeros: Tensor | None

    def on_cpu(self) -> Measured:
        """Return the same with its numbers off the device; waits for it."""
        zeros = None if self.zeros is None else self.zeros.cpu()
        return replace(self, l2=self.l2.cpu(), largest=self.largest.cpu(), zeros=zeros)


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The values of several tensors.

    Attributes:
        layout: Whose they are.
        table: Shape (rows, width), filled up with zeros; None for larger ones.
        values: The tensors themselves where there is no table.
    """

    layout: Layout
    table: Tensor | None
    values: tuple[Tensor, ...]

    def minus(self, earlier: Gathered) -> Gathered:
        """Return the differences; exact where both were 16-bit, being taken in FP32."""
        if self.table is not None and earlier.table is not None:
            return replace(self, table=self.table - earlier.table)
        return replace(self, values=tuple(torch._foreach_sub(self.values, earlier.values)))

    def copied(self) -> Gathered:
        """Return values that later changes of the tensors do not reach."""
        table = self.table
        if table is not None and len(self.layout.elements) == 1:
            table = table.clone()  # the table of a single tensor is the tensor
        return replace(self, table=table, values=tuple(value.clone() for value in self.values))

    def measured(self, *, zeros: bool = False) -> Measured:
        """Measure all in a few kernels, without waiting.

        Args:
            zeros: Whether to count zeros too.
        """
        table = self.table
        if table is not None:
            return Measured(
                layout=self.layout,
                l2=torch.linalg.vector_norm(table, dim=1),
                largest=table.abs().amax(dim=1),
                # Ones and zeros in the table's own format add up several times as fast as booleans.
                zeros=torch.eq(table, 0.0, out=torch.empty_like(table)).sum(1) if zeros else None,
            )
        values = list(self.values)
        counted = [value.numel() - torch.count_nonzero(value) for value in values] if zeros else []
        return Measured(
            layout=self.layout,
            l2=torch.stack(torch._foreach_norm(values, 2)),
            # The norm of order infinity has no vectorized kernel on a CPU: ten times as slow.
            # Group by group, or the magnitudes of a large model would be a second one.
            largest=torch.stack(
                [
                    largest
                    for group in _groups(values)
                    for largest in torch._foreach_max(torch._foreach_abs(group))
                ]
            ),
            zeros=torch.stack(counted) if zeros else None,
        )


@dataclass(frozen=True, kw_only=True)
class ModuleSizes:
    """Sizes by module on several steps; arrays have shape (steps, modules).

    Attributes:
        modules: Names, in the order of the columns.
        elements: Elements of each module's tensors, shape (modules,).
        l2: L2 norm over them; NaN also where squares left FP32's range though no value did.
        largest: Largest magnitude; NaN if an element is.
        known: False where `l2` is NaN for the squares' sake only.
        zero_share: Share of elements that are exactly zero; None if they were not counted.
    """

    modules: tuple[str, ...]
    elements: Floats
    l2: Floats
    largest: Floats
    known: NDArray[np.bool_]
    zero_share: Floats | None


def _groups(values: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, as many at a time as `CHUNK_ELEMENTS` hold, at least one."""
    group: list[Tensor] = []
    size = 0
    for value in values:
        if group and size + value.numel() > CHUNK_ELEMENTS:
            yield group
            group, size = [], 0
        group.append(value)
        size += value.numel()
    if group:
        yield group


def measurable(tensor: Tensor) -> Tensor | None:
    """Return the tensor's values as a real strided FP32 or FP64 tensor; None without any.

    Complex values become pairs of reals, sparse ones their stored values, integers and other
    floating formats FP32. A quantized tensor has no values before it is dequantized: None.
    """
    if tensor.dtype in _WIDE and tensor.layout is torch.strided:
        return tensor if tensor.numel() else None
    value = tensor.detach()
    if value.is_quantized:
        return None
    if value.layout == torch.sparse_coo:
        value = value.coalesce().values()
    elif value.layout != torch.strided:
        value = value.to_dense()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if value.numel() == 0:
        return None
    return value if value.dtype in _WIDE else value.float()


def gather(tensors: Sequence[NamedTensor]) -> Gathered | None:
    """Return the values of tensors on one device, of any kind; None when none has elements."""
    modules: list[str] = []
    values: list[Tensor] = []
    for tensor in tensors:
        value = measurable(tensor.value)
        if value is not None:
            modules.append(tensor.module)
            values.append(value)
    if not values:
        return None
    elements = tuple(value.numel() for value in values)
    if sum(elements) > TABLE_ELEMENTS:
        return Gathered(layout=Layout(tuple(modules), elements), table=None, values=tuple(values))
    fillings: dict[int, Tensor] = {}
    parts: list[Tensor] = []
    for value, size in zip(values, elements, strict=True):
        parts.append(value)
        missing = -size % _WIDTH
        if missing:
            if missing not in fillings:
                fillings[missing] = value.new_zeros(missing)
            parts.append(fillings[missing])
    layout = Layout(tuple(modules), elements, _WIDTH)
    # Flattens and joins in one call: a call per tensor would cost as much as all that follows.
    table = torch._C._nn.flatten_dense_tensors(parts).view(-1, _WIDTH)
    return Gathered(layout=layout, table=table, values=())


class CallSizes:
    """Measures tensors one by one as they pass, so that none is kept alive for it."""

    def __init__(self, *, zeros: bool) -> None:
        self._zeros = zeros
        self._modules: list[str] = []
        self._elements: list[int] = []
        self._numbers: list[tuple[Tensor, ...]] = []

    def add(self, module: str, tensors: Sequence[Tensor]) -> None:
        """Measure the tensors of one call."""
        for tensor in tensors:
            value = measurable(tensor)
            if value is None:
                continue
            low, high = torch.aminmax(value)
            numbers: tuple[Tensor, ...] = (
                torch.linalg.vector_norm(value),
                torch.maximum(-low, high),
            )
            self._modules.append(module)
            self._elements.append(value.numel())
            if self._zeros:
                numbers = (*numbers, value.numel() - torch.count_nonzero(value))
            self._numbers.append(numbers)

    def measured(self) -> Measured | None:
        """Return what was measured so far; None when nothing had elements."""
        if not self._numbers:
            return None
        columns = [torch.stack(column) for column in zip(*self._numbers, strict=True)]
        return Measured(
            layout=Layout(tuple(self._modules), tuple(self._elements)),
            l2=columns[0],
            largest=columns[1],
            zeros=columns[2] if self._zeros else None,
        )


def by_module(steps: Sequence[Measured]) -> ModuleSizes:
    """Fetch the numbers of steps of one layout and combine them by module; waits for the device.

    Sums of squares over a module's tensors are taken in FP64.
    """
    layout = steps[0].layout
    modules = tuple(dict.fromkeys(layout.modules))
    column = {module: k for k, module in enumerate(modules)}
    of_tensor = np.array([column[module] for module in layout.modules])
    of_row = np.repeat(of_tensor, layout.rows)
    order = np.argsort(of_row, kind="stable")
    starts = np.flatnonzero(np.diff(of_row[order], prepend=-1))

    def added(rows: Floats) -> Floats:
        return np.add.reduceat(rows[:, order], starts, axis=1)

    largest = np.maximum.reduceat(_fetched([s.largest for s in steps])[:, order], starts, axis=1)
    row_l2 = _fetched([s.l2 for s in steps])
    with np.errstate(invalid="ignore", over="ignore"):
        l2 = np.sqrt(added(row_l2**2))
    vanished = (l2 == 0) & (largest > 0)
    exceeded = np.isinf(l2) & np.isfinite(largest)
    known = ~(vanished | exceeded)
    elements: Floats = np.bincount(of_tensor, weights=layout.elements).astype(np.float64)
    counted = [s.zeros for s in steps if s.zeros is not None]
    return ModuleSizes(
        modules=modules,
        elements=elements,
        l2=np.where(known, l2, np.nan),
        largest=largest,
        known=known,
        zero_share=_zero_share(added(_fetched(counted)), layout, of_tensor) if counted else None,
    )


def _zero_share(zeros: Floats, layout: Layout, of_tensor: NDArray[np.int_]) -> Floats:
    """Return the share of zeros among real elements: a table is filled up with zeros."""
    elements = np.bincount(of_tensor, weights=layout.elements)
    held = np.array(layout.rows) * layout.width if layout.width else np.array(layout.elements)
    filled: Floats = (zeros - (np.bincount(of_tensor, weights=held) - elements)) / elements
    return filled


def _fetched(rows: Sequence[Tensor]) -> Floats:
    fetched: Floats = torch.stack(list(rows)).cpu().to(torch.float64).numpy()
    return fetched
