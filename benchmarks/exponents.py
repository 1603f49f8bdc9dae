"""How fast exponents are counted, against the cheapest thing that reads a tensor once.

Run as `python benchmarks/exponents.py` on an otherwise idle machine. The measure is the time of
`tensor.abs().max()` on the same tensor, alternating with it; the last row counts tensor by tensor,
as a training step does, tensors of the sizes of the built-in language model's, against one pass
over all of them joined. The table goes to `benchmarks/exponents.md`.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from harness.config import load_choice
from harness.numerics.exponents import exponent_histogram, exponent_histograms
from harness.workloads.registry import make_workload

TABLE = Path(__file__).with_suffix(".md")
SIZES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
# Reading at least this many elements makes one timing.
ELEMENTS_PER_TIMING = 1 << 20


def gradient_like(n: int) -> Tensor:
    """Return values over 30 binades, signs mixed, as gradients have them."""
    generator = torch.Generator().manual_seed(n)
    exponents = torch.empty(n).normal_(-12, 5, generator=generator)
    signs = torch.randint(0, 2, (n,), generator=generator) * 2.0 - 1
    return signs * torch.exp2(exponents)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], *, repeats: int, device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - started) / repeats


def compared(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    elements: int,
    device: torch.device,
    rounds: int,
) -> tuple[float, list[float]]:
    """Return the median time of `ours` in seconds, and its ratio to `theirs` round by round."""
    repeats = max(1, ELEMENTS_PER_TIMING // elements)
    ours(), theirs()
    pairs = [
        (
            seconds(ours, repeats=repeats, device=device),
            seconds(theirs, repeats=repeats, device=device),
        )
        for _ in range(rounds)
    ]
    return statistics.median(a for a, _ in pairs), [a / b for a, b in pairs]


def row(name: str, elements: int, found: tuple[float, list[float]]) -> str:
    time_s, ratios = found
    rate = 4e-9 * elements / time_s
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return (
        f"| {name} | {elements:,} | {1e6 * time_s:,.1f} | {rate:.2f} | "
        f"{statistics.median(ratios):.2f} | {spread} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    rows = []
    for kind in ("gradients", "behind a ReLU"):
        for n in SIZES:
            values = gradient_like(n).to(device)
            values = values.relu() if kind == "behind a ReLU" else values
            found = compared(
                lambda values=values: exponent_histogram(values),
                lambda values=values: values.abs().max(),
                elements=n,
                device=device,
                rounds=options.rounds,
            )
            rows.append(row(kind, n, found))
            print(rows[-1])
    rows.append(by_tensor(device, rounds=options.rounds))
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else (f"{torch.backends.cpu.get_cpu_capability()} CPU, one thread")
    )
    text = "\n".join(
        [
            "# Counting exponents against reading once",
            "",
            f"`python benchmarks/exponents.py --device {device} --rounds {options.rounds}`",
            "",
            f"FP32 on {name}; torch {torch.__version__}, Python {platform.python_version()}. "
            "The ratio is to `abs().max()` of the same tensor.",
            "",
            "| values | elements | microseconds | GB/s | ratio, median | range |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )
    TABLE.write_text(text, encoding="utf-8")
    print(text)


def by_tensor(device: torch.device, *, rounds: int) -> str:
    model = make_workload(load_choice("workload", "char_gpt")).build_model(0)
    tensors = [gradient_like(p.numel()).view(p.shape).to(device) for p in model.parameters()]
    flat = torch.cat([t.reshape(-1) for t in tensors])
    found = compared(
        lambda: exponent_histograms(tensors),
        lambda: flat.abs().max(),
        elements=flat.numel(),
        device=device,
        rounds=rounds,
    )
    return row(f"gradients of char_gpt, {len(tensors)} tensors", flat.numel(), found)


if __name__ == "__main__":
    main()
