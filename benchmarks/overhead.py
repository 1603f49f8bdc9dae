"""What the harness costs: a bare training loop against a run with everything recorded.

Run as `python benchmarks/overhead.py` on an otherwise idle machine. Both train the same model under
the same policy on the same batches for the same steps, alternating, so that a machine that drifts
drifts for both. The bare loop clips gradients, since every careful loop does, and steps its
schedule; it records nothing. Times are processor time of the training thread, summed over all steps
but the first few: a busy neighbour lengthens wall time, not this. For every choice of probes:

- `direct`: the time spent inside the added calls, over that of as many bare steps. It resolves a
  tenth of a percent. Not in it: what watching attention logits adds to the ops of a forward pass.
- `end to end`: all of a recorded step over all of a bare one, with the A/A ratio of two bare loops
  beside it as the noise of this very measurement.

The tables go to `benchmarks/overhead.md`.
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
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from harness.config import load_choice
from harness.precision.execution import applied
from harness.precision.policy import PrecisionPolicy
from harness.probes.activations import ActivationHooks
from harness.probes.step_probes import StepProbes
from harness.runs import loop, step
from harness.runs.environment import describe_environment
from harness.runs.record import RunRecord, write_record
from harness.runs.series import SeriesBuffer
from harness.runs.settings import ProbeSettings, RunSettings
from harness.runs.trainer import train
from harness.tracking.location import resolve_store
from harness.tracking.store import log_record, prepare
from harness.workloads.base import Workload
from harness.workloads.registry import make_workload

WARMUP_STEPS = 10
TABLE = Path(__file__).with_suffix(".md")
CPU = torch.device("cpu")


def chosen_probes(choice: str) -> ProbeSettings:
    """Return what `probes=<choice>` asks of a run."""
    values = load_choice("probes", choice)
    return ProbeSettings(
        exponents_every=values["exponents"]["every"],
        weight_gradients_every=values["exponents"]["weight_gradients_every"],
        norms_every=values["norms"]["every"],
        lost_updates_every=values["lost_updates"]["every"],
        memory=values["memory"]["enabled"],
    )


PROBES = {choice: chosen_probes(choice) for choice in ("none", "default", "every_step")}


def bare_loop(
    workload: Workload, policy: PrecisionPolicy, *, steps: int, seed: int, backend: str
) -> float:
    """Train without the harness; return processor seconds per step after the warm-up."""
    torch.manual_seed(seed)
    model = workload.build_model(seed)
    batches = iter(workload.batches(seed, steps))
    times = []
    with applied(policy, model, device=CPU, backend=backend) as execution:
        optimizer = workload.make_optimizer(model)
        scheduler = workload.make_scheduler(optimizer, steps)
        for _ in range(steps):
            started = time.thread_time()
            with execution.forward():
                loss = workload.loss_fn(model, next(batches))
            loss.backward()
            if workload.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            times.append(time.thread_time() - started)
    return statistics.fmean(times[WARMUP_STEPS:])


def recorded_run(
    workload: Workload,
    policy: PrecisionPolicy,
    probes: ProbeSettings,
    *,
    steps: int,
    seed: int,
    backend: str,
) -> RunRecord:
    """Train with everything recorded; the record's step times are processor times."""
    settings = RunSettings(
        steps=steps, seed=seed, device="cpu", num_threads=1, probes=probes, backend=backend
    )
    clock = SimpleNamespace(perf_counter=time.thread_time)
    with mock.patch.object(loop, "time", clock):
        record = train(
            workload,
            policy,
            settings,
            run_key="overhead",
            environment=describe_environment(CPU, num_threads=1),
        )
    if record.status != "completed":
        raise SystemExit(f"the run {record.status}: {record.crash}")
    return record


def seconds_to_store(record: RunRecord, workload: Workload) -> float:
    """Return the seconds of writing the record and its copy in MLflow's store."""
    with tempfile.TemporaryDirectory() as folder:
        store = resolve_store(None, Path(folder))
        prepare(store, [workload.name])
        started = time.perf_counter()
        path = write_record(record, Path(folder) / "runs" / "overhead")
        log_record(store, record, path, experiment=workload.name, sweep_id="overhead")
        return time.perf_counter() - started


