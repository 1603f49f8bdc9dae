"""What a run is asked to do, and how it tells how far it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How one run is made.

    Attributes:
        steps: Training steps, one batch each.
        seed: Of weights, batches, dropout masks and the perturbation of a control.
        device: `cpu`, `cuda` or `cuda:<index>`.
        num_threads: Intra-op threads; results depend on it.
        backend: `auto`, `native` or `emulated`: how low-precision ops are computed.
        probe_every: Steps between two samples of gradients and updates; the last step is one too.
        tail_evaluations: Held-out evaluations in the last third, besides the one before training.
        max_nonfinite_streak: Non-finite losses in a row after which the run stops as diverged; seen
            when series are fetched, so up to 24 steps later.
    """

    steps: int
    seed: int
    device: str
    num_threads: int
    backend: str = "auto"
    probe_every: int = 5
    tail_evaluations: int = 5
    max_nonfinite_streak: int = 25

    def __post_init__(self) -> None:
        for name in ("steps", "num_threads", "probe_every", "tail_evaluations"):
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
