"""Figures: valid SVG with the expected parts, for whole, broken and empty records."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from factories import crashed, diverged, make_grid, make_record, with_series
from report_samples import GRID, estimate, make_findings, make_verdict

from harness.analysis.findings import Choice, ModelFindings, Ratio
from harness.report.evidence import gather
from harness.report.figures.canvas import WIDE, Drawing, page_svg, panels, step_axis
from harness.report.figures.catalogue import draw_all
from harness.report.style import REFERENCE, candidate_styles, policy_styles
from harness.runs.record import RunRecord

_ALL = {
    "loss",
    "decision",
    "difference",
    "gradient-norm",
    "loss-scale",
    "underflow",
    "exponents",
    "cost",
    "exponent-kinds",
    "loss-window",
    "lost-updates",
    "memory",
    "device-time",
    *(f"rounding-{policy}" for policy in GRID if policy != "fp32_twin"),
}


def _draw(findings: ModelFindings, records: list[RunRecord]) -> dict[str, Drawing]:
    evidence = gather(findings, records)
    styles = policy_styles(evidence.policies, reference="fp32", controls=["fp32_twin"])
    return draw_all(evidence, styles)


@pytest.fixture(scope="module")
def drawings(written: Any) -> dict[str, Drawing]:
    return _draw(written.findings, list(written.records))


def _ids(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return [element.attrib["id"] for element in root.iter() if "id" in element.attrib]


def test_all_figures_have_their_parts(drawings: dict[str, Drawing]) -> None:
    assert set(drawings) == _ALL
    for name, drawing in drawings.items():
        assert set(drawing.svg) == {"wide", "narrow"}
        assert len(drawing.caption) > 80
        for size, svg in drawing.svg.items():
            root = ElementTree.fromstring(svg)
            assert root.attrib["role"] == "img"
            assert f"{name}-{size}-title" in root.attrib["aria-labelledby"]
            assert f"{name}-{size}-{name}" in _ids(svg)
    ids = _ids(drawings["decision"].svg["wide"])
    for position in range(len(GRID) - 1):
        for endpoint in ("train", "held_out"):
            found = f"decision-wide-decision-row-{position}-{endpoint}" in ids
            # Row 5 is the diverged policy: a sentence instead of a mark.
            assert found == (position != 5)
    assert "decision-wide-decision-margin" in ids
    ids = _ids(drawings["loss"].svg["wide"])
    for policy in ("fp32", *GRID):
        assert f"loss-wide-loss-0-{policy}" in ids
    assert "loss-wide-loss-0-fp16_unscaled-stop" in ids
    ids = _ids(drawings["exponents"].svg["narrow"])
    assert {f"exponents-narrow-format-{f}" for f in ("fp16", "bf16", "fp32")} <= set(ids)


def test_ids_are_unique_over_the_page(written: Any) -> None:
    ids = re.findall(r'\sid="([^"]*)"', written.html)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'href="#([^"]*)"', written.html):
        assert target in ids


def test_lines_carry_data(drawings: dict[str, Drawing]) -> None:
    """A figure whose curves are empty paths would pass every check on names."""
    for name, gid in (
        ("loss", "loss-wide-loss-0-bf16"),
        ("difference", "difference-wide-difference-bf16"),
        ("gradient-norm", "gradient-norm-wide-gradient-norm-bf16"),
        ("underflow", "underflow-wide-underflow-0-bf16"),
        ("exponents", "exponents-wide-exponents-bf16"),
        ("loss-scale", "loss-scale-wide-loss-scale-fp16"),
    ):
        root = ElementTree.fromstring(drawings[name].svg["wide"])
        (group,) = [e for e in root.iter() if e.attrib.get("id") == gid]
        path = next(e for e in group if e.tag.endswith("path"))
        points = re.findall(r"[ML]", path.attrib["d"])
        assert len(points) > 5, name


def test_same_input_same_bytes() -> None:
    findings = make_findings(make_verdict(), num_steps=120)
    records = make_grid(["fp32", "bf16"], (0, 1))
    first, second = _draw(findings, records), _draw(findings, records)
    assert first["decision"].svg == second["decision"].svg
    assert first["loss"].svg == second["loss"].svg


def _mark_x(svg: str, gid: str) -> float:
    root = ElementTree.fromstring(svg)
    (group,) = [e for e in root.iter() if e.attrib.get("id") == gid]
    use = next(e for e in group.iter() if e.tag.endswith("use"))
    return float(use.attrib["x"])


def _line_x(svg: str, gid: str) -> float:
    root = ElementTree.fromstring(svg)
    (group,) = [e for e in root.iter() if e.attrib.get("id") == gid]
    path = next(e for e in group if e.tag.endswith("path"))
    return float(re.findall(r"[ML] ([\d.]+)", path.attrib["d"])[0])


@pytest.mark.parametrize("scaled", [-0.5, 0.9, 1.1, 1.9])
def test_a_mark_lies_on_its_side_of_the_margin(scaled: float) -> None:
    """Oracle for the deciding figure: margin units, and the line at one margin."""
    one = estimate((0.02 * scaled,) * 3, margin=0.02)
    findings = make_findings(make_verdict(estimates={"train": one}))
    svg = _draw(findings, [])["decision"].svg["wide"]
    mark = _mark_x(svg, "decision-wide-decision-row-0-train")
    margin = _line_x(svg, "decision-wide-decision-margin")
    assert (mark < margin) == (scaled < 1)


@pytest.mark.parametrize("scaled", [1000.0, -1000.0])
def test_outliers_are_clipped_with_their_number(scaled: float) -> None:
    one = estimate((0.02 * scaled,) * 3, margin=0.02)
    near = estimate((0.01, 0.011, 0.012), margin=0.02)
    findings = make_findings(
        make_verdict("bf16", estimates={"train": one}),
        make_verdict("fp16", estimates={"train": near}),
    )
    svg = _draw(findings, [])["decision"].svg["wide"]
    assert f"{scaled:+.0f}".replace("-", "-") in svg.replace("\N{MINUS SIGN}", "-")
    # The near row still has room: its interval is wider than a few points.
    root = ElementTree.fromstring(svg)
    gid = "decision-wide-decision-row-1-train-interval"
    (group,) = [e for e in root.iter() if e.attrib.get("id") == gid]
    path = next(e for e in group if e.tag.endswith("path"))
    left, right = (float(x) for x in re.findall(r"[ML] ([\d.]+)", path.attrib["d"]))
    assert right - left > 10


def _group(svg: str, gid: str) -> ElementTree.Element | None:
    return next((e for e in ElementTree.fromstring(svg).iter() if e.attrib.get("id") == gid), None)


def test_an_interval_beyond_the_panel_gives_its_end_and_its_seeds() -> None:
    """The interval of (-0.2, 0.02, 0.16) nats ends at -22.9 and +15.0 margins of 0.02 nats."""
    wide = estimate((-0.2, 0.02, 0.16), margin=0.02)
    findings = make_findings(make_verdict(estimates={"train": wide, "held_out": wide}))
    svg = _draw(findings, [])["decision"].svg["wide"]
    assert svg.count("to +15.0") == 2  # in both panels
    assert svg.count("to \N{MINUS SIGN}22.9") == 2
    for side in (0, 1):
        seeds = _group(svg, f"decision-wide-decision-seeds-0-{side}")
        assert seeds is not None
        assert len([e for e in seeds.iter() if e.tag.endswith("use")]) == 1
    inside = make_findings(make_verdict())
    svg = _draw(inside, [])["decision"].svg["wide"]
    assert ">to " not in svg
    assert _group(svg, "decision-wide-decision-seeds-0-0") is None


def test_a_difference_is_whole_in_its_panel_or_marked_as_clipped() -> None:
    """Six margins are shown whole, a hundred are clipped at the edge with their number."""
    margins = {"bf16": 6, "bf16_pure": 100}
    grid: dict[str, dict[str, Any]] = {
        "fp32": {},
        **{name: {"offset": 0.02 * size} for name, size in margins.items()},
    }
    findings = make_findings(
        *(make_verdict(name) for name in margins), num_steps=120, tail_start=80
    )
    svg = _draw(findings, make_grid(grid))["difference"].svg["wide"]
    assert _group(svg, "difference-wide-difference-bf16-clipped") is None
    assert _group(svg, "difference-wide-difference-bf16_pure-clipped") is not None
    assert "clipped: goes on to +2" in svg


def test_no_text_leaves_its_figure(written: Any) -> None:
    """Names and verdicts as long as they get, on a phone and on a desk."""
    long = "fp16_all_ops_of_mine"
    verdicts = [
        dataclasses.replace(
            verdict,
            policy=long if verdict.policy == "bf16" else verdict.policy,
            outcome="inconclusive",
            execution="emulated",
        )
        for verdict in written.findings.verdicts
        if not verdict.is_control
    ]
    records = [
        dataclasses.replace(record, policy=long) if record.policy == "bf16" else record
        for record in written.records
    ]
    findings = dataclasses.replace(written.findings, verdicts=tuple(verdicts))
    for name, drawing in _draw(findings, records).items():
        for size, svg in drawing.svg.items():
            assert _outside(svg) == [], f"{name}, {size}"


def _outside(svg: str) -> list[str]:
    """Return the upright texts that begin before or end after their figure."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    root = ElementTree.fromstring(svg)
    left, _, width, _ = map(float, root.attrib["viewBox"].split())
    found = []
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        style, at = element.attrib.get("style", ""), element.attrib.get("x")
        size = re.search(r"([\d.]+)px", style)
        if at is None or size is None or "rotate(-90" in element.attrib.get("transform", ""):
            continue
        text = "".join(element.itertext())
        weight = "bold" if "700" in style or "bold" in style else "normal"
        font = FontProperties(size=float(size[1]), weight=weight)
        length, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
        before = 1.0 if "anchor: end" in style else 0.5 if "anchor: middle" in style else 0.0
        start = float(at) - before * length
        # 1 px: widths are those of the outlines, the reader's hinting rounds them.
        if start < left - 1 or start + length > left + width + 1:
            found.append(text)
    return found


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 300, 12345])
def test_steps_on_an_axis_are_whole_numbers(num_steps: int) -> None:
    _, (ax,) = panels(WIDE, rows=1, columns=1, row_height=100)
    step_axis(ax, 0, num_steps, labels=4)
    ticks = [float(t) for t in ax.get_xticks()]
    assert ticks
    assert all(t == round(t) for t in ticks)