class Meter:
    """Adds up the processor time inside the calls that a bare loop does not make."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._counting = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Wrap those calls until the context ends."""
        targets: list[tuple[Any, str, Callable[..., Any]]] = [
            (loop, "iter_tensors", self._timed),
            (loop.Checksum, "add", self._timed),  # of batches and of dropout masks
            (loop.Checksum, "value", self._timed),
            (step, "seed_torch", self._timed),
            (step, "count_nonfinite", self._timed),
            (SeriesBuffer, "add", self._timed),
            (SeriesBuffer, "flush", self._timed),
            (StepProbes, "due", self._timed),
            (StepProbes, "watching", self._timed_context),
            (StepProbes, "around_forward", self._timed_context),
            (StepProbes, "gradients", self._timed),
            (StepProbes, "before_update", self._timed),
            (StepProbes, "after_update", self._timed),
            (StepProbes, "flush", self._timed),
            (ActivationHooks, "_hook", self._timed_result),
            (ActivationHooks, "_gradient_hook", self._timed_result),
        ]
        with ExitStack() as stack:
            for owner, name, wrap in targets:
                stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
            stack.enter_context(mock.patch.object(step.TrainingStep, "run", self._after_warmup()))
            yield

    def _after_warmup(self) -> Callable[..., Any]:
        run = step.TrainingStep.run

        def counted(training: Any, batch: Any, *, step: int, observer: Any) -> Any:
            self._counting = step >= WARMUP_STEPS
            return run(training, batch, step=step, observer=observer)

        return counted

    def _add(self, started: float) -> None:
        if self._counting:
            self.spent += time.thread_time() - started

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._add(started)

        return wrapper

    def _timed_result(self, make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._timed(make(*args, **kwargs))

    def _timed_context(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def entered(*args: Any, **kwargs: Any) -> Iterator[None]:
            started = time.thread_time()
            with ExitStack() as stack:
                stack.enter_context(make(*args, **kwargs))
                self._add(started)
                try:
                    yield
                finally:
                    started = time.thread_time()
            self._add(started)

        return entered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=["char_gpt", "digits_convnet"])
    parser.add_argument("--policies", nargs="+", default=["fp32"])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = [
        measure(name, policy, options) for name in options.workloads for policy in options.policies
    ]
    command = " ".join(
        [
            "python benchmarks/overhead.py --workloads",
            *options.workloads,
            "--policies",
            *options.policies,
            f"--backend {options.backend} --steps {options.steps} --pairs {options.pairs}",
        ]
    )
    text = "\n".join(
        [
            "# Overhead of recording",
            "",
            f"`{command}`",
            "",
            f"One thread; torch {torch.__version__}, Python {platform.python_version()}, "
            f"{torch.backends.cpu.get_cpu_capability()} CPU. Ratios to a bare loop of the same "
            "policy: median and range over pairs. `none`, `default` and `every_step` are the "
            "choices of `probes`; the losses, norms and fingerprints of every step are recorded "
            "in all of them.",
            "",
            *tables,
        ]
    )
    TABLE.write_text(text, encoding="utf-8")
    print(text)


def measure(name: str, policy_name: str, options: argparse.Namespace) -> str:
    """Return the table of one workload under one policy."""
    workload = make_workload(load_choice("workload", name))
    policy = PrecisionPolicy.from_mapping(load_choice("policy", policy_name))
    how = {"steps": options.steps, "backend": options.backend}
    direct: dict[str, list[float]] = {choice: [] for choice in PROBES}
    whole: dict[str, list[float]] = {choice: [] for choice in PROBES}
    noise: list[float] = []
    bare_loop(workload, policy, seed=0, **how)
    for pair in range(options.pairs):
        before = bare_loop(workload, policy, seed=pair, **how)
        for choice, probes in PROBES.items():
            record = recorded_run(workload, policy, probes, seed=pair, **how)
            times = record.series["step_time_s"][WARMUP_STEPS:]
            after = bare_loop(workload, policy, seed=pair, **how)
            noise.append(after / before)
            whole[choice].append(2 * statistics.fmean(times) / (before + after))
            before = after
            meter = Meter()
            with meter.attached():
                recorded_run(workload, policy, probes, seed=pair, **how)
            direct[choice].append(1 + meter.spent / (before * len(times)))
            print(
                f"{name} {policy_name} {pair + 1}/{options.pairs} {choice}: direct "
                f"{direct[choice][-1]:.3f}x, end to end {whole[choice][-1]:.3f}x",
                flush=True,
            )
    stored = seconds_to_store(record, workload)
    rows = [
        f"| {choice} | {_range(direct[choice])} | {_range(whole[choice])} |" for choice in PROBES
    ]
    return "\n".join(
        [
            f"## {name}, {policy_name}: bare step {before * 1e3:.1f} ms",
            "",
            "| probes | direct | end to end |",
            "| --- | --- | --- |",
            *rows,
            f"| A/A, bare over bare | | {_range(noise)} |",
            "",
            f"Afterwards, record and MLflow copy of {options.steps} steps with the last choice: "
            f"{stored:.2f} s.",
            "",
        ]
    )


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.3f}x ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
