"""The user's own margin, `decision.margin`: in the loss's unit, as a share, or in own units."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

MARGIN_FORMS = (
    'a number > 0 in the unit of the loss, a percentage of what FP32 learned like "2 %", or '
    'a number in the unit of the workload\'s own eval_fn figure like "0.3 own"'
)
_TEXT = re.compile(r"\s*(?P<size>[^\s%]+?)\s*(?P<unit>%|own)?\s*")


@dataclass(frozen=True, kw_only=True)
class UserMargin:
    """A margin as the user gave it.

    Attributes:
        size: Positive. In the unit of the loss, in per cent, or in own units.
        basis: `loss`: `size` is in the unit of the loss; `progress`: in per cent of what FP32
            learned; `own`: in the unit of the workload's own held-out figure.
        text: As given, for sentences.
    """

    size: float
    basis: Literal["loss", "progress", "own"]
    text: str


def parse_margin(value: Any) -> UserMargin | None:
    """Return the margin that `decision.margin` stands for; None for None (the formula).

    Raises:
        ValueError: `value` is none of the forms of `MARGIN_FORMS`; one line, naming the key.
    """
    if value is None:
        return None
    refused = ValueError(f"decision.margin={value!r} is not allowed; allowed: {MARGIN_FORMS}")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise refused
    match = _TEXT.fullmatch(str(value))
    try:
        size = float(match["size"]) if match is not None else math.nan
    except ValueError:
        raise refused from None
    if match is None or not (math.isfinite(size) and size > 0):
        raise refused
    unit = match["unit"]
    if unit == "%":
        return UserMargin(size=size, basis="progress", text=f"{size:g} %")
    if unit == "own":
        return UserMargin(size=size, basis="own", text=f"{size:g} own")
    return UserMargin(size=size, basis="loss", text=f"{size:g}")
