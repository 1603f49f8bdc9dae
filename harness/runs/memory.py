"""Peak memory of one run: the allocator's own count on a GPU, the process' high-water mark else."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures from its construction on; the peaks of earlier runs in this process do not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reset = False
        if device.type == "cuda":
            # Before, the allocator has no statistics.
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._reset = _reset_high_water_mark()

    def read(self) -> tuple[int | None, str]:
        """Return the peak in bytes and what it counts; None where it cannot be measured."""
        if self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device)
            return allocated, "CUDA allocator: largest sum of live tensors"
        if not self._reset:
            return None, "not measured: the high-water mark cannot be reset on this system"
        peak = _high_water_mark()
        if peak is None:
            return None, "not measured: the high-water mark cannot be read on this system"
        return peak, "whole process: resident set high-water mark (VmHWM), libraries included"


def _reset_high_water_mark() -> bool:
    try:
        # 5 resets the peak resident set size: man 5 proc_pid_clear_refs.
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _high_water_mark() -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
