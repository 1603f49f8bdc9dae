"""How numbers, policies and seeds are written in the analyzer's sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.analysis.findings import Endpoint

ENDPOINT_NAMES: dict[Endpoint, str] = {"train": "training loss", "held_out": "held-out loss"}


def number(value: float | None, *, signed: bool = False) -> str:
    """Return three significant digits, e.g. `0.0216`, `1.5e-08`, `NaN`; None is `unknown`."""
    if value is None:
        return "unknown"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    text = f"{value:+.3g}" if signed else f"{value:.3g}"
    return text.replace("+0", "0", 1) if text == "+0" else text


def percent(share: float | None) -> str:
    """Return a share as a percentage with at most two significant digits below 10 %."""
    if share is None or not math.isfinite(share):
        return "unknown"
    return f"{100 * share:.2g} %" if abs(share) < 0.1 else f"{100 * share:.0f} %"


def in_margins(value: float | None, margin: float) -> float:
    """Return `value / margin`; NaN for a missing value or a margin that is not positive."""
    return math.nan if value is None or not margin > 0 else value / margin


def in_words(value: float | None, margin: float, *, unit: bool = True, signed: bool = True) -> str:
    """Return a difference in units of its margin: `+0.12 of the margin`, `3.40 margins`."""
    relative = in_margins(value, margin)
    if not math.isfinite(relative):
        return number(value, signed=signed)
    size = abs(relative)
    digits = ".2f" if size < 10 else (".0f" if size < 1e5 else ".1e")
    text = format(relative, ("+" if signed else "") + digits)
    text = "0" if text in ("+0.00", "-0.00", "0.00") else text
    if not unit:
        return text
    return f"{text} of the margin" if size < 1.5 else f"{text} margins"


def listing(names: Sequence[str], *, last: str = "and") -> str:
    """Return `a`, `a and b` or `a, b and c`."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {last} {names[-1]}"


def seeds_text(seeds: Sequence[int]) -> str:
    """Return `seed 1` or `seeds 0, 1 and 2`."""
    return f"seed{'' if len(seeds) == 1 else 's'} {listing([str(seed) for seed in seeds])}"
