"""A catalogue of two tiny tasks, of the shape of `harness.calibration.arms`."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiny_workloads import TinyWorkload, cross_entropy

from harness.precision.policy import PrecisionPolicy

TASKS = ("apples", "pears")
STEPS = 30
# A run then takes at least this long, so that a test can end a bank in its middle.
PAUSE_VARIABLE = "BANK_ARMS_PAUSE_S"


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    kind: str
    family: str
    dose: str = ""
    policy: PrecisionPolicy
    loss: Callable[..., Any] = cross_entropy
    sentence: str = "a test"


def shrunk(model, batch):
    return 0.5 * cross_entropy(model, batch)


def fatal(model, batch):
    os._exit(7)


def arm(name: str, kind: str, loss=cross_entropy, **policy) -> Arm:
    return Arm(
        name=name, kind=kind, family=name, policy=PrecisionPolicy(name=name, **policy), loss=loss
    )


ARMS = (
    arm("fp32", "reference"),
    arm("fp32_noise", "null", perturbation=2.0**-8),
    arm("shrunk@a", "fault", shrunk),
)


def arms_of(task: str, *, quick: bool = False) -> tuple[Arm, ...]:
    return ARMS[:2] if quick else ARMS


def workload_of(task: str, arm: Arm) -> TinyWorkload:
    return Slow(name=task, loss=arm.loss, default_steps=STEPS, settings={"task": task})


@dataclasses.dataclass
class Slow(TinyWorkload):
    def build_model(self, seed: int):
        time.sleep(float(os.environ.get(PAUSE_VARIABLE, "0")))
        return super().build_model(seed)
