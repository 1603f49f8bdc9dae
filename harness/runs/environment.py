"""What a run ran on: versions, device and processor features, as plain data for the record."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy
import torch

from harness import __version__
from harness.precision.emulation.sixteen_bit import native_bf16_matmul


def describe_environment(device: torch.device, *, num_threads: int | None) -> dict[str, Any]:
    """Return versions, device and processor features of this process.

    Args:
        device: Where the model is trained.
        num_threads: Intra-op threads of the run; None for torch's own choice.

    Returns:
        Plain data; `device_kind` is `cpu` or `cuda`, `cpu_capability` is what torch's kernels were
        chosen for, `bf16_native` whether the device has BF16 arithmetic.
    """
    environment: dict[str, Any] = {
        "harness": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device_kind": device.type,
        "device_name": _device_name(device),
        "num_threads": num_threads if num_threads is not None else torch.get_num_threads(),
        "cpu_cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_native": bf16_is_native(device),
    }
    if device.type == "cuda":
        environment["cuda"] = torch.version.cuda
        environment["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return environment


def bf16_is_native(device: torch.device) -> bool:
    """Return whether the device computes in BF16 itself: Ampere or newer, AVX-512 BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    return native_bf16_matmul()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return _processor_name() or platform.processor() or platform.machine()


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""
