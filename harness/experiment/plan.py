"""What will run: inputs checked, run keys, an estimate; what can fail early fails here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness import __version__
from harness.analysis.rule import DecisionRule
from harness.config import ConfigError, RunConfig
from harness.config_schema import ProbesConf
from harness.experiment import grid as grids
from harness.experiment.early_checks import decision_rule, policy_of
from harness.experiment.manifest import Manifest, PlannedRun, grid_hash, now, workload_choice
from harness.experiment.policy_check import PolicyCheck, check_policies
from harness.experiment.seed_plans import make_plan_of_seeds, plan_mapping
from harness.precision.policy import PrecisionPolicy
from harness.runs.environment import bf16_is_native
from harness.runs.notes import Note
from harness.runs.preflight import PreflightReport, check_workload
from harness.runs.settings import ProbeSettings
from harness.runs.timing.step_times import device_is_shared
from harness.workloads.base import Workload
from harness.workloads.registry import make_workload

# Measured on the built-in workloads: a low-precision step on a CPU takes 1 to 2 times FP32's.
CPU_LOW_PRECISION_FACTOR = 1.5
SHARED_DEVICE = Note(
    code="SHARED_DEVICE",
    message="other processes hold memory of this GPU; their work slows runs and disturbs times",
)
# Composing, building, storing the record and its copy: measured at 0.5 to 1 s a run.
FIXED_SECONDS = 1.0
# With the default probes a record was measured at 50 kB and 0.3 kB a step, its two copies and rows
# in SQLite at 2.3 kB a step more.
FIXED_BYTES = 200_000
BYTES_PER_STEP = 3_200
# What a run itself does of `probes`, and so what its record holds.
RUN_PROBES = ("exponents", "norms", "lost_updates", "memory", "triage")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked sweep.

    Attributes:
        manifest: What to run.
        rule: Constants of the decision.
        steps: Model name -> steps per run.
        data: Model name -> SHA-256 of its corpus, data set or workload file.
        seconds: Run key -> expected time of the run, alone on the machine.
        bytes_per_run: Disk for its record, its copy and its share of a report.
        notes: What the checks saw, each with the model that it concerns ("" for none).
    """

    manifest: Manifest
    rule: DecisionRule
    steps: dict[str, int]
    data: dict[str, str]
    workers: int
    seconds: dict[str, float]
    bytes_per_run: int
    notes: tuple[tuple[str, Note], ...]


