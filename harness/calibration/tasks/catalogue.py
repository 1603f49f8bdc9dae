"""The eight small trainings by name, and how a workload is made of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from harness.calibration.tasks.characters import Characters
from harness.calibration.tasks.convnet import ConvNetOnDigits
from harness.calibration.tasks.diffusion import Diffusion
from harness.calibration.tasks.finetune import FineTuning
from harness.calibration.tasks.hooks import OptimizerHook
from harness.calibration.tasks.kernel import KernelOnDigits
from harness.calibration.tasks.problem import Problem
from harness.calibration.tasks.recurrent import Recurrent
from harness.calibration.tasks.regression import Regression
from harness.calibration.tasks.seams import Seam
from harness.calibration.tasks.shards import ShardRule
from harness.calibration.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """One task.

    Attributes:
        name: Also the workload's.
        half: A: constants may be tuned on it; B: rates are reported from it.
        sentence: What it is, for a table.
        seams: Names of the seams that it computes through.
        can_shard: Whether a `ShardRule` can be given.
        steps: Of a run.
        optimizer: `adam`, `adamw` or `sgd` (with momentum).
        make: Returns its problem, reading the data.
    """

    name: str
    half: Literal["A", "B"]
    sentence: str
    seams: tuple[str, ...]
    can_shard: bool
    steps: int
    optimizer: Literal["adam", "adamw", "sgd"]
    make: Callable[[], Problem]


_CHARACTER_SEAMS = (
    "softmax",
    "attention_scores",
    "mask",
    "norm",
    "positions",
    "residual",
    "token_losses",
    "reduce_loss",
    "embedding",
    "logits",
)

_ALL = (
    TaskInfo(
        name="gpt_cool",
        half="A",
        sentence="Character transformer with padded rows and absolute places, cool learning rate",
        seams=_CHARACTER_SEAMS,
        can_shard=Characters.can_shard,
        steps=Characters.steps,
        optimizer="adamw",
        make=lambda: Characters(peak_rate=5e-3),
    ),
    TaskInfo(
        name="convnet",
        half="A",
        sentence="Convolutional net with BatchNorm and dropout on digits, smoothed targets",
        seams=(
            "batch_statistics",
            "running_statistics",
            "pool",
            "logits",
            "token_losses",
            "reduce_loss",
        ),
        can_shard=ConvNetOnDigits.can_shard,
        steps=ConvNetOnDigits.steps,
        optimizer="adamw",
        make=ConvNetOnDigits,
    ),
    TaskInfo(
        name="finetune",
        half="A",
        sentence="Digits net fine-tuned from a trained state to mirrored digits, small rate",
        seams=("norm", "residual", "logits", "token_losses", "reduce_loss"),
        can_shard=FineTuning.can_shard,
        steps=FineTuning.steps,
        optimizer="adam",
        make=FineTuning,
    ),
    TaskInfo(
        name="kernel",
        half="A",
        sentence="Kernel ridge regression on digits in a learned embedding, through a linear solve",
        seams=("pairwise_distance", "exp", "solve", "reduce_loss"),
        can_shard=KernelOnDigits.can_shard,
        steps=KernelOnDigits.steps,
        optimizer="adam",
        make=KernelOnDigits,
    ),
    TaskInfo(
        name="gpt_hot",
        half="B",
        sentence="The character transformer at a learning rate in the chaotic regime",
        seams=_CHARACTER_SEAMS,
        can_shard=Characters.can_shard,
        steps=Characters.steps,
        optimizer="adamw",
        make=lambda: Characters(peak_rate=2e-2),
    ),
    TaskInfo(
        name="mlp_regression",
        half="B",
        sentence="Smooth function of diabetes patients' measurements, loss near zero",
        seams=("cumulative_sum", "norm", "residual", "pool", "reduce_loss"),
        can_shard=Regression.can_shard,
        steps=Regression.steps,
        optimizer="sgd",
        make=Regression,
    ),
    TaskInfo(
        name="recurrent",
        half="B",
        sentence="Gated recurrent net that reads digits row by row",
        seams=("exp", "residual", "pool", "logits", "token_losses", "reduce_loss"),
        can_shard=Recurrent.can_shard,
        steps=Recurrent.steps,
        optimizer="adam",
        make=Recurrent,
    ),
    TaskInfo(
        name="diffusion",
        half="B",
        sentence="Denoising diffusion model of digits, held-out loss of its averaged weights",
        seams=("timesteps", "norm", "residual", "pool", "reduce_loss", "ema"),
        can_shard=Diffusion.can_shard,
        steps=Diffusion.steps,
        optimizer="adamw",
        make=Diffusion,
    ),
)
TASKS: Mapping[str, TaskInfo] = MappingProxyType({info.name: info for info in _ALL})


@lru_cache(maxsize=len(_ALL))
def _problem(name: str) -> Problem:
    return TASKS[name].make()


def make_task(
    name: str,
    seams: Mapping[str, Seam] | None = None,
    hooks: Sequence[OptimizerHook] = (),
    shards: ShardRule | None = None,
) -> Task:
    """Return a task as a workload; its data are read once per process.

    Args:
        name: One of `TASKS`.
        seams: What replaces the defaults of `seams.py`, by name.
        hooks: Installed on the optimizer.
        shards: How a batch is divided and its gradients added; None: not at all.

    Raises:
        ValueError: An unknown name, a seam that the task does not compute through, or shards for a
            task that cannot be divided.
    """
    info = TASKS.get(name)
    if info is None:
        raise ValueError(f"task={name!r} does not exist; allowed: {', '.join(TASKS)}")
    for seam in seams or {}:
        if seam not in info.seams:
            raise ValueError(
                f"seam {seam!r} is not one of task {name}; allowed: {', '.join(info.seams)}"
            )
    if shards is not None and not info.can_shard:
        raise ValueError(f"task {name} cannot be computed in shards: its parts would differ")
    return Task(
        _problem(name),
        name=name,
        description=info.sentence,
        seams=seams or {},
        hooks=hooks,
        shards=shards,
    )
