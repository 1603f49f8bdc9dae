"""How the same-point probe measures, and what is stored of the run that it repeats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamePointSettings:
    """Points and batches of the probe.

    Attributes:
        points: Shares of the run, each in (0, 1].
        batches: K, at least 2.
        fp64_max_parameters: Largest model for which FP64 is computed as truth.
    """

    points: tuple[float, ...] = (0.10, 0.33, 0.67, 0.97)
    batches: int = 16
    fp64_max_parameters: int = 300_000

    def __post_init__(self) -> None:
        prefix = "probes.gradient_error"
        if not self.points or not all(0 < point <= 1 for point in self.points):
            raise ValueError(
                f"{prefix}.points={list(self.points)} is not allowed; "
                "allowed: one or more shares of the run in (0, 1]"
            )
        if self.batches < 2:
            raise ValueError(f"{prefix}.batches={self.batches} is not allowed; allowed: >= 2")
        if self.fp64_max_parameters < 0:
            raise ValueError(
                f"{prefix}.fp64_max_parameters={self.fp64_max_parameters} is not allowed; "
                "allowed: >= 0"
            )

    def steps(self, num_steps: int) -> tuple[int, ...]:
        """Return the numbers of completed steps at the points, ascending, each once."""
        return tuple(sorted({max(1, round(point * num_steps)) for point in self.points}))


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """What the stored FP32 run of the seed says.

    Attributes:
        losses: Its training losses.
        batches: Its batches' checksums.
        learning_rates: Of its first parameter group.
    """

    losses: tuple[float, ...] = ()
    batches: tuple[int, ...] = ()
    learning_rates: tuple[float, ...] = ()

    @property
    def final_rate(self) -> float | None:
        """Its last learning rate above zero, at which updates are smallest; None without any."""
        return next((rate for rate in reversed(self.learning_rates) if rate > 0), None)
