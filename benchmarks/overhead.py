"""What the harness costs: a bare training loop against a run with everything recorded.

Run as `python benchmarks/overhead.py` on an otherwise idle machine. Both train the same model on
the same batches for the same steps, alternating, so that a machine that drifts drifts for both.
The bare loop clips gradients, since every careful loop does, and steps its schedule; it records
nothing. Two figures are printed, because wall time cannot resolve a few percent here:

- the ratio of the two median step times, pair by pair, with the A/A ratio of two bare loops beside
  it as the noise of this very measurement;
- the processor time spent in the added calls themselves, over that of as many bare steps: a busy
  neighbour lengthens wall time, not this.

The table goes to `benchmarks/overhead.md`.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch

from harness.config import load_choice
from harness.precision.policy import PrecisionPolicy
from harness.probes.step_probes import StepProbes
from harness.runs import loop, step
from harness.runs.environment import describe_environment
from harness.runs.record import write_record
from harness.runs.series import SeriesBuffer
from harness.runs.settings import RunSettings
from harness.runs.trainer import train
from harness.tracking.location import resolve_store
from harness.tracking.store import log_record, prepare
from harness.workloads.base import Workload
from harness.workloads.registry import make_workload

WARMUP_STEPS = 10
TABLE = Path(__file__).with_suffix(".md")


def bare_loop(
    workload: Workload, *, steps: int, seed: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Train without the harness; return seconds per step after the warm-up."""
    torch.manual_seed(seed)
    model = workload.build_model(seed)
    optimizer = workload.make_optimizer(model)
    scheduler = workload.make_scheduler(optimizer, steps)
    batches = iter(workload.batches(seed, steps))
    times = []
    for _ in range(steps):
        started = clock()
        loss = workload.loss_fn(model, next(batches))
        loss.backward()
        if workload.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(clock() - started)
    return times[WARMUP_STEPS:]


def recorded_run(workload: Workload, *, steps: int, seed: int) -> tuple[list[float], float]:
    """Train with everything recorded and tracked; return step times and seconds spent after."""
    settings = RunSettings(steps=steps, seed=seed, device="cpu", num_threads=1)
    environment = describe_environment(torch.device("cpu"), num_threads=1)
    record = train(
        workload,
        PrecisionPolicy(name="fp32"),
        settings,
        run_key="overhead",
        environment=environment,
    )
    if record.status != "completed":
        raise SystemExit(f"the run {record.status}: {record.crash}")
    with tempfile.TemporaryDirectory() as folder:
        store = resolve_store(None, Path(folder))
        prepare(store, [workload.name])
        started = time.perf_counter()
        path = write_record(record, Path(folder) / "runs" / "overhead")
        log_record(store, record, path, experiment=workload.name, sweep_id="overhead")
        after = time.perf_counter() - started
    return list(record.series["step_time_s"][WARMUP_STEPS:]), after


@contextmanager
def timed_calls(spent: list[float]) -> Iterator[None]:
    """Add up the time inside the calls that a bare loop does not make."""

    def timed(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object, **kwargs: object) -> object:
            started = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                spent[0] += time.thread_time() - started

        return wrapper

    targets = [
        (loop, "iter_tensors"),
        (loop.Checksum, "add"),  # of batches and of dropout masks
        (loop.Checksum, "value"),
        (step, "seed_torch"),
        (step, "count_nonfinite"),
        (SeriesBuffer, "add"),
        (SeriesBuffer, "flush"),
        (StepProbes, "gradients"),
        (StepProbes, "before_update"),
        (StepProbes, "after_update"),
    ]
    with ExitStack() as stack:
        for owner, name in targets:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=["char_gpt", "digits_convnet"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = [measure(name, options) for name in options.workloads]
    text = "\n".join(
        [
            "# Overhead of recording",
            "",
            f"`python benchmarks/overhead.py --workloads {' '.join(options.workloads)} "
            f"--steps {options.steps} --pairs {options.pairs}`",
            "",
            f"FP32, one thread; torch {torch.__version__}, Python {platform.python_version()}, "
            f"{torch.backends.cpu.get_cpu_capability()} CPU. Ratios to a bare loop.",
            "",
            *tables,
        ]
    )
    TABLE.write_text(text, encoding="utf-8")
    print(text)


def measure(name: str, options: argparse.Namespace) -> str:
    """Return the table of one workload."""
    workload = make_workload(load_choice("workload", name))
    ratios, noise, after = [], [], []
    bare_loop(workload, steps=options.steps, seed=0)
    for pair in range(options.pairs):
        first = statistics.median(bare_loop(workload, steps=options.steps, seed=pair))
        times, seconds = recorded_run(workload, steps=options.steps, seed=pair)
        second = statistics.median(bare_loop(workload, steps=options.steps, seed=pair))
        base = (first + second) / 2
        ratios.append(statistics.median(times) / base)
        noise.append(second / first)
        after.append(seconds / (base * options.steps))
        print(f"{name} {pair + 1}/{options.pairs}: {ratios[-1]:.3f}x (A/A {noise[-1]:.3f}x)")
    direct = [_direct_share(workload, steps=options.steps, seed=k) for k in range(3)]
    return "\n".join(
        [
            f"## {name}, bare step {base * 1e3:.1f} ms",
            "",
            "| figure | median | range |",
            "| --- | --- | --- |",
            _row("step time, recorded over bare", ratios),
            _row("A/A: bare over bare, the noise of this measurement", noise),
            _row("processor time inside the added calls, over that of the bare steps", direct),
            _row(f"record and MLflow copy after {options.steps} steps, over their time", after),
            "",
        ]
    )


def _row(name: str, values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"| {name} | {statistics.median(values):.3f} | {low:.3f} to {high:.3f} |"


def _direct_share(workload: Workload, *, steps: int, seed: int) -> float:
    """Return processor time inside the added calls over that of as many bare steps."""
    spent = [0.0]
    with timed_calls(spent):
        recorded_run(workload, steps=steps, seed=seed)
    bare = bare_loop(workload, steps=steps, seed=seed, clock=time.thread_time)
    return spent[0] / (statistics.median(bare) * steps)


if __name__ == "__main__":
    main()
