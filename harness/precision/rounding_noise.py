"""The random bits of stochastic rounding: from generators of their own, seeded once per step.

So they neither disturb dropout and a model's own draws nor depend on them, and a step repeated
with the same seed rounds alike.
"""

from __future__ import annotations

import torch


class RoundingNoise:
    """One generator per device, made when first asked for."""

    def __init__(self) -> None:
        self._seed = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seeded: set[torch.device] = set()

    def start(self, seed: int) -> None:
        """Begin the sequence of a step; costs nothing where nothing is rounded at random.

        Args:
            seed: Any whole number of at most 63 bits.
        """
        self._seed = seed
        self._seeded.clear()

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator to draw from on `device`, where the step's sequence stands."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        generator = self._generators[device]
        if device not in self._seeded:
            generator.manual_seed(self._seed)
            self._seeded.add(device)
        return generator
