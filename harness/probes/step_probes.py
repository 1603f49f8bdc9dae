"""All probes of a run behind one face: what a sampled step shows them, and what they say."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from harness.probes.gradients import GradientProbe
from harness.probes.lost_updates import LostUpdateProbe


class StepProbes:
    """Watches sampled steps; reads gradients and weights and never writes them.

    Args:
        stored_format: In which format the policy stores weights.
        tail_start: First batch index of the run's tail.
    """

    def __init__(self, *, stored_format: str, tail_start: int) -> None:
        self._gradients = GradientProbe(tail_start=tail_start)
        self._updates = LostUpdateProbe(stored_format=stored_format)
        self._steps: list[int] = []

    def gradients(self, gradients: Sequence[Tensor], *, step: int) -> None:
        """See the unscaled, unclipped gradients of a step."""
        self._gradients.observe(gradients, step=step)
        self._steps.append(step)

    def before_update(self, parameters: Sequence[Tensor]) -> None:
        """See the weights before the optimizer's step."""
        self._updates.before_update(parameters)

    def after_update(self, parameters: Sequence[Tensor], *, skipped: bool) -> None:
        """See the weights after it, or that it was left out."""
        if skipped:
            self._updates.skipped()
        else:
            self._updates.after_update(parameters)

    def sampled(self) -> tuple[tuple[int, ...], dict[str, tuple[float, ...]]]:
        """Return the sampled batch indices and one number per index for every count.

        A step that an exception ended before its update is left out.
        """
        columns = {**self._gradients.sampled(), **self._updates.sampled()}
        length = min([len(self._steps), *map(len, columns.values())])
        return tuple(self._steps[:length]), {k: v[:length] for k, v in columns.items()}

    def histograms(self) -> dict[str, tuple[int, ...]]:
        """Return the exponent histograms `grad/all` and `grad/tail`."""
        return self._gradients.histograms()

    def zero_share(self) -> float | None:
        """Return the mean share of gradient elements that are exactly zero; None without any."""
        return self._gradients.zero_share()
