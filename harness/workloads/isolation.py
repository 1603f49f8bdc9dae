"""Run foreign code without letting it move this process's random numbers, threads or defaults."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def global_state_kept() -> Iterator[None]:
    """Restore random states (torch on all devices, NumPy, Python), threads and default dtype."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if on_gpu else ()
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            torch.set_default_dtype(dtype)  # noqa: TID251
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), NumPy and Python, for code that draws without a generator."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)
