"""Lost updates: the optimizer wants to change a weight and its format cannot hold the change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.probes.flat import flat_chunks


@dataclass
class LostUpdateProbe:
    """Counts weight updates that BF16 storage loses, on observed steps.

    Two views, by the dtype the weights are stored in. BF16 weights are *observed*: the gradient is
    not zero and the weight is what it was. FP32 weights give a *what-if*: with `dw` the update that
    the FP32 run made, `bf16(w) + dw` rounds back to `bf16(w)`.

    Attributes:
        stored_format: `fp32` or `bf16`: which weights are counted. With another format nothing is.
    """

    stored_format: str
    _lost: list[Tensor] = field(default_factory=list)
    _total: list[Tensor] = field(default_factory=list)
    _before: list[Tensor] = field(default_factory=list)
    _gradients: list[Tensor | None] = field(default_factory=list)

    def before_update(self, parameters: Sequence[Tensor]) -> None:
        """Remember weights (and where a gradient is zero) just before the optimizer's step."""
        chosen = self._chosen(parameters)
        self._before = [_real(p).clone() for p in chosen]
        if self.stored_format == "bf16":
            # Kept by reference: an optimizer may write into a gradient, but not make it zero.
            self._gradients = [None if p.grad is None else p.grad for p in chosen]

    def after_update(self, parameters: Sequence[Tensor]) -> None:
        """Count what became of the updates; a skipped step has none."""
        after = [_real(p) for p in self._chosen(parameters)]
        if self.stored_format == "bf16":
            pairs = [
                _observed(old, new, gradient)
                for old, new, gradient in zip(self._before, after, self._gradients, strict=True)
                if gradient is not None
            ]
        else:
            pairs = [
                _what_if(old, new)
                for old, new in zip(flat_chunks(self._before), flat_chunks(after), strict=True)
            ]
        zero = torch.zeros((), dtype=torch.int64)
        self._lost.append(sum((lost for lost, _ in pairs), start=zero) if pairs else zero)
        self._total.append(sum((total for _, total in pairs), start=zero) if pairs else zero)
        self._before, self._gradients = [], []

    def skipped(self) -> None:
        """Count a step at which the optimizer did not run."""
        zero = torch.zeros((), dtype=torch.int64)
        self._lost.append(zero)
        self._total.append(zero)

    def sampled(self) -> dict[str, tuple[float, ...]]:
        """Return `lost_update_bf16` and its denominator `update_total` (updates that are not 0)."""
        if self.stored_format not in ("fp32", "bf16"):
            return {}
        return {
            "lost_update_bf16": tuple(float(x) for x in self._lost),
            "update_total": tuple(float(x) for x in self._total),
        }

    def _chosen(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        wanted = {
            "bf16": (torch.bfloat16,),
            "fp32": (torch.float32, torch.float64, torch.complex64, torch.complex128),
        }.get(self.stored_format, ())
        return [p.detach() if p.grad is None else p for p in parameters if p.dtype in wanted]


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _observed(old: Tensor, new: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    wanted = gradient != 0
    return torch.count_nonzero(wanted & (new == old)), torch.count_nonzero(wanted)


def _what_if(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    update = new - old
    stored = old.to(torch.bfloat16)
    kept = (stored.float() + update).to(torch.bfloat16)
    wanted = update != 0
    return torch.count_nonzero(wanted & (kept == stored)), torch.count_nonzero(wanted)
