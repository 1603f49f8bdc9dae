"""What an audited step adds up to: `RunRecord.probes["audit"]`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# (module, family, op, direction, format)
_Op = tuple[str | None, str, str, str, str]
# (module, direction, from, to)
_Cast = tuple[str | None, str, str, str]
# (module, op, direction, format)
_Where = tuple[str | None, str, str, str]

_FULL_FORMATS = ("fp32", "fp64", "complex64", "complex128")


class StepAudit:
    """Counts of one step; magnitudes stay on the device until `result`.

    Attributes:
        forward_formats: Op name -> format -> calls, forward pass only (`RunRecord.audit`).
    """

    def __init__(self) -> None:
        self.forward_formats: dict[str, dict[str, int]] = {}
        self._calls: Counter[_Op] = Counter()
        self._flops: Counter[_Op] = Counter()
        self._casts: Counter[_Cast] = Counter()
        self._elements: Counter[_Cast] = Counter()
        self._where: list[tuple[_Where, int, int]] = []
        self._magnitudes: list[Tensor] = []

    def add_op(self, key: _Op, *, flops: int) -> None:
        """Count one call of (module, family, op, direction, format)."""
        self._calls[key] += 1
        self._flops[key] += flops

    def add_cast(self, key: _Cast, *, elements: int) -> None:
        """Count one conversion of (module, direction, from, to)."""
        self._casts[key] += 1
        self._elements[key] += elements

    def add_magnitudes(
        self, where: _Where, before: Sequence[Tensor], after: Sequence[Tensor]
    ) -> None:
        """Keep the magnitudes of an op's inputs and outputs, 0-dim on the device."""
        self._where.append((where, len(before), len(after)))
        self._magnitudes += [*before, *after]

    def result(self) -> dict[str, Any]:
        """Return the audit as plain JSON values; waits for the device.

        `rows` (module, family, op, direction, format, calls, flops) in order of appearance, where
        `module` is null outside of module calls; `casts` between floating-point formats (module,
        direction, from, to, calls, elements); `flops` of all products;
        `low_precision_flop_share`, the share of them in a format below FP32, null without any;
        `nonfinite` (module, op, direction, format): the ops with a non-finite result although
        their inputs were finite, each once.
        """
        rows = [
            dict(
                zip(("module", "family", "op", "direction", "format"), key, strict=True),
                calls=calls,
                flops=self._flops[key],
            )
            for key, calls in self._calls.items()
        ]
        casts = [
            dict(
                zip(("module", "direction", "from", "to"), key, strict=True),
                calls=calls,
                elements=self._elements[key],
            )
            for key, calls in self._casts.items()
        ]
        total = sum(self._flops.values())
        low = sum(n for key, n in self._flops.items() if key[4] not in _FULL_FORMATS)
        return {
            "rows": rows,
            "casts": casts,
            "flops": total,
            "low_precision_flop_share": low / total if total else None,
            "nonfinite": self._nonfinite(),
        }

    def _nonfinite(self) -> list[dict[str, Any]]:
        if not self._magnitudes:
            return []
        values = _fetched(self._magnitudes)
        found: dict[_Where, None] = {}
        start = 0
        for where, num_before, num_after in self._where:
            middle, end = start + num_before, start + num_before + num_after
            if _finite(values[start:middle]) and not _finite(values[middle:end]):
                found[where] = None
            start = end
        names = ("module", "op", "direction", "format")
        return [dict(zip(names, where, strict=True)) for where in found]


def _fetched(values: Sequence[Tensor]) -> list[float]:
    """Return 0-dim tensors as numbers, with one wait per device."""
    numbers = [math.nan] * len(values)
    for device in {value.device for value in values}:
        places = [place for place, value in enumerate(values) if value.device == device]
        fetched = torch.stack([values[place] for place in places]).tolist()
        for place, number in zip(places, fetched, strict=True):
            numbers[place] = number
    return numbers


def _finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))
