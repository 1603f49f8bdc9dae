"""Watches every op of one replayed step: where a value left a format's range, and by how much.

Unlike the audit of a run this may wait for the device at every op, and computes a suspicious op
once more in a wider format.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from harness.numerics.formats import Format
from harness.precision.audit import CASTS, FORMAT_NAMES, computes, op_name
from harness.precision.composites import WatchingMode, run_below
from harness.precision.execution import Execution
from harness.precision.magnitude import floating_tensors, magnitude
from harness.precision.module_calls import ModuleCalls, hookable_modules
from harness.probes.triage import FLUSHED, OVERFLOWED, ROUNDING, OpEvent, OutputSeen

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_HALF_TO_FLOAT = ("aten::_softmax", "aten::_log_softmax")
# Op -> which of its arguments must not be zero.
_SINGULAR_AT_ZERO = {
    **dict.fromkeys(("div", "div_", "true_divide", "true_divide_"), 1),
    **dict.fromkeys(("reciprocal", "rsqrt", "pow", "log", "log2", "log10"), 0),
}
# (module, direction, op, how manieth call of them)
OpKey = tuple[str | None, str, str, int]


class OpTrace(WatchingMode):
    """What the ops of one forward and backward pass returned.

    Attributes:
        events: Ops with a non-finite result of finite inputs, and 16-bit ops whose result is
            zero in most places where FP32's is not, in order.
        passed_on: The first op that returned non-finite values, whatever it was given.
        first_nan: The first op that returned NaN without having been given any.
        magnitudes: Largest magnitude of each op's first result.
        outputs: Module -> what its first call returned, in order of the calls' ends.
    """

    def __init__(self, calls: ModuleCalls, execution: Execution) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._execution = calls, execution
        self._counts: Counter[tuple[str | None, str, str]] = Counter()
        self.events: list[tuple[OpKey, OpEvent]] = []
        self.passed_on: OpEvent | None = None
        self.first_nan: OpEvent | None = None
        self.magnitudes: dict[OpKey, float] = {}
        self.outputs: dict[str, OutputSeen] = {}
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Leave alone what does not belong to the model; hand the rest on to `watch`."""
        if self._execution.beside_the_model():
            return run_below(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op and look at what it returned."""
        if not computes(func) and func._schema.name not in CASTS:
            return run_below(func, args, kwargs)
        before = (args, kwargs)
        read = (args[1:], kwargs) if func._schema.name == CASTS[1] else before
        if func._schema.is_mutable:
            before = _cloned(before)
        sizes_before = [float(magnitude(t)) for t in floating_tensors(read)]
        result = run_below(func, args, kwargs)
        outputs = [t for t in floating_tensors((result,)) if t.numel()]
        if outputs:
            self._look(func, before, outputs, sizes_before)
        return result

    def _look(
        self, func: Any, before: Any, outputs: list[Tensor], sizes_before: list[float]
    ) -> None:
        # A mask of -inf is a constant that somebody wrote.
        constants = (v for v in (*before[0], *before[1].values()) if isinstance(v, float))
        finite_before = all(map(_finite, (*sizes_before, *constants)))
        module, direction = self._calls.current()
        where = (module, direction, op_name(func))
        key = (*where, self._counts[where])
        self._counts[where] += 1
        sizes = [float(magnitude(t)) for t in outputs]
        self.magnitudes[key] = sizes[0]
        for tensor in outputs:
            self._made[tensor] = self._maker(func, before[0], tensor, key)
        bad = next((t for t, size in zip(outputs, sizes, strict=True) if not _finite(size)), None)
        if bad is not None:
            event = _event(key, bad, OVERFLOWED, value=None, finite_inputs=finite_before)
            if finite_before:
                wider = _magnitude_in_wider(func, before, outputs.index(bad), bad.dtype)
                event = dataclasses.replace(event, zeros_from=self._zeros_from(func, before[0]))
                self.events.append((key, event.reaching(wider)))
            if self.passed_on is None:
                self.passed_on = event
            if self.first_nan is None and any(map(math.isnan, sizes)):
                self.first_nan = None if any(map(math.isnan, sizes_before)) else event
        elif finite_before and outputs[0].dtype in _SIXTEEN_BIT and _zero_share(outputs[0]) > 0.5:
            self._look_for_flush(func, before, outputs[0], key)

    def _maker(self, func: Any, args: tuple[Any, ...], result: Tensor, key: OpKey) -> OpEvent:
        """Return the op that made a tensor's zeros; a cast only those that were none before it."""
        if func._schema.name in CASTS:
            source = args[1] if func._schema.name == CASTS[1] else args[0]
            made: OpEvent | None = self._made.get(source)  # type: ignore[no-untyped-call]
            if made is not None and _has_zeros(source):
                return made
        return _event(key, result, OVERFLOWED, value=None, finite_inputs=True)

    def _zeros_from(self, func: Any, args: tuple[Any, ...]) -> OpEvent | None:
        """Return the op that made the zeros at which this one is singular."""
        at = _SINGULAR_AT_ZERO.get(op_name(func))
        read = args[at] if at is not None and at < len(args) else None
        if not isinstance(read, Tensor) or not _has_zeros(read):
            return None
        made: OpEvent | None = self._made.get(read)  # type: ignore[no-untyped-call]
        return made

    def _look_for_flush(self, func: Any, before: Any, output: Tensor, key: OpKey) -> None:
        wide = _in_wider(func, before, torch.float32, 0)
        if wide is None or _flushed_share(wide, output) <= 0.5:
            return
        event = _event(key, output, FLUSHED, value=float(magnitude(wide)), finite_inputs=True)
        self.events.append((key, event))

    def _rounded(self, before: Tensor, after: Tensor, fmt: Format) -> None:
        """See an operand of a product that is rounded to a format that no tensor has."""
        if not before.numel():
            return
        with _disable_current_modes():
            size, rounded_size = float(magnitude(before)), float(magnitude(after))
            lost = _flushed_share(before, after)
        kind = OVERFLOWED if not _finite(rounded_size) else FLUSHED if lost > 0.5 else None
        if kind is None or not _finite(size):
            return
        module, direction = self._calls.current()
        where = (module, direction, ROUNDING)
        key = (*where, self._counts[where])
        self._counts[where] += 1
        event = _event(key, before, kind, value=size, finite_inputs=True)
        self.events.append((key, dataclasses.replace(event, format=fmt.name)))

    def _seen(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = [t.detach() for t in floating_tensors((output,)) if t.numel()]
            if tensors and name not in self.outputs:
                with _disable_current_modes():
                    self.outputs[name] = OutputSeen(
                        largest=max(float(magnitude(t)) for t in tensors),
                        zero_share=_zero_share(tensors[0]),
                    )

        return hook

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Be the context around one forward and backward pass of the model."""
        handles = [
            module.register_forward_hook(self._seen(name))
            for name, module in hookable_modules(model)
            if name
        ]
        try:
            products = self._execution.products
            observed = nullcontext() if products is None else products.observed(self._rounded)
            with self._calls.watching(model), observed, self:
                yield
        finally:
            for handle in handles:
                handle.remove()


def _event(
    key: OpKey, output: Tensor, kind: str, *, value: float | None, finite_inputs: bool
) -> OpEvent:
    module, direction, op, _ = key
    return OpEvent(
        module=module,
        direction=direction,
        op=op,
        format=FORMAT_NAMES.get(output.dtype, str(output.dtype).removeprefix("torch.")),
        kind=kind,
        value=value,
        finite_inputs=finite_inputs,
    )


def _magnitude_in_wider(func: Any, before: Any, index: int, dtype: torch.dtype) -> float | None:
    wide = _in_wider(
        func, before, torch.float64 if dtype is torch.float32 else torch.float32, index
    )
    return None if wide is None else float(magnitude(wide))


def _in_wider(func: Any, before: Any, dtype: torch.dtype, index: int) -> Tensor | None:
    """Return one floating result of an op computed on widened inputs; None if it refuses them."""
    if func._schema.name in CASTS:
        source: Tensor = before[0][1] if func._schema.name == CASTS[1] else before[0][0]
        return source.detach().to(dtype)
    args, kwargs = _widened(before, dtype)
    if func._schema.name in _HALF_TO_FLOAT:
        args = (*args[:2], False)  # what converts 16-bit inputs itself refuses others
    try:
        result = func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError):
        return None  # an argument says the dtype in its own way, or there is no such kernel
    outputs = [t for t in floating_tensors((result,)) if t.numel()]
    return outputs[index] if index < len(outputs) else None


def _widened(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        narrow = value.dtype in (*_SIXTEEN_BIT, torch.float32)
        return value.detach().to(dtype) if narrow else value
    if isinstance(value, torch.dtype):
        return dtype if value in (*_SIXTEEN_BIT, torch.float32) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_widened(part, dtype) for part in value)
    if isinstance(value, dict):
        return {key: _widened(part, dtype) for key, part in value.items()}
    return value


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return type(value)(_cloned(part) for part in value)
    if isinstance(value, dict):
        return {key: _cloned(part) for key, part in value.items()}
    return value


def _flushed_share(before: Tensor, after: Tensor) -> float:
    """Return the share of the non-zero elements of `before` that are zero in `after`."""
    nonzero = int(torch.count_nonzero(before))
    return 1.0 - int(torch.count_nonzero(after)) / nonzero if nonzero else 0.0


def _has_zeros(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and bool((tensor == 0).any())


def _zero_share(tensor: Tensor) -> float:
    return 1.0 - int(torch.count_nonzero(tensor)) / tensor.numel()


def _finite(value: float) -> bool:
    return math.isfinite(value)
