"""A planted precision fault as a value: what it replaces in a training, and who meets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.calibration.tasks.hooks import OptimizerHook
from harness.calibration.tasks.shards import ShardRule


@dataclass(frozen=True, kw_only=True)
class Plant:
    """What one dose of a fault changes; all of it empty is a plain FP32 run.

    Attributes:
        policy: Fields of `PrecisionPolicy` that differ from FP32's.
        seams: Seam of a task -> the function that takes its place.
        hooks: What acts around the optimizer's step.
        shards: How the parts of a batch's gradient are added, if not all at once.
    """

    policy: Mapping[str, Any] = field(default_factory=dict)
    seams: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    hooks: tuple[OptimizerHook, ...] = ()
    shards: ShardRule | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of mistake, in doses.

    Attributes:
        name: In lower case, without `@`.
        sentence: What is wrong, and where people meet it.
        source: A report of it as `owner/repository#number`; empty where it is common knowledge.
        dose: What a dose is, in words; empty if there is only one, called the empty string.
        plant: Dose -> what to change. Raises ValueError for a dose it cannot read.
    """

    name: str
    sentence: str
    source: str = ""
    dose: str = ""
    plant: Callable[[str], Plant]
