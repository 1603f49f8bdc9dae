"""What the policy machinery costs: the same model under a policy and under torch's own autocast.

Run as `python benchmarks/policy_machinery.py` on an otherwise idle machine. Both train in BF16 with
the device's own kernels, nothing recorded; the policy adds the table of op overrides (CUDA
autocast's lists on every device) and, for fallback policies, wrapped modules. What runs in FP32
under the one and in BF16 under the other differs a little by design, so the ratio holds that too;
modules kept in FP32 are compared with autocast and the same modules kept in FP32 by hand.
Processor time of the training thread, alternating; the table goes to
`benchmarks/policy_machinery.md`.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.config import load_choice
from harness.precision.execution import applied
from harness.precision.policy import PrecisionPolicy
from harness.runs.environment import bf16_is_native
from harness.workloads.base import Workload
from harness.workloads.registry import make_workload

WARMUP_STEPS = 5
TABLE = Path(__file__).with_suffix(".md")
CPU = torch.device("cpu")
# A forward pass runs inside what is yielded.
Forward = Callable[[], AbstractContextManager[None]]


@contextmanager
def plain_autocast(model: nn.Module, workload: Workload) -> Iterator[Forward]:
    """Train under torch's own autocast for the device."""
    del model, workload
    yield lambda: torch.autocast("cpu", dtype=torch.bfloat16)


@contextmanager
def autocast_by_hand(model: nn.Module, workload: Workload) -> Iterator[Forward]:
    """Train under torch's own autocast with the normalization layers kept out of it."""
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
            module.forward = _in_fp32(module.forward)
    with plain_autocast(model, workload) as forward:
        yield forward


def _in_fp32(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def wrapped(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return forward(x.float())

    return wrapped


def under(
    policy: PrecisionPolicy,
) -> Callable[[nn.Module, Workload], AbstractContextManager[Forward]]:
    """Return the same for a policy."""

    @contextmanager
    def entered(model: nn.Module, workload: Workload) -> Iterator[Forward]:
        batch = next(iter(workload.batches(0, 1)))
        trace = lambda: workload.loss_fn(model, batch)  # noqa: E731
        with applied(policy, model, device=CPU, backend="native", trace_forward=trace) as execution:
            yield execution.forward

    return entered


def seconds_per_step(
    workload: Workload,
    make: Callable[[nn.Module, Workload], AbstractContextManager[Forward]],
    *,
    steps: int,
) -> float:
    """Train; return processor seconds per step after the warm-up."""
    torch.manual_seed(0)
    model = workload.build_model(0)
    with make(model, workload) as forward:
        optimizer = workload.make_optimizer(model)
        times = []
        for batch in workload.batches(0, steps):
            started = time.thread_time()
            with forward():
                loss = workload.loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            times.append(time.thread_time() - started)
    return statistics.fmean(times[WARMUP_STEPS:])


BF16 = PrecisionPolicy(name="bf16", compute_format="bf16")
OPS = PrecisionPolicy(name="ops", compute_format="bf16", fp32_ops=("softmax", "gelu"))
MODULES = PrecisionPolicy(name="modules", compute_format="bf16", fp32_selectors=("normalization",))
# Row -> what is measured, and what it is measured against.
ROWS = {
    "op table: bf16": (under(BF16), plain_autocast),
    "op table: bf16, fp32_ops=[softmax, gelu]": (under(OPS), plain_autocast),
    "wrapped modules: bf16, fp32_selectors=[normalization]": (under(MODULES), autocast_by_hand),
    "A/A: autocast over autocast": (plain_autocast, plain_autocast),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=["char_gpt", "digits_convnet"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    native = "has" if bf16_is_native(CPU) else "lacks"
    text = "\n".join(
        [
            "# Cost of the policy machinery",
            "",
            f"`python benchmarks/policy_machinery.py --workloads {' '.join(options.workloads)} "
            f"--steps {options.steps} --pairs {options.pairs}`",
            "",
            f"One thread; torch {torch.__version__}, Python {platform.python_version()}, "
            f"{torch.backends.cpu.get_cpu_capability()} CPU, which {native} BF16 instructions. "
            "Ratios of steps to those under `torch.autocast`: median and range over pairs.",
            "",
            *(measure(name, options) for name in options.workloads),
        ]
    )
    TABLE.write_text(text, encoding="utf-8")
    print(text)


def measure(name: str, options: argparse.Namespace) -> str:
    """Return the table of one workload."""
    workload = make_workload(load_choice("workload", name))
    ratios: dict[str, list[float]] = {row: [] for row in ROWS}

    def seconds(make: Callable[[nn.Module, Workload], AbstractContextManager[Forward]]) -> float:
        return seconds_per_step(workload, make, steps=options.steps)

    seconds(plain_autocast)
    for _ in range(options.pairs):
        for row, (ours, theirs) in ROWS.items():
            before, own, after = seconds(theirs), seconds(ours), seconds(theirs)
            ratios[row].append(2 * own / (before + after))
    rows = [
        f"| {label} | {statistics.median(own):.3f}x ({min(own):.3f} to {max(own):.3f}) |"
        for label, own in ratios.items()
    ]
    return "\n".join(
        [
            f"## {name}: step under autocast {after * 1e3:.1f} ms",
            "",
            "| policy | ratio |",
            "| --- | --- |",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