def test_nothing_at_all_draws_nothing() -> None:
    assert _draw(make_findings(), []) == {}
    assert "decision" not in _draw(make_findings(make_verdict(estimates={})), [])


@functools.cache
def _broken_grids() -> dict[str, list[RunRecord]]:
    fp32 = make_grid(["fp32"])
    nan = [with_series(make_record("bf16", s), loss=[math.nan] * 120) for s in (0, 1, 2)]
    return {
        "crashed at once": [*fp32, *(crashed(r) for r in make_grid(["bf16"]))],
        "crashed later": [*fp32, *(crashed(r, at_step=40) for r in make_grid(["bf16"]))],
        "all diverged": [*fp32, *(diverged(r, at_step=2) for r in make_grid(["bf16"]))],
        "nan from the start": [*fp32, *(dataclasses.replace(r, status="diverged") for r in nan)],
        "reference missing": make_grid(["bf16"]),
        "one step": make_grid(["fp32", "bf16"], num_steps=1),
        "zero loss": [with_series(r, loss=[0.0] * 120) for r in make_grid(["fp32", "bf16"])],
        "constant negative": [
            with_series(r, loss=[-3.0] * 120) for r in make_grid(["fp32", "bf16"])
        ],
        "huge": [with_series(r, loss=[1e30] * 120) for r in make_grid(["fp32", "bf16"])],
        "tiny": [with_series(r, loss=[1e-30] * 120) for r in make_grid(["fp32", "bf16"])],
        "infinite norms": [
            with_series(r, grad_norm=[math.inf] * 120) for r in make_grid(["fp32", "bf16"])
        ],
        "no probes": [
            dataclasses.replace(r, sampled={}, sampled_steps=(), histograms={})
            for r in make_grid(["fp32", "bf16"])
        ],
        "no gradients": [
            dataclasses.replace(r, histograms={"grad/all": (0,) * 256})
            for r in make_grid(["fp32", "bf16"])
        ],
    }


