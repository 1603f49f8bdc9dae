"""What a task is trained under: reference, null arms, harmless formats, faults in doses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from harness.calibration.doses import DOSES, LEFT_OUT, QUICK
from harness.calibration.faults.catalogue import FAULTS
from harness.calibration.null_arms import ANOTHER_ORDER, HARMLESS, PERTURBATIONS, SENTENCES
from harness.calibration.tasks import TASKS, make_task
from harness.calibration.tasks.hooks import OptimizerHook
from harness.calibration.tasks.shards import ShardRule
from harness.precision.policy import PrecisionPolicy
from harness.workloads.base import Workload

REFERENCE = "fp32"
Kind = Literal["reference", "null", "harmless", "fault"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of training a task.

    Attributes:
        name: Unique within a task, safe as a file name: `low_ema@bf16`, `bf16`.
        kind: What it was planted as; what it is worth is decided from all seeds.
        family: Name of the fault, or of the arm without its dose.
        dose: Of the fault; empty if it has only one.
        policy: Its precision policy, of the arm's name.
        seams: What replaces the task's seams.
        hooks: What acts around the optimizer's step.
        shards: How the gradients of parts of a batch are added, if not all at once.
        sentence: What is wrong, and who meets it.
    """

    name: str
    kind: Kind
    family: str
    dose: str = ""
    policy: PrecisionPolicy
    seams: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    hooks: tuple[OptimizerHook, ...] = ()
    shards: ShardRule | None = None
    sentence: str


def arms_of(task: str, *, quick: bool = False) -> tuple[Arm, ...]:
    """Return the arms of a task, the reference first.

    Args:
        task: One of `TASKS`.
        quick: Only the few of the quick study; empty for a task that it leaves out.

    Raises:
        ValueError: No such task.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is not allowed; allowed: {', '.join(TASKS)}")
    arms = (_plain(REFERENCE, "reference"), *_null(task), *_harmless(task), *_faulty(task))
    if not quick:
        return arms
    return tuple(arm for arm in arms if arm.name in QUICK.get(task, ()))


def workload_of(task: str, arm: Arm) -> Workload:
    """Return the task as this arm trains it."""
    return make_task(task, arm.seams, arm.hooks, arm.shards)


def planted(fault: str, dose: str) -> Arm:
    """Return a fault in one dose as an arm, whether or not a task has what it replaces.

    Raises:
        ValueError: No such fault, or not a dose of it.
    """
    if fault not in FAULTS:
        raise ValueError(f"fault={fault!r} is not allowed; allowed: {', '.join(FAULTS)}")
    plant = FAULTS[fault].plant(dose)
    name = f"{fault}@{dose}" if dose else fault
    explained = f" Dose {dose}: {FAULTS[fault].dose}." if dose else ""
    return Arm(
        name=name,
        kind="fault",
        family=fault,
        dose=dose,
        policy=PrecisionPolicy(name=name, **plant.policy),
        seams=plant.seams,
        hooks=plant.hooks,
        shards=plant.shards,
        sentence=FAULTS[fault].sentence + explained,
    )


def _plain(name: str, kind: Kind, **policy: Any) -> Arm:
    family, _, dose = name.partition("@")
    return Arm(
        name=name,
        kind=kind,
        family=family,
        dose=dose,
        policy=PrecisionPolicy(name=name, **policy),
        sentence=SENTENCES[family],
    )


def _null(task: str) -> Iterator[Arm]:
    for name, perturbation in PERTURBATIONS.items():
        yield _plain(name, "null", perturbation=perturbation)
    order = {seam: ANOTHER_ORDER[seam] for seam in TASKS[task].seams if seam in ANOTHER_ORDER}
    yield _rewritten("fp32_order", seams=order)
    if TASKS[task].can_shard:
        rule = ShardRule(shards=2, accumulate=_add, send=_unchanged)
        yield _rewritten("fp32_shards", shards=rule)


def _rewritten(name: str, **how: Any) -> Arm:
    policy = PrecisionPolicy(name=name)
    return Arm(name=name, kind="null", family=name, policy=policy, sentence=SENTENCES[name], **how)


def _harmless(task: str) -> Iterator[Arm]:
    for name, fields in HARMLESS.items():
        if name not in LEFT_OUT.get(task, ()):
            yield _plain(name, "harmless", **fields)


def _faulty(task: str) -> Iterator[Arm]:
    for name in DOSES[task]:
        fault, _, dose = name.partition("@")
        yield planted(fault, dose)


def _add(total: Tensor, part: Tensor) -> Tensor:
    return total + part


def _unchanged(part: Tensor) -> Tensor:
    return part
