"""What the study finds about one task, as values that are stored as JSON and read back."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.calibration.truth import Effect, Truth
from harness.runs.record_files import stored_number, strict_json

Group = Literal["null", "harmless", "quiet_fault", "harm", "grey", "intermittent", "void"]
GROUPS: Mapping[Group, str] = {
    "null": "FP32 against FP32 (nothing planted)",
    "harmless": "low precision, harmless by all seeds",
    "quiet_fault": "planted fault that does no harm to the loss of these steps",
    "harm": "harmful by all seeds",
    "grey": "between half a margin and one, or not known well enough",
    "intermittent": "fails in some seeds, but in fewer than a quarter",
    "void": "no pairs, or an FP32 reference that cannot judge",
}


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How one rule under one plan judged one arm, over all draws of seeds.

    Attributes:
        accept: Share of the draws.
        reject: Share of the draws.
        inconclusive: Share of the draws.
        seeds: Pairs looked at, mean over the draws.
        runs: What the candidate's runs cost, in whole runs: one that ended early counts as the
            share of its steps that it ran. Mean over the draws.
        pairs: Pairs of the plan: of its last look.
    """

    accept: float
    reject: float
    inconclusive: float
    seeds: float
    runs: float
    pairs: int


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm of one task: what was planted, what it is, and how the rules judged it.

    Attributes:
        task: Its task.
        name: Unique within the task.
        kind: What it was planted as.
        family: Of the fault, or of the arm without its dose.
        dose: Empty where there is one dose.
        sentence: What is wrong with it.
        truth: From all seeds.
        probe: Codes of the same-point probe's failures; None without a measurement.
        num_seeds: Stored seeds that were drawn from.
        tallies: `<rule>@<plan>` -> what it said.
    """

    task: str
    name: str
    kind: str
    family: str
    dose: str
    sentence: str
    truth: Truth
    probe: tuple[str, ...] | None
    num_seeds: int
    tallies: Mapping[str, Tally]

    @property
    def group(self) -> Group:
        """Which rates it counts in; a null arm is null whatever its seeds happened to do."""
        if self.truth.label == "void":
            return "void"
        if self.kind == "null":
            return "null"
        if self.truth.label == "benign":
            return "harmless" if self.kind == "harmless" else "quiet_fault"
        return self.truth.label

    @property
    def size_class(self) -> str:
        """Class of its size: see `SIZE_CLASSES`; empty below half a margin."""
        size = self.truth.size
        if not math.isfinite(size):
            return "not finite"
        bounds = ((6.0, "> 6"), (2.0, "2-6"), (1.0, "1-2"), (0.5, "0.5-1"))
        return next((name for bound, name in bounds if size >= bound), "")


SIZE_CLASSES = ("0.5-1", "1-2", "2-6", "> 6", "not finite")
"""Sizes of arms in margins, in ascending order."""


@dataclass(frozen=True, kw_only=True)
class ShiftPoint:
    """Shares of verdicts where the true difference is `shift` margins on both endpoints."""

    shift: float
    accept: float
    reject: float
    seeds: float


@dataclass(frozen=True, kw_only=True)
class ShiftCurve:
    """The operating characteristic of one plan on the noise of one arm.

    Attributes:
        points: Shifts in margins of all seeds.
        at_own_margin: A shift of one margin as the draw measures it: the test's own error.
    """

    task: str
    arm: str
    plan: str
    points: tuple[ShiftPoint, ...]
    at_own_margin: ShiftPoint


@dataclass(frozen=True, kw_only=True)
class SweepCost:
    """What one sweep over the harmless arms costs that share one FP32 reference.

    Attributes:
        candidates: How many.
        adaptive: Whole runs with looks, the reference's among them; mean over the draws.
        fixed: The same with the longest fixed plan.
    """

    candidates: int
    adaptive: float
    fixed: float


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Everything found about one task.

    Attributes:
        task: Its name.
        digest: Of what it was computed from; see `study`.
        num_steps: Of a run.
        num_seeds: Seeds that were drawn from.
        draws: Draws of seeds.
        unit: Of the training loss.
        progress: D, what FP32 learned, in `unit`.
        margins: Endpoint -> (margin of all seeds, term that set it).
        unstable: FP32 runs that cannot serve as a reference.
        void: Why FP32 cannot judge; None if it can.
        incomplete: Arms left out, as seeds are missing, or all of them.
        arms: All others.
        shifts: Operating characteristics.
        sweep: Cost of a sweep; None without harmless arms or for want of seeds.
    """

    task: str
    digest: str
    num_steps: int
    num_seeds: int
    draws: int
    unit: str
    progress: float
    margins: Mapping[str, tuple[float, str]]
    unstable: int
    void: str | None
    incomplete: tuple[str, ...]
    arms: tuple[ArmResult, ...]
    shifts: tuple[ShiftCurve, ...] = ()
    sweep: SweepCost | None = None

    def to_json(self) -> str:
        """Return strict JSON."""
        return strict_json(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TaskResult:
        """Read a result back.

        Raises:
            ValueError: The text is not what `to_json` of this release writes.
        """
        try:
            data = json.loads(text)
            values = {
                **data,
                "progress": _number(data["progress"]),
                "margins": {k: (_number(m), str(t)) for k, (m, t) in data["margins"].items()},
                "incomplete": tuple(data["incomplete"]),
                "arms": tuple(_arm(arm) for arm in data["arms"]),
                "shifts": tuple(_curve(curve) for curve in data["shifts"]),
                "sweep": data["sweep"] and SweepCost(**data["sweep"]),
            }
            return cls(**values)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"not the result of a task: {error}") from None


def _arm(data: Mapping[str, Any]) -> ArmResult:
    truth = dict(data["truth"])
    truth["size"] = _number(truth["size"])
    truth["hard_failures"] = _number(truth["hard_failures"])
    truth["effects"] = {
        endpoint: Effect(**{k: _number(v) for k, v in effect.items()})
        for endpoint, effect in truth["effects"].items()
    }
    values = {
        **data,
        "truth": Truth(**truth),
        "probe": None if data["probe"] is None else tuple(data["probe"]),
        "tallies": {key: Tally(**tally) for key, tally in data["tallies"].items()},
    }
    return ArmResult(**values)


def _curve(data: Mapping[str, Any]) -> ShiftCurve:
    points = tuple(ShiftPoint(**point) for point in data["points"])
    own = ShiftPoint(**data["at_own_margin"])
    return ShiftCurve(**{**data, "points": points, "at_own_margin": own})


def _number(value: Any) -> float:
    number = stored_number(value)
    if number is None:
        raise ValueError(f"{value!r} is no number")
    return number
