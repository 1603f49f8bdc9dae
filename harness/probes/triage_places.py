"""How a sentence names the place of an op and a number."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.precision.op_families import family_of, is_product
from harness.probes.triage import ROUNDING, OpEvent

_MAX_NAMES = 3
CASTS = ("_to_copy", "copy_")


def place(event: OpEvent) -> str:
    """Return where an op is: ``output of `ff.wo` ``, ``gradient of `norm` (`mul`)``.

    The result of a layer's own product is the layer's output; other ops are named as well.
    """
    what = "output" if event.direction == "forward" else "gradient"
    if event.op in (*CASTS, ROUNDING):
        of = "a value" if event.direction == "forward" else "a gradient"
        inside = "outside of every module" if event.module is None else f"inside `{event.module}`"
        made = "rounded" if event.op == ROUNDING else "cast"
        return f"{of} {made} to {upper(event.format)} {inside}"
    op = event.op.removesuffix("_backward_data").removesuffix("_backward")
    if event.module is None:
        return f"{what} of `{op}` outside of every module"
    if event.direction == "forward" and event.is_layer:
        return f"output of `{event.module}`"
    if event.direction == "forward":
        return f"output of `{op}` inside `{event.module}`"
    return f"gradient inside `{event.module}` (`{op}`)"


def singular(event: OpEvent) -> str:
    """Return that an op meets zeros, or what no format can hold, only because of its inputs.

    Empty where FP32 has the same at the same place, or is not known to differ.
    """
    if event.fp32_max is None or not math.isfinite(event.fp32_max):
        return ""
    if event.value is None or math.isfinite(event.value):
        return ""
    told = f"{place(event)} is not finite: "
    if event.zeros_from is None:
        told += "its inputs, rounded before it, allow nothing else in any format"
    else:
        told += f"{place(event.zeros_from)}, which it reads, is exactly zero in places"
    return f"{told}; in FP32 it is finite (max {number(event.fp32_max)})"


def upper(format_name: str) -> str:
    """Return a format as a person writes it: `FP16`, `FP8 E4M3`."""
    return format_name.upper().replace("FP8_", "FP8 ")


def is_layer_output(op: str) -> bool:
    """Return whether an op is a layer's main computation rather than a step on the way."""
    return is_product(op) or family_of(op) == "embedding"


def listed(names: Sequence[str]) -> str:
    """Return names as a person lists them, the first few."""
    shown = ", ".join(f"`{name}`" for name in names[:_MAX_NAMES])
    more = len(names) - _MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def number(value: float | None) -> str:
    """Return a number as a person writes it: `65,504`, `71,300`, `9.8e4`, `infinite`.

    Three significant digits, thousands separated, powers of ten where that is shorter. Limits of
    formats and loss scales, which are short in binary, in full.

    >>> number(65504.0), number(71312.0), number(9.81e9), number(6e-8), number(1.5)
    ('65,504', '71,300', '9.81e9', '6e-8', '1.5')
    """
    if value is None or math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinite"
    if abs(value) < 1e6 and value == int(value) and _is_short(int(value)):
        return f"{int(value):,}"
    if 1000 <= abs(value) < 1e6:
        digits = 2 - math.floor(math.log10(abs(value)))
        return f"{round(value, digits):,.0f}"
    text = f"{value:.3g}"
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else text


def _is_short(value: int) -> bool:
    """Return whether an integer has at most 11 significant bits, as FP16's largest value has."""
    size = abs(value)
    return size == 0 or (size // (size & -size)).bit_length() <= 11