def resolve_device(name: str) -> torch.device:
    """Return the device asked for; `auto` takes CUDA if there is any.

    Raises:
        ConfigError: The name is unknown, or CUDA is asked for and absent.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cpu" and name.split(":")[0] != "cuda":
        raise ConfigError(f"device={name}: one of auto, cpu, cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"device={name}: this torch ({torch.__version__}) sees no CUDA device; "
            "use device=cpu or install a CUDA build and driver"
        )
    return torch.device(name)


def num_threads(config: RunConfig, device: torch.device) -> int:
    """Return intra-op threads per run: 1 on a CPU, where runs go side by side, unless set."""
    if config.launch.threads is not None:
        return config.launch.threads
    return 1 if device.type == "cpu" else torch.get_num_threads()


def num_steps(config: RunConfig, workload: Workload) -> int:
    """Return the steps of a run: the command line's, else the workload's own."""
    return config.train.steps if config.train.steps is not None else workload.default_steps


def probe_settings(probes: ProbesConf) -> ProbeSettings:
    """Return what `probes` asks of a run."""
    return ProbeSettings(
        exponents_every=probes.exponents.every,
        weight_gradients_every=probes.exponents.weight_gradients_every,
        norms_every=probes.norms.every,
        lost_updates_every=probes.lost_updates.every,
        memory=probes.memory.enabled,
    )


def run_key(config: RunConfig, workload: Workload, device: torch.device) -> str:
    """Return 16 hex digits over everything that can change the numbers of a run."""
    identity = {
        "workload": workload.settings,
        "data_sha256": workload.data_sha256,
        "steps": num_steps(config, workload),
        # The steps that count are resolved: the default given explicitly is the same run.
        "train": {k: v for k, v in asdict(config.train).items() if k != "steps"},
        # The stages after the runs are no part of one.
        "probes": {name: asdict(getattr(config.probes, name)) for name in RUN_PROBES},
        "policy": PrecisionPolicy.from_mapping(config.policy).content(),
        "seed": config.seed,
        "device": device.type,
        "cpu": [torch.backends.cpu.get_cpu_capability(), bf16_is_native(device)]
        if device.type == "cpu"
        else None,
        "threads": num_threads(config, device),
        "torch": torch.__version__,
        "harness": __version__,
    }
    text = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_plan(grid: grids.Grid, *, sweep: str, command: str, workers: int) -> Iterator[str | Plan]:
    """Check every workload and policy of the grid; yield a line before each check, then the plan.

    Raises:
        ConfigError: Something is wrong with a workload, a policy or the grid.
    """
    any_run = grid.runs[0]
    device = resolve_device(any_run.device)
    rule = decision_rule(any_run.decision)
    planned: list[PlannedRun] = []
    skipped: list[str] = []
    caveats: dict[str, list[dict[str, Any]]] = {}
    notes = [("", SHARED_DEVICE)] if device_is_shared(device) else []
    # The checks and the timing stage compute as the runs do.
    torch.set_num_threads(num_threads(any_run, device))
    steps: dict[str, int] = {}
    data: dict[str, str] = {}
    seconds: dict[str, float] = {}
    longest = 0
    for members in grids.by_model(grid):
        workload = _load(members[0])
        if workload.name in steps:
            raise ConfigError(
                f"two models of this grid are both named {workload.name!r}; set workload.name"
            )
        yield f"checking {workload.name}: three FP32 steps, one traced step per policy"
        report, check = _check_model(members, workload, device)
        kept = [run for run in members if run.policy["name"] not in check.skipped]
        steps[workload.name] = num_steps(members[0], workload)
        data[workload.name] = workload.data_sha256
        skipped += [f"{workload.name}: {line}" for line in check.skipped.values()]
        remarks = (*report.notes, *check.notes)
        caveats[workload.name] = [asdict(note) for note in remarks]
        notes += [(workload.name, note) for note in remarks]
        planned += [
            PlannedRun(
                run_key=run_key(run, workload, device),
                workload=workload.name,
                choice=workload_choice(run.workload),
                policy=run.policy["name"],
                seed=run.seed,
            )
            for run in kept
        ]
        longest = max(longest, steps[workload.name])
        for run, its_plan in zip(kept, planned[-len(kept) :], strict=True):
            seconds[its_plan.run_key] = _seconds(run, report, steps[workload.name], device)
    sweep_id = any_run.sweep_id or f"{sweep}-{grid_hash([run.run_key for run in planned])}"
    manifest = Manifest(
        sweep_id=sweep_id,
        sweep=sweep,
        command=command,
        device=device.type,
        reference=any_run.reference,
        runs=tuple(planned),
        descriptions={r.policy["name"]: r.policy["description"] for r in grid.runs},
        skipped=tuple(skipped),
        caveats=caveats,
        decision=any_run.decision,
        plan=plan_mapping(
            make_plan_of_seeds(rule, seeds_given=grid.seeds_given), seeds_given=grid.seeds_given
        ),
        created_at=now(),
    )
    yield Plan(
        manifest=manifest,
        rule=rule,
        steps=steps,
        data=data,
        workers=workers,
        seconds=seconds,
        bytes_per_run=FIXED_BYTES + longest * BYTES_PER_STEP,
        notes=tuple(notes),
    )


def _load(run: RunConfig) -> Workload:
    try:
        return make_workload(run.workload)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_model(
    members: Sequence[RunConfig], workload: Workload, device: torch.device
) -> tuple[PreflightReport, PolicyCheck]:
    first = members[0]
    steps = num_steps(first, workload)
    policies = {p.name: p for p in map(policy_of, members)}
    try:
        report = check_workload(workload, seed=first.seed, steps=steps, device=device)
        check = check_policies(
            workload,
            list(policies.values()),
            reference=first.reference,
            seed=first.seed,
            steps=steps,
            device=device,
            backend=first.train.backend,
        )
    except ValueError as error:
        raise ConfigError(f"{workload.name}: {error}") from None
    return report, check


def _seconds(run: RunConfig, report: PreflightReport, steps: int, device: torch.device) -> float:
    slower = device.type == "cpu" and not policy_of(run).computes_in_fp32
    factor = CPU_LOW_PRECISION_FACTOR if slower else 1.0
    evaluations = (1 + run.train.tail_evaluations) * (report.held_out_seconds or 0.0)
    return FIXED_SECONDS + factor * steps * report.step_seconds + evaluations
