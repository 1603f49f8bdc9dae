"""Faults of numbers that are places: a low format cannot tell neighbours apart."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from harness.calibration.faults.fault import Fault, Plant
from harness.calibration.faults.rounded import nearest


def low_positions(index: Tensor, *, name: str, step: float = 1.0) -> Tensor:
    """Return positions as format `name` holds them: in BF16, 257 and 258 are 256 and 258.

    Args:
        index: Positions, of any dtype and shape.
        name: The format.
        step: The format holds `index * step`; with a fraction, positions were scaled before the
            cast, with a large number they count smaller units.
    """
    return nearest(index.to(torch.float32) * step, name) / step


FAULTS = (
    Fault(
        name="low_positions",
        sentence="Positions are cast to the model's format before they are embedded: in BF16 "
        "neighbours above 256 become one.",
        source="huggingface/transformers#25681",
        dose="the format",
        plant=lambda dose: Plant(seams={"positions": functools.partial(low_positions, name=dose)}),
    ),
    Fault(
        name="low_timesteps",
        sentence="Diffusion's time steps, 0 to 999, are cast to the model's format before they are "
        "embedded: in BF16 937 becomes 936.",
        source="modelscope/DiffSynth-Studio#562",
        dose="the format",
        plant=lambda dose: Plant(seams={"timesteps": functools.partial(low_positions, name=dose)}),
    ),
)
