"""One colour, line and marker per policy, the same in every figure and report.

The colours are told apart with the common colour-vision deficiencies (after Okabe and Ito, Color
Universal Design, 2008, darkened for thin lines on white); line style and marker carry the same
information without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.figures.canvas import INK, MUTED


@dataclass(frozen=True, kw_only=True)
class PolicyStyle:
    """How a policy is drawn.

    Attributes:
        colour: On a light page, and in files of their own.
        dark: On a dark page.
        variable: CSS variable of the page that holds the colour.
        line: Matplotlib line style.
        marker: Matplotlib marker.
        width: Line width in points.
    """

    colour: str
    dark: str
    variable: str
    line: str | tuple[float, tuple[float, ...]]
    marker: str
    width: float = 1.6


# Policy name -> how it is drawn.
Styles = dict[str, PolicyStyle]


_DASH = (0.0, (5.0, 2.0))
_DASH_DOT = (0.0, (6.0, 2.0, 1.5, 2.0))
_DOT = (0.0, (1.5, 1.5))
_LONG_DASH = (0.0, (9.0, 2.5))

REFERENCE = PolicyStyle(
    colour=INK, dark="#e8ebee", variable="--ink", line="-", marker="o", width=2.0
)
CONTROL = PolicyStyle(
    colour=MUTED, dark="#9aa5b1", variable="--muted", line=_DOT, marker="D", width=1.4
)
_CANDIDATES = (
    PolicyStyle(colour="#0a66a8", dark="#5db4f0", variable="--p1", line="-", marker="s"),
    PolicyStyle(colour="#c94f00", dark="#ff9a55", variable="--p2", line=_DASH, marker="^"),
    PolicyStyle(colour="#00825e", dark="#3fcf9f", variable="--p3", line=_DASH_DOT, marker="v"),
    PolicyStyle(colour="#b0447f", dark="#f08fc4", variable="--p4", line=_LONG_DASH, marker="P"),
    PolicyStyle(colour="#3f93b8", dark="#8fd8f5", variable="--p5", line=_DOT, marker="X"),
    PolicyStyle(colour="#9a7400", dark="#e8c34a", variable="--p6", line=_DASH, marker="<"),
    PolicyStyle(colour="#6b4fb3", dark="#b7a2f5", variable="--p7", line=_DASH_DOT, marker=">"),
    PolicyStyle(colour="#7a5137", dark="#d2a283", variable="--p8", line=_LONG_DASH, marker="h"),
)
# The built-in policies keep their look from report to report, whatever the grid.
_FIXED = {"bf16": 0, "fp16": 1, "bf16_fallback": 2, "bf16_pure": 3, "tf32": 4}


def policy_styles(policies: Sequence[str], *, reference: str, controls: Sequence[str]) -> Styles:
    """Return policy -> style; with more candidates than colours, colours repeat.

    Args:
        policies: All policies of the report, in grid order.
        reference: Drawn in ink.
        controls: Drawn muted.
    """
    taken = {_FIXED[p] for p in policies if p in _FIXED}
    free = [i for i in range(len(_CANDIDATES)) if i not in taken] or list(range(len(_CANDIDATES)))
    styles: Styles = {}
    used = 0
    for policy in policies:
        if policy == reference:
            styles[policy] = REFERENCE
        elif policy in controls:
            styles[policy] = CONTROL
        elif policy in _FIXED:
            styles[policy] = _CANDIDATES[_FIXED[policy]]
        else:
            styles[policy] = _CANDIDATES[free[used % len(free)]]
            used += 1
    return styles


def candidate_styles() -> tuple[PolicyStyle, ...]:
    """Return every candidate style: the page defines a CSS variable for each."""
    return _CANDIDATES
