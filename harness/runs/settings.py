"""What a run is asked to do, and how it tells how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Which steps each step probe looks at; the last step is always one of them. None: off.

    The defaults are those of `conf/probes/default.yaml`.

    Attributes:
        exponents_every: Exponent histograms of all kinds of tensors.
        weight_gradients_every: Exponent histograms of the weight gradients.
        norms_every: RMS and maxima.
        lost_updates_every: Updates that 16-bit weights lose.
        memory: Whether to tell what the bytes of the first step are.
    """

    exponents_every: int | None = 100
    weight_gradients_every: int | None = 10
    norms_every: int | None = 50
    lost_updates_every: int | None = 10
    memory: bool = True

    def __post_init__(self) -> None:
        for name, every in vars(self).items():
            if name.endswith("_every") and every is not None and every < 1:
                raise ValueError(f"{name}={every!r} is not allowed; allowed: >= 1, or None for off")

    def chosen(self, num_steps: int) -> dict[str, dict[str, Any]]:
        """Return probe name -> arguments, those that are off left out."""
        asked: dict[str, dict[str, int | None]] = {
            "exponents": {
                "every": self.exponents_every,
                "weight_gradients_every": self.weight_gradients_every,
            },
            "norms": {"every": self.norms_every},
            "lost_updates": {"every": self.lost_updates_every},
            "memory": {"every": num_steps if self.memory else None},
        }
        return {
            name: values
            for name, values in asked.items()
            if any(value is not None for value in values.values())
        }

    @classmethod
    def off(cls) -> ProbeSettings:
        """Return the settings under which no step probe looks."""
        return cls(
            exponents_every=None,
            weight_gradients_every=None,
            norms_every=None,
            lost_updates_every=None,
            memory=False,
        )


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How one run is made.

    Attributes:
        steps: Training steps, one batch each.
        seed: Of weights, batches, dropout masks and the perturbation of a control.
        device: `cpu`, `cuda` or `cuda:<index>`.
        num_threads: Intra-op threads; results depend on it.
        backend: `auto`, `native` or `emulated`: how low-precision ops are computed.
        probes: Which steps the step probes look at.
        tail_evaluations: Held-out evaluations in the last third, besides the one before training.
        max_nonfinite_streak: Non-finite losses in a row after which the run stops as diverged; seen
            when series are fetched, so up to 24 steps later.
        mark_phases: Whether steps and their phases are named for profilers (see `runs.phases`).
    """

    steps: int
    seed: int
    device: str
    num_threads: int
    backend: str = "auto"
    probes: ProbeSettings = field(default_factory=ProbeSettings)
    tail_evaluations: int = 5
    max_nonfinite_streak: int = 25
    mark_phases: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "num_threads", "tail_evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; allowed: >= 1")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        step: Completed steps.
        steps: Planned steps.
        loss: Training loss as of the last fetch; None before the first.
    """

    step: int
    steps: int
    loss: float | None
