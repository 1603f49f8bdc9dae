"""The fused kernel against the CPU's counts: on a GPU, and interpreted where Triton is there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.numerics import exponent_kernel
from harness.numerics.exponents import exponent_histograms

ROOT = Path(__file__).resolve().parents[2]


def odd_tensors(device: str = "cpu") -> list[torch.Tensor]:
    """Return every exponent, signed zeros, subnormals, NaN, empty and 16-bit tensors."""
    generator = torch.Generator().manual_seed(0)
    every = torch.arange(256, dtype=torch.int32).bitwise_left_shift(23).view(torch.float32)
    wide = torch.randint(-(2**31), 2**31 - 1, (40_000,), generator=generator)
    tensors = [
        every,
        -every,
        torch.tensor([0.0, -0.0, 1e-40, torch.inf, torch.nan]),
        torch.empty(0),
        wide.to(torch.int32).view(torch.float32),
        torch.randn(3, 5, generator=generator).bfloat16(),
        torch.ones(1).half() * 2.0**-24,
        torch.randn(100, generator=generator).double(),
    ]
    return [tensor.to(device) for tensor in tensors]


def test_the_table_covers_every_element_once() -> None:
    n = exponent_kernel.CHUNK_ELEMENTS
    one, two = torch.empty(2 * n + 3), torch.empty(5, dtype=torch.bfloat16)
    table = exponent_kernel.chunk_table([(0, one), (7, two)])
    assert table[:, 1].tolist() == [n, n, 3, 5]
    assert table[:, 2].tolist() == [0, 0, 0, 7]
    assert np.diff(table[:3, 0]).tolist() == [4 * n, 4 * n]
    assert table[3, 0] == two.data_ptr()


def test_a_cpu_needs_no_kernel() -> None:
    assert not exponent_kernel.is_available(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_counts_as_the_cpu_does() -> None:
    if not exponent_kernel.is_available(torch.device("cuda")):
        pytest.skip("this torch comes without Triton; the scatter is tested on the meta device")
    expected = exponent_histograms(odd_tensors())
    found = exponent_histograms(odd_tensors("cuda"))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


INTERPRETED = """
import sys
sys.path.insert(0, "tests/numerics")
import torch
from test_exponent_kernel import odd_tensors
from harness.numerics import exponent_kernel
from harness.numerics.exponents import exponent_histograms
tensors = odd_tensors()
expected = exponent_histograms(tensors)
found = exponent_kernel.exponent_histograms([t.reshape(-1) for t in tensors])
assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), found
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton, which comes with CUDA builds of torch, is not installed",
)
def test_the_kernel_interpreted_counts_as_the_cpu_does() -> None:
    """Oracle: the CPU's counts. In a process of its own: Triton reads the variable on import."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, cwd=ROOT, env=environment)
