"""Names the phases of a training step for tools that watch from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_OFF: AbstractContextManager[None] = nullcontext()


class Phases:
    """Marks ranges: in torch's profiler, and on a GPU for Nsight (NVTX).

    Args:
        device: Where the steps run.
        enabled: When False, marking a phase costs one call and does nothing.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self._enabled = enabled
        self._nvtx = enabled and device.type == "cuda"

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return the context of one phase: `step 12`, `forward`, `backward`, `unscale`..."""
        return self._marked(name) if self._enabled else _OFF

    @contextmanager
    def _marked(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(name):
            if not self._nvtx:
                yield
                return
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
