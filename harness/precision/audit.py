"""Records which format each op really ran in during one forward pass, without changing a value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FORMAT_NAMES = {
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
_NOT_COMPUTING = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy clone copy_ contiguous detach detach_ lift_fresh alias_copy fill_ zero_ empty "
        "empty_like empty_strided new_empty zeros zeros_like new_zeros ones ones_like full "
        "full_like new_full scalar_tensor arange set_ resize_ _local_scalar_dense is_nonzero "
        "_unsafe_view unsafe_chunk unsafe_split unsafe_split_with_sizes"
    ).split()
)


class AuditMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the formats of the ops that run below autograd, where composite ops are resolved."""

    def __init__(
        self,
        counts: dict[str, dict[str, int]],
        *,
        recording: Callable[[], bool],
        rounds_to_tf32: Callable[[str], bool],
    ) -> None:
        """Create the mode.

        Args:
            counts: Filled as {op name: {format name: calls}}.
            recording: Says whether ops count now.
            rounds_to_tf32: Says whether a product of FP32 tensors called by that op name now
                rounds its operands to TF32.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts
        self._recording = recording
        self._rounds_to_tf32 = rounds_to_tf32

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the op and count it."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not self._recording() or func.is_view or name in _NOT_COMPUTING:
            return result
        formats = [fmt for values in (args, (result,)) if (fmt := _first_format(values))]
        if formats:
            name = name.removeprefix("aten::")
            fmt = max(formats, key=_WIDTH.__getitem__)
            if fmt == "fp32" and self._rounds_to_tf32(name):
                fmt = "tf32"
            per_format = self._counts.setdefault(name, {})
            per_format[fmt] = per_format.get(fmt, 0) + 1
        return result


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
