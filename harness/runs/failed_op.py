"""Finds out which op of a step raised: C++ code leaves no frame in a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from harness.precision.audit import FORMAT_NAMES
from harness.precision.module_calls import ModuleCalls
from harness.precision.module_names import ROOT
from harness.precision.undisturbed import undisturbed

# After these a device may be unable to run anything again.
_NOT_REPEATABLE = (torch.OutOfMemoryError, torch.AcceleratorError)


@dataclass(frozen=True, kw_only=True)
class FailedOp:
    """The op that raised.

    Attributes:
        name: As in ATen's registry, or the torch function that checks its arguments itself.
        formats: Of its floating-point arguments, each once; empty if it has none.
        module: Whose call it belongs to, None outside of modules and for the model itself.
    """

    name: str
    formats: tuple[str, ...]
    module: str | None

    def __str__(self) -> str:
        inputs = f" of {' and '.join(self.formats)} tensors" if self.formats else ""
        return f"op `{self.name}`{inputs}"


def find_failed_op(
    error: Exception, *, model: nn.Module, again: Callable[[], object]
) -> FailedOp | None:
    """Return the op that raised `error`, found by doing the same once more under observation.

    Args:
        error: What was raised.
        model: Left as it was, but for gradients.
        again: Repeats what raised; whatever it raises is swallowed.

    Returns:
        None where it does not raise the same again, no op raised it, or the device may be dead.
    """
    if isinstance(error, _NOT_REPEATABLE):
        return None
    calls = ModuleCalls()
    watch = _Watch(calls)
    try:
        with undisturbed(model), calls.watching(model), _Functions(watch), _Ops(watch):
            again()
    except Exception as repeated:  # noqa: BLE001 - the crash to report is the first one
        return watch.failed if str(repeated) == str(error) else None
    return None


class _Watch:
    def __init__(self, calls: ModuleCalls) -> None:
        self.failed: FailedOp | None = None
        self._error: Exception | None = None
        self._calls = calls

    def raised(self, error: Exception, name: str, args: tuple[Any, ...]) -> None:
        """Note the innermost op that an error came from: the first to hear of it."""
        if error is self._error:
            return
        module = self._calls.current()[0]
        self._error = error
        self.failed = FailedOp(
            name=name,
            formats=tuple(dict.fromkeys(_formats(args))),
            module=None if module == ROOT else module,
        )


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, watch: _Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self._watch.raised(error, func._schema.name.removeprefix("aten::"), args)
            raise


class _Functions(TorchFunctionMode):
    """Sees what raises before any op is dispatched: a check of its arguments' formats."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            # Python functions of torch call others, which were noted first.
            self._watch.raised(error, resolve_name(func) or func.__name__, args)
            raise


def _formats(values: Iterable[Any]) -> Iterable[str]:
    for value in values:
        if isinstance(value, Tensor) and value.dtype in FORMAT_NAMES:
            yield FORMAT_NAMES[value.dtype]
        elif isinstance(value, (list, tuple)):
            yield from _formats(value)