@pytest.mark.parametrize("name", sorted(_broken_grids()))
def test_broken_runs_never_break_a_figure(name: str) -> None:
    """Warnings are errors here, so a NaN limit or an empty slice would fail too."""
    records = _broken_grids()[name]
    steps = records[0].num_steps
    findings = make_findings(make_verdict(), num_steps=steps, tail_start=2 * steps // 3)
    for drawing in _draw(findings, records).values():
        for svg in drawing.svg.values():
            ElementTree.fromstring(svg)


@pytest.mark.parametrize(
    "fields",
    [
        {"margin": 0.0},
        {"margin": math.nan},
        {"mean_difference": math.inf},
        {"sd": None, "ci_low": None, "ci_high": None, "confidence": None},
        {"ci_low": -math.inf, "ci_high": math.inf},
        {"differences": (math.nan, 0.1, math.inf)},
        {"differences": ()},
    ],
)
def test_odd_estimates_never_break_the_deciding_figure(fields: dict[str, Any]) -> None:
    odd = dataclasses.replace(estimate((0.01, 0.02, 0.0)), **fields)
    findings = make_findings(make_verdict(estimates={"train": odd}), num_steps=120)
    ElementTree.fromstring(_draw(findings, [])["decision"].svg["wide"])


def test_losses_over_two_decades_get_a_logarithmic_axis() -> None:
    findings = make_findings(make_verdict(), num_steps=120, tail_start=80)
    falling = tuple(float(x) for x in np.geomspace(100.0, 1e-3, 120))
    records = [with_series(r, loss=falling) for r in make_grid(["fp32", "bf16"])]
    linear = _draw(findings, make_grid(["fp32", "bf16"]))["loss"].svg["wide"]
    logarithmic = _draw(findings, records)["loss"].svg["wide"]
    assert _count_powers(logarithmic) > _count_powers(linear)


def _count_powers(svg: str) -> int:
    # Ticks of a logarithmic axis are typeset as powers of ten: `1`, `0`, and a smaller exponent.
    return len(re.findall(r">1</tspan>\s*<tspan[^>]*>0</tspan>\s*<tspan[^>]*font-size: 7", svg))


def test_step_time_is_drawn_only_where_it_was_part_of_the_choice() -> None:
    verdict = make_verdict(step_time_ratio=Ratio(value=0.5))
    assumed = _draw(make_findings(verdict), [])["cost"]
    choice = Choice(policy="bf16", sentence="s", speed_basis="measured")
    measured = _draw(make_findings(verdict, choice=choice), [])["cost"]
    assert "step time" not in assumed.alt
    assert "step time 0.50x" in measured.alt


def test_page_svg_follows_the_colour_scheme(drawings: dict[str, Drawing]) -> None:
    drawing = drawings["loss"]
    colours = {style.colour: style.variable for style in candidate_styles()}
    page = page_svg(drawing.svg["wide"], colours)
    assert "var(--ink)" in page
    assert "var(--p1)" in page
    assert not set(re.findall(r"(?:stroke|fill): (#[0-9a-f]{6})", page)) - {"#ffffff"}


def test_policies_look_the_same_in_every_report_and_differ_within_one() -> None:
    small = policy_styles(["fp32", "bf16"], reference="fp32", controls=[])
    large = policy_styles(["fp32", *GRID], reference="fp32", controls=["fp32_twin"])
    assert small["bf16"] == large["bf16"]
    assert large["fp32"] == REFERENCE
    looks = [(s.colour, s.line) for s in large.values()]
    assert len(set(looks)) == len(looks)
    many = policy_styles([f"p{k}" for k in range(40)], reference="fp32", controls=[])
    assert len(many) == 40
