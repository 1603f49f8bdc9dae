"""Records what one training step really did: formats, casts, operations, without changing a value.

Everything is seen below autograd, where composite ops are resolved; nothing waits for the device
before `StepAudit.result`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harness.precision.audit_result import StepAudit
from harness.precision.composites import WatchingMode, run_below
from harness.precision.flops import flops_of
from harness.precision.magnitude import Magnitudes, floating_tensors
from harness.precision.module_calls import ModuleCalls, in_backward
from harness.precision.op_families import family_of, is_product

FORMAT_NAMES = {
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.complex32: "complex32",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
# An op that reads 16-bit values and returns FP32 ones (a sum told its dtype) computed in FP32.
_WIDTH = {name: width for width, name in enumerate(FORMAT_NAMES.values())}

# Moving and making values is not computing; views are recognised by their schema.
NOT_COMPUTING = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy clone copy_ contiguous detach detach_ lift_fresh alias_copy fill_ zero_ empty "
        "empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones "
        "ones_like full full_like new_full scalar_tensor arange set_ resize_ _local_scalar_dense "
        "is_nonzero _unsafe_view unsafe_chunk unsafe_split unsafe_split_with_sizes"
    ).split()
)
CASTS = ("aten::_to_copy", "aten::copy_")


class Audited(Protocol):
    """What the audit asks of the policy in force."""

    def in_forward(self) -> bool:
        """Return whether a forward pass of a training step is running."""

    def beside_the_model(self) -> bool:
        """Return whether ops that run now are the policy's own, or their values thrown away."""

    def rounded_format(self, op: str) -> str | None:
        """Return the format that a product of FP32 tensors rounds its operands to now."""


class FormatCounter(WatchingMode):
    """Counts the formats of the ops of a forward pass."""

    def __init__(self, counts: dict[str, dict[str, int]], *, audited: Audited) -> None:
        """Create the mode; `counts` is filled as {op name: {format name: calls}}."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts, self._audited = counts, audited

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op and count it."""
        result = run_below(func, args, kwargs)
        audited = self._audited
        if audited.in_forward() and not audited.beside_the_model() and computes(func):
            self.count(func, args, result)
        return result

    def count(self, func: Any, args: tuple[Any, ...], result: Any) -> str | None:
        """Count one call; return the format it ran in, None without a floating tensor."""
        name = op_name(func)
        fmt = self.format(func, args, result)
        if fmt is not None:
            per_format = self._counts.setdefault(name, {})
            per_format[fmt] = per_format.get(fmt, 0) + 1
        return fmt

    def format(self, func: Any, args: tuple[Any, ...], result: Any) -> str | None:
        """Return the format an op ran in: that of its operands for a product that rounds them."""
        fmt = format_of(args, result)
        if fmt == "fp32" and is_product(op_name(func)):
            return self._audited.rounded_format(op_name(func)) or fmt
        return fmt


class StepCounter(FormatCounter):  # type: ignore[no-untyped-call]
    """Counts the ops of a whole step by module and direction, with casts, FLOPs and overflows."""

    def __init__(self, audit: StepAudit, *, audited: Audited, calls: ModuleCalls) -> None:
        """Create the mode; `audit` is filled."""
        super().__init__(audit.forward_formats, audited=audited)
        self._audit, self._calls = audit, calls
        self._magnitudes = Magnitudes()

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op and count it."""
        in_step = self._audited.in_forward() or in_backward()
        if func.is_view or not in_step or self._audited.beside_the_model():
            return run_below(func, args, kwargs)
        if func._schema.name in CASTS:
            return self._cast(func, args, kwargs)
        if not computes(func):
            return run_below(func, args, kwargs)
        before = self._inputs(args, kwargs)
        result = run_below(func, args, kwargs)
        module, direction = self._calls.current()
        count = self.count if self._audited.in_forward() else self.format
        fmt = count(func, args, result)
        if fmt is not None:
            name = op_name(func)
            flops = flops_of(func, args, kwargs, result)
            self._audit.add_op((module, family_of(name), name, direction, fmt), flops=flops)
            self._note_overflow(func, (module, name, direction, fmt), before, result)
        return result

    def _cast(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source: Tensor = args[1] if func._schema.name == CASTS[1] else args[0]
        old = FORMAT_NAMES.get(source.dtype)
        before = self._inputs((source,), {})
        result = run_below(func, args, kwargs)
        new = FORMAT_NAMES.get(result.dtype)
        if old and new and old != new:
            module, direction = self._calls.current()
            self._audit.add_cast((module, direction, old, new), elements=result.numel())
            where = (module, op_name(func), direction, new)
            self._note_overflow(func, where, before, result)
        return result

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
        """Return the magnitudes of the inputs; None where a scalar constant is not finite."""
        if any(isinstance(v, float) and v - v != 0.0 for v in (*args, *kwargs.values())):
            return None
        return [self._magnitudes.of(t) for t in floating_tensors((args, kwargs))]

    def _note_overflow(
        self,
        func: Any,
        where: tuple[str | None, str, str, str],
        before: list[Tensor] | None,
        result: Any,
    ) -> None:
        outputs = list(floating_tensors((result,)))
        if before is None or not outputs:
            return
        find = self._magnitudes.renew if func._schema.is_mutable else self._magnitudes.of
        self._audit.add_magnitudes(where, before, [find(tensor) for tensor in outputs])


@contextmanager
def audited_step(audited: Audited, model: nn.Module) -> Iterator[StepAudit]:
    """Audit one training step: everything from its forward pass to the end of its backward pass.

    Args:
        audited: The policy in force.
        model: What is trained; hooks on its modules are gone on exit.

    Yields:
        What is filled meanwhile; ask for its `result()` after the step.
    """
    audit = StepAudit()
    calls = ModuleCalls()
    with calls.watching(model), StepCounter(audit, audited=audited, calls=calls):
        yield audit


def computes(func: Any) -> bool:
    """Return whether an op computes something, rather than views, moves or makes values."""
    return not func.is_view and func._schema.name not in NOT_COMPUTING


def op_name(func: Any) -> str:
    """Return the registry name of an op without `aten::` and overload."""
    return str(func._schema.name).removeprefix("aten::")


def format_of(args: Iterable[Any], result: Any) -> str | None:
    """Return the wider of the formats of an op's first floating argument and first result."""
    formats = [fmt for values in (args, (result,)) if (fmt := _first_format(values))]
    return max(formats, key=_WIDTH.__getitem__) if formats else None


def _first_format(values: Iterable[Any]) -> str | None:
    """Return the format of the first floating-point tensor: the value that the op is about.

    Later ones are often wider by design: statistics of a normalization, an attention's log-sum-exp.
    """
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype in FORMAT_NAMES:
                return FORMAT_NAMES[value.dtype]
        elif isinstance(value, (list, tuple)) and (fmt := _first_format(value)):
            return fmt
    return None
