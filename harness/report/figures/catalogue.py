"""All figures of a report, in the order of the page."""

from __future__ import annotations

from harness.report.evidence import Evidence
from harness.report.figures.canvas import Drawing, drawing_settings
from harness.report.figures.cost import cost
from harness.report.figures.exponent_kinds import exponent_kinds
from harness.report.figures.forest import forest
from harness.report.figures.gradients import exponents, gradient_norms, underflow
from harness.report.figures.loss_scale import loss_scale
from harness.report.figures.loss_window import loss_window
from harness.report.figures.losses import loss_curves, loss_differences
from harness.report.figures.rounding import rounding
from harness.report.figures.stacked import device_time, memory
from harness.report.figures.update_bars import update_bars
from harness.report.style import Styles

_FIGURES = (
    loss_curves,
    forest,
    loss_differences,
    gradient_norms,
    loss_scale,
    underflow,
    exponents,
    exponent_kinds,
    loss_window,
    update_bars,
    cost,
    device_time,
    memory,
)


def draw_all(evidence: Evidence, styles: Styles) -> dict[str, Drawing]:
    """Return name -> drawing for every figure that the records hold data for."""
    with drawing_settings():
        drawings = [figure(evidence, styles) for figure in _FIGURES]
        drawings += rounding(evidence, styles)
    return {drawing.name: drawing for drawing in drawings if drawing is not None}
