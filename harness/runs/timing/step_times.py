"""The timing stage: step times of reference and candidates, alternating in one process.

Runs share a machine with other runs, so their own step times cannot be compared. Here policies take
turns in short blocks of steps on an otherwise idle device, probes off, and ratios are formed block
by block. Emulated policies are not timed: their speed says nothing about the format's.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from harness.precision.execution import Execution, applied
from harness.precision.policy import PrecisionPolicy
from harness.probes.profile import OpTime, profiled_ops
from harness.runs.crash import Position, describe_crash
from harness.runs.determinism import (
    deterministic,
    preserved_random_state,
    seed_everything,
    stream_seed,
)
from harness.runs.dropout import paired_dropout
from harness.runs.phases import Phases
from harness.runs.settings import RunSettings
from harness.runs.step import TrainingStep
from harness.runs.timing.profile import make_profile
from harness.runs.timing.record import Profile, TimeRatio, TimingRecord, time_ratio
from harness.workloads.base import Workload
from harness.workloads.batches import to_device

_OTHERS_MEMORY_BYTES = 2 << 30
# In a record's note, before the policies that could not be profiled.
NO_PROFILE = "no profile of"


def measure_step_times(
    workload: Workload,
    policies: Sequence[PrecisionPolicy],
    settings: RunSettings,
    *,
    reference: str,
    blocks: int = 8,
    steps_per_block: int = 5,
    warmup_steps: int = 3,
    profile_steps: int = 0,
) -> TimingRecord:
    """Time training steps of every policy in turn; return their times and ratios.

    Each block starts from the same weights, a new optimizer and `warmup_steps` untimed steps; the
    order of policies is reversed from block to block. A policy that is emulated or that raises is
    excluded with its reason; without a time of the reference there are no ratios. Where the time
    goes is looked at afterwards: a profiler would slow the timed steps.

    Args:
        workload: The model.
        policies: The grid's policies, the reference among them.
        settings: Of the runs that are timed; probes and evaluations are left out.
        reference: Name of the reference policy.
        blocks: Blocks per policy; the interval is over them.
        steps_per_block: Timed steps in each.
        warmup_steps: Untimed steps before them.
        profile_steps: Steps of each timed policy under torch's profiler, after all blocks.

    Raises:
        ValueError: `reference` is not among `policies`, or a count is below 1.
    """
    if reference not in {policy.name for policy in policies}:
        raise ValueError(f"reference={reference!r} is not among the policies")
    if min(blocks, steps_per_block) < 1 or min(warmup_steps, profile_steps) < 0:
        raise ValueError(
            "blocks and steps_per_block must be at least 1, warmup_steps and profile_steps 0"
        )
    device = torch.device(settings.device)
    excluded: dict[str, str] = {}
    with preserved_random_state(device), deterministic(settings.num_threads, set()):
        stage = _Stage(workload, settings, device, warmup=warmup_steps, timed=steps_per_block)
        complete = _times(stage, policies, excluded, reference=reference, blocks=blocks)
        ratios = {}
        if reference in complete:
            ratios = {
                name: time_ratio(t, complete[reference])
                for name, t in complete.items()
                if name != reference and name not in excluded
            }
        profiles = {}
        if profile_steps:
            timed = [p for p in policies if p.name in complete and p.name not in excluded]
            profiles = _profiles(stage, timed, ratios, reference=reference, steps=profile_steps)
    missing = [
        f"; {NO_PROFILE} {name}: {text}" for name, text in profiles.items() if isinstance(text, str)
    ]
    return TimingRecord(
        workload=workload.name,
        device=device.type,
        reference=reference,
        steps_per_block=steps_per_block,
        step_time_s=complete,
        ratios=ratios,
        excluded=excluded,
        note="".join(
            [
                _note(device, blocks, steps_per_block),
                control_note(policies, ratios),
                *missing,
            ]
        ),
        profiles={name: p for name, p in profiles.items() if isinstance(p, Profile)},
    )


def _times(
    stage: _Stage,
    policies: Sequence[PrecisionPolicy],
    excluded: dict[str, str],
    *,
    reference: str,
    blocks: int,
) -> dict[str, tuple[float, ...]]:
    """Return seconds per step by policy and block, of the policies that had all blocks."""
    times: dict[str, list[float]] = {}
    for block in range(blocks):
        for policy in policies if block % 2 == 0 else list(reversed(policies)):
            if policy.name in excluded:
                continue
            seconds = stage.block(policy, excluded, is_reference=policy.name == reference)
            if seconds is not None:
                times.setdefault(policy.name, []).append(seconds)
    return {name: tuple(t) for name, t in times.items() if len(t) == blocks}


def _profiles(
    stage: _Stage,
    policies: Sequence[PrecisionPolicy],
    ratios: Mapping[str, TimeRatio],
    *,
    reference: str,
    steps: int,
) -> dict[str, Profile | str]:
    """Return a profile per policy, or the sentence on why there is none."""
    found: dict[str, Profile | str] = {}
    for policy in policies:
        ops = stage.profile(policy, steps=steps)
        found[policy.name] = (
            ops
            if isinstance(ops, str)
            else make_profile(
                ops,
                steps=steps,
                policy=policy,
                ratio=ratios.get(policy.name),
                is_reference=policy.name == reference,
            )
        )
    return found


class _Stage:
    """One model, put back to its first weights before every block."""

    def __init__(
        self,
        workload: Workload,
        settings: RunSettings,
        device: torch.device,
        *,
        warmup: int,
        timed: int,
    ) -> None:
        self._workload, self._settings, self._device = workload, settings, device
        self._warmup, self._timed = warmup, timed
        seed_everything(stream_seed(settings.seed, stream="model"), device)
        self._model: nn.Module = workload.build_model(settings.seed).to(device)
        self._start = copy.deepcopy(self._model.state_dict())
        count = warmup + timed
        # The batches of a run: what an iterator yields may depend on how many are asked for.
        iterator = iter(workload.batches(settings.seed, max(settings.steps, count)))
        self._batches = [to_device(next(iterator), device) for _ in range(count)]

    def block(
        self, policy: PrecisionPolicy, excluded: dict[str, str], *, is_reference: bool
    ) -> float | None:
        """Return seconds per step of one block; None when the policy cannot be timed."""
        position = Position(doing="while timing")
        try:
            with self._training(policy, position) as (execution, step):
                seconds = self._time(step)
                if execution.kind == "emulated" and not is_reference:
                    excluded[policy.name] = "emulated on this device"
                    return None
                return seconds
        except Exception as error:  # noqa: BLE001 - a candidate that raises has no time, not no sweep
            report = describe_crash(error, position=position, model=self._model)
            excluded[policy.name] = report.sentence
            return None

    def profile(self, policy: PrecisionPolicy, *, steps: int) -> list[OpTime] | str:
        """Return the ops of some steps after an unwatched one, or why there are none."""
        batches = itertools.cycle(self._batches)
        try:
            with self._training(policy, Position(doing="while profiling")) as (_, step):
                step.run(self._anew(next(batches)), step=0, observer=None)
                self._wait()
                step.phases = Phases(self._device, enabled=True)
                watched = [self._anew(next(batches)) for _ in range(steps)]

                def some_steps() -> None:
                    for k, batch in enumerate(watched, start=1):
                        step.run(batch, step=k, observer=None)

                return profiled_ops(some_steps, device=self._device)
        except Exception as error:  # noqa: BLE001 - a profiler that fails must not cost the times
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    @contextmanager
    def _training(
        self, policy: PrecisionPolicy, position: Position
    ) -> Iterator[tuple[Execution, TrainingStep]]:
        """Yield steps of the model under a policy, from its first weights."""
        self._model.load_state_dict(self._start)
        with (
            paired_dropout(self._device) as masks,
            applied(
                policy,
                self._model,
                device=self._device,
                backend=self._settings.backend,
                trace_forward=lambda: self._workload.loss_fn(
                    self._model, self._anew(self._batches[0])
                ),
            ) as execution,
        ):
            step = TrainingStep(
                self._workload,
                self._model,
                optimizer=self._workload.make_optimizer(self._model),
                scheduler=None,
                policy=policy,
                execution=execution,
                masks=masks,
                seed=self._settings.seed,
                position=position,
            )
            yield execution, step

    def _time(self, step: TrainingStep) -> float:
        started = 0.0
        for i, batch in enumerate([self._anew(batch) for batch in self._batches]):
            if i == self._warmup:
                self._wait()
                started = time.perf_counter()
            step.run(batch, step=i, observer=None)
        self._wait()
        return (time.perf_counter() - started) / self._timed

    def _anew(self, batch: Any) -> Any:
        """Return a copy of a batch: a loss may change it in place."""
        return to_device(batch, self._device)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _note(device: torch.device, blocks: int, steps: int) -> str:
    how = f"{blocks} alternating blocks of {steps} steps, probes off"
    if device.type != "cuda":
        return f"{how}, on a CPU: says nothing about the speed on a GPU"
    if device_is_shared(device):
        return f"{how}; other processes held memory of this GPU, so the times may be disturbed"
    return how


def control_note(policies: Sequence[PrecisionPolicy], ratios: Mapping[str, TimeRatio]) -> str:
    """Return a warning when a control, which does the reference's work, took another time.

    The interval covers what varied between blocks; a control outside it shows that the machine
    disturbed the measurement itself, by at least that much.
    """
    for policy in policies:
        ratio = ratios.get(policy.name)
        if not policy.is_control or ratio is None or ratio.ci_low is None or ratio.ci_high is None:
            continue
        if not ratio.ci_low <= 1.0 <= ratio.ci_high:
            return (
                f"; {policy.name} does the same work as the reference and took {ratio.value:.2f} "
                "of its time: trust no ratio closer to 1 than that"
            )
    return ""


def device_is_shared(device: torch.device) -> bool:
    """Return whether other processes hold memory of this GPU beyond what drivers take."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) > _OTHERS_MEMORY_BYTES
