"""How numbers, policies and seeds are written in the analyzer's sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.analysis.findings import Endpoint, Estimate
from harness.precision.module_names import ROOT

ENDPOINT_NAMES: dict[Endpoint, str] = {"train": "training loss", "held_out": "held-out loss"}


def number(value: float | None, *, signed: bool = False) -> str:
    """Return three significant digits, e.g. `0.0216`, `1.5e-08`, `NaN`; None is `unknown`."""
    if value is None:
        return "unknown"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    text = f"{value:+.3g}" if signed else f"{value:.3g}"
    return text.replace("+0", "0", 1) if text == "+0" else text


def number_below(value: float) -> str:
    """Return three significant digits of a positive number, rounded down, as a setting has them."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return number(math.floor(value / step + 1e-6) * step)


def module_text(module: str) -> str:
    """Return a module's name as a sentence has it."""
    return "the model's own forward" if module == ROOT else f"`{module}`"


def percent(share: float | None) -> str:
    """Return a share as a percentage with at most two significant digits below 10 %."""
    if share is None or not math.isfinite(share):
        return "unknown"
    return f"{100 * share:.2g} %" if abs(share) < 0.1 else f"{100 * share:.0f} %"


def in_margins(value: float | None, margin: float) -> float:
    """Return `value / margin`; NaN for a missing value or a margin that is not positive."""
    return math.nan if value is None or not margin > 0 else value / margin


def multiple(relative: float, *, signed: bool = True) -> str:
    """Return a multiple of the margin: two decimals near it, fewer far away.

    What is not zero never reads as zero (`<0.01`, `>-0.01`), and what is not the margin itself
    never reads as 1.00: verdicts turn there, so it gets the digits that tell the side. NaN and
    infinite values as `number` writes them.
    """
    if not math.isfinite(relative):
        return number(relative, signed=signed)
    size = abs(relative)
    if size < 0.005:
        return "0" if size == 0 else ("<0.01" if relative > 0 or not signed else ">-0.01")
    digits = next(d for d in (2, 3, 4, 6, 9) if d == 9 or size == 1 or round(size, d) != 1)
    if size >= 9.995:
        digits = 1 if size < 99.95 else 0
    kind = f".{digits}f" if size < 9999.5 else ".1e"
    return format(relative, ("+" if signed else "") + kind)


def in_words(value: float | None, margin: float, *, unit: bool = True, signed: bool = True) -> str:
    """Return a difference in units of its margin: `+0.12 margins`, `<0.01 margins`.

    Without a margin (0, NaN) the difference itself.
    """
    relative = in_margins(value, margin)
    if not math.isfinite(relative):
        return number(value, signed=signed)
    text = multiple(relative, signed=signed)
    return f"{text} margins" if unit else text


def margin_basis(e: Estimate, rule: Mapping[str, Any]) -> str:
    """Return what set the margin, with its constant: `1 % of what FP32 learned (2.12 nats)`.

    Args:
        e: An estimate with its margin.
        rule: Constants of the rule by name; one that is absent is left out of the text.
    """
    if e.margin_term == "user":
        setting = rule.get("margin")
        given = f"={setting}" if setting is not None else ""
        return f"your own (decision.margin{given})"
    learned = f"of what FP32 learned ({number(e.progress)} {e.unit})"
    if e.margin_term == "loss":
        tail = f"({number(e.reference_loss)} {e.unit})"
        return f"{_share(rule, 'margin_loss')}of FP32's loss at the end {tail}"
    if e.margin_term == "cap":
        return f"{_share(rule, 'margin_cap')}{learned}, the most that is allowed"
    if e.margin_term == "seed_sd":
        return f"{_share(rule, 'margin_seed_sd')}of the spread of FP32's held-out loss over seeds"
    return f"{_share(rule, 'margin_progress')}{learned}"


def _share(rule: Mapping[str, Any], key: str) -> str:
    constant = rule.get(key)
    return "a share " if constant is None else f"{100 * constant:g} % "


def listing(names: Sequence[str], *, last: str = "and") -> str:
    """Return `a`, `a and b` or `a, b and c`."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {last} {names[-1]}"


def counted(count: int, noun: str) -> str:
    """Return `1 seed`, `3 seeds`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def seeds_text(seeds: Sequence[int]) -> str:
    """Return `seed 1` or `seeds 0, 1 and 2`."""
    return f"seed{'' if len(seeds) == 1 else 's'} {listing([str(seed) for seed in seeds])}"
