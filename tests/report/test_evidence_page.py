"""The evidence section of the page: its order, its callouts, and what it says without data."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from factories import crashed, make_grid, make_record
from probe_samples import (
    GUILTY,
    module_findings,
    probe_findings,
    triage,
    with_probes,
)
from report_samples import make_findings, make_verdict, realistic_record
from rich.console import Console

from harness.analysis.findings import Choice, ModelFindings, Verdict
from harness.analysis.probe_findings import ModuleFinding
from harness.report.evidence import gather
from harness.report.figures.catalogue import draw_all
from harness.report.figures.module_bars import NARROW_ROWS, WIDE_ROWS, power_text, shortened
from harness.report.style import policy_styles
from harness.report.templating import markdown_prose, ticked
from harness.report.terminal import print_findings
from harness.report.writer import ReportPaths, write_report
from harness.runs.record import RunRecord

_QUESTIONS = ["pair", "what-ran", "rounding", "ranges", "updates", "trajectories", "triage"]
_LONG = "decoder.layers.{}.cross_attention.output_projection_dense"


def _page(paths: ReportPaths) -> str:
    return paths.html.read_text(encoding="utf-8")


def _guilty(policy: str = "bf16", **fields: Any) -> Verdict:
    return make_verdict(
        policy,
        "reject",
        probe=probe_findings(policy),
        modules=module_findings([GUILTY, "norm", "head"], bad=True),
        guilty_module=GUILTY,
        guilty_sentence=f"look at `{GUILTY}`: its local forward error is 0.41.",
        **fields,
    )


def _short(verdict: Verdict, **fields: Any) -> ModelFindings:
    return make_findings(verdict, num_steps=120, tail_start=80, **fields)


def test_the_questions_come_in_a_sceptics_order(written: Any) -> None:
    found = re.findall(r'<h3 id="([\w-]+)">(\d)\.', written.html)
    assert found == [(name, str(k + 1)) for k, name in enumerate(_QUESTIONS)]
    for name in _QUESTIONS:
        assert f'<li><a href="#{name}">' in written.html


def test_the_guilty_module_is_named_where_a_reader_looks_first(written: Any) -> None:
    """In the verdict table, at the top of the policy's details, and where the evidence begins."""
    name = f"<code>{GUILTY}</code>"
    row = written.html.split('<span class="name">bf16_pure</span>', 1)[1].split("</tr>", 1)[0]
    assert f'Look at <a href="#rounding">{name}</a>' in row
    details = written.html.split("<summary>", 6)[5].split("</details>", 1)[0]
    assert "bf16_pure" in details
    first = details.split("<div>", 1)[1].lstrip()
    assert first.startswith(f'<p class="callout">Look at {name}')
    lead = written.html.split('<h2 id="evidence">', 1)[1].split('<ol class="questions">', 1)[0]
    assert lead.count(f"Look at {name}") == 2
    assert "bf16_fallback" not in lead
    markdown = written.paths.markdown.read_text()
    assert f"- **bf16_pure** (reject): Look at `{GUILTY}`: its local forward error" in markdown


def test_the_terminal_names_it_too(written: Any) -> None:
    console = Console(file=io.StringIO(), width=80)
    print_findings(written.findings, console, report_path=Path("report.html"))
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    assert f"bf16_pure: Look at {GUILTY}: its local forward error is 0.41" in text


def test_numbers_are_in_words(written: Any) -> None:
    wanted = (
        "bf16&#39;s rounding error is 0.2 % of the sampling noise: like training with batch 63.9 "
        "instead of 64."
    )
    assert wanted in written.html
    assert wanted.replace("&#39;", "'") in written.paths.markdown.read_text()
    assert "Step 140: output of" in written.html
    assert "reached 71,300 &gt; 65,504" in written.html
    assert "| bf16_pure | 0.00200 | 1.3e-05 | 1.00 | **0.190** |" in (
        written.paths.markdown.read_text()
    )


def test_what_was_not_measured_is_listed(written: Any, folder: Path) -> None:
    assert "By module: no run looked at" not in written.html
    findings = _short(make_verdict(), not_tested=())
    page = _page(write_report(findings, make_grid(["fp32", "bf16"]), folder))
    listed = page.split('<h2 id="not-tested">', 1)[1].split("</section>", 1)[0]
    assert "not measured for bf16; harm that a short run" in listed
    assert "no run looked at the formats of its ops, the range of its numbers" in listed


def test_tensors_that_no_probe_could_look_at_are_listed_once_with_the_reason(folder: Path) -> None:
    reasons = [f"weight `packed` of `cells.{k}`: quantized values are integers" for k in range(8)]
    grid = [
        dataclasses.replace(record, probes={"norms": {"not_applicable": reasons}})
        for record in make_grid(["fp32", "bf16"])
    ]
    paths = write_report(_short(make_verdict()), grid, folder)
    listed = _page(paths).split('<h2 id="not-tested">', 1)[1].split("</section>", 1)[0]
    assert "Could not be looked at: weight <code>packed</code> of <code>cells.0</code>" in listed
    assert "cells.5</code>: quantized values are integers; and 2 more." in listed
    assert listed.count("cells.0<") == 1
    text = paths.markdown.read_text(encoding="utf-8")
    assert "- Could not be looked at: weight `packed` of `cells.0`: quantized" in text


def test_records_without_probes_give_sentences_not_empty_figures(folder: Path) -> None:
    """A record of an earlier release, or of runs without probes."""
    paths = write_report(_short(make_verdict()), make_grid(["fp32", "bf16"]), folder)
    page = _page(paths)
    drawn = {p.stem for p in paths.figures}
    assert not drawn & {"exponent-kinds", "loss-window", "lost-updates", "memory", "device-time"}
    for sentence in (
        "No probe looked at single modules in these runs",
        "no run looked at its weight updates by module",
        "Not measured at the same weights: bf16.",
        "no policy was profiled",
        "no run looked into its memory",
        "No run was in trouble of this kind",
        "each op of one traced forward pass really ran",
    ):
        assert sentence in page
    assert page.count("<figure") == len(drawn)


def test_runs_in_trouble_without_triage_say_so(folder: Path) -> None:
    records = [*make_grid(["fp32"]), *(crashed(r) for r in make_grid(["bf16"]))]
    page = _page(write_report(_short(make_verdict("bf16", "reject")), records, folder))
    assert "none was looked into op by op" in page


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, None])
def test_odd_numbers_by_module_break_nothing(folder: Path, value: float | None) -> None:
    module = ModuleFinding(
        module=GUILTY,
        suspicion=math.inf,
        local_forward_error=value,
        gradient_error=value,
        noise_ratio=value,
        integer_input_max=value,
        update_to_weight=(value, None),
        zero_grad_share=(None, value),
    )
    probe = dataclasses.replace(
        probe_findings("bf16"), noise_ratio=value, rounding_bias=value, retention=value
    )
    verdict = make_verdict("bf16", "reject", probe=probe, modules=(module,), guilty_module=GUILTY)
    paths = write_report(_short(verdict), make_grid(["fp32", "bf16"], (0,)), folder)
    for figure in paths.figures:
        ElementTree.parse(figure)
    assert f"Look at <code>{GUILTY}</code>." in _page(paths)
    assert not re.search(r">\s*[+-]?(nan|inf)\b", _page(paths))


@pytest.mark.parametrize("odd", ["NaN", None, [], {}, "text", 7, {"modules": {"a": None}}])
def test_odd_probe_results_break_nothing(folder: Path, odd: Any) -> None:
    names = ("audit", "exponents", "norms", "lost_updates", "memory", "triage")
    records = [
        dataclasses.replace(r, probes=dict.fromkeys(names, odd))
        for r in make_grid(["fp32", "bf16"], (0,))
    ]
    write_report(_short(make_verdict()), records, folder)


def test_two_hundred_long_names_stay_a_small_page(folder: Path) -> None:
    names = [_LONG.format(k) for k in range(200)]
    modules = module_findings([GUILTY, *names], bad=True)
    verdicts = [dataclasses.replace(_guilty(p), modules=modules) for p in ("bf16", "fp16", "tf32")]
    records = []
    for policy in ("fp32", "bf16", "fp16", "tf32"):
        record = with_probes(realistic_record(policy, 0))
        for probe in ("exponents", "lost_updates"):
            table = record.probes[probe]["modules"]
            record.probes[probe]["modules"] = dict.fromkeys(names, table["head"])
        records.append(record)
    findings = make_findings(*verdicts)
    paths = write_report(findings, records, folder)
    page = _page(paths)
    assert len(page) < 2_000_000
    bars = (paths.html.parent / "figures" / "rounding-bf16.svg").read_text()
    assert f"rounding-bf16-0-{WIDE_ROWS - 1}" in bars
    assert f"rounding-bf16-0-{WIDE_ROWS}" not in bars
    # The table beside it has all of them, in full.
    for name in (names[0], names[199]):
        assert f"<code>{name}</code>" in page
    assert "more rows lose less and are left out here" in page


def test_module_names_cannot_become_markup(folder: Path) -> None:
    evil = '<script>alert("1")</script>`x`$a$'
    verdict = make_verdict(
        "bf16",
        "reject",
        probe=dataclasses.replace(probe_findings("bf16"), notes=(evil,)),
        modules=(ModuleFinding(module=evil, kind=evil, suspicion=9, local_forward_error=0.1),),
        guilty_module=evil,
        guilty_sentence=f"look at `{evil}`: {evil}",
    )
    probes: dict[str, dict[str, Any]] = {
        "audit": {
            "rows": [{"module": evil, "family": evil, "direction": "forward", "format": evil}],
            "nonfinite": [{"module": evil, "op": evil, "direction": evil, "format": evil}],
        },
        "exponents": {"modules": {evil: {"inputs": {"bins": {"90": 3}}}}},
        "lost_updates": {"modules": {evil: {"updates": [3], "lost_bf16": [2]}}},
        "memory": {"weights": 3, "largest": evil},
        "triage": {**triage(), "sentence": evil, "findings": [{"sentence": evil + "."}]},
    }
    records = [dataclasses.replace(r, probes=probes) for r in make_grid(["fp32", "bf16"], (0, 1))]
    findings = _short(verdict, profiles={evil: {"families": {evil: 0.5}, "sentence": evil}})
    paths = write_report(findings, records, folder)
    assert "<script" not in _page(paths)
    assert "<script" not in re.sub(r"`[^`]*`", "", paths.markdown.read_text())
    for figure in paths.figures:
        ElementTree.parse(figure)


def test_a_model_whose_reference_failed_still_has_its_section(folder: Path) -> None:
    findings = make_findings(
        failed="The reference fp32 crashed in seed 0.",
        choice=Choice(policy=None, sentence="No choice.", speed_basis="n/a"),
    )
    page = _page(write_report(findings, [], folder))
    assert "There are no runs of fp32 to pair with." in page
    assert "No run was audited" in page


def _drawn(verdict: Verdict, records: list[RunRecord]) -> dict[str, Any]:
    evidence = gather(_short(verdict), records)
    return draw_all(evidence, policy_styles(evidence.policies, reference="fp32", controls=[]))


def _bar_ends(svg: str, prefix: str) -> list[float]:
    """Return the right ends of the bars whose identifier starts so, in row order."""
    root = ElementTree.fromstring(svg)
    ends = {}
    for element in root.iter():
        name = element.attrib.get("id", "")
        if name.startswith(prefix) and (path := element.find("{*}path")) is not None:
            corners = re.findall(r"[ML] ([\d.]+)", path.attrib["d"])
            ends[int(name.rsplit("-", 1)[1])] = max(map(float, corners))
    return [ends[row] for row in sorted(ends)]


def test_longer_bars_are_larger_errors_and_the_guilty_one_is_red() -> None:
    drawings = _drawn(_guilty(), make_grid(["fp32", "bf16"], (0,)))
    drawing = drawings["rounding-bf16"]
    ends = _bar_ends(drawing.svg["wide"], "rounding-bf16-wide-rounding-bf16-0-")
    errors = [m.local_forward_error for m in _guilty().modules]
    assert len(ends) == len(errors) == 3
    order = sorted(range(3), key=lambda row: errors[row] or 0)
    assert [ends[row] for row in order] == sorted(ends)
    assert ends[0] > ends[1] + 50
    root = ElementTree.fromstring(drawing.svg["wide"])
    bar = next(
        e for e in root.iter() if e.attrib.get("id") == "rounding-bf16-wide-rounding-bf16-0-0"
    )
    assert "#b3372f" in ElementTree.tostring(bar, encoding="unicode")
    assert drawing.alt.startswith(f"Look at {GUILTY}: its local forward error is 0.41.")
    assert len(drawing.caption) > 80


def test_a_phone_shows_fewer_rows() -> None:
    names = [f"m{k}" for k in range(20)]
    verdict = make_verdict("bf16", modules=module_findings(names, bad=False))
    drawing = _drawn(verdict, make_grid(["fp32", "bf16"], (0,)))["rounding-bf16"]
    for size, rows in (("wide", WIDE_ROWS), ("narrow", NARROW_ROWS)):
        assert len(_bar_ends(drawing.svg[size], f"rounding-bf16-{size}-rounding-bf16-0-")) == rows


def test_the_loss_window_holds_band_and_the_scale_used() -> None:
    records = [with_probes(realistic_record(p, 0)) for p in ("fp32", "fp16", "bf16")]
    findings = make_findings(make_verdict("fp16"), make_verdict("bf16"))
    evidence = gather(findings, records)
    styles = policy_styles(evidence.policies, reference="fp32", controls=[])
    drawing = draw_all(evidence, styles)["loss-window"]
    svg = drawing.svg["wide"]
    for part in ("fp16-safe", "fp16-high", "fp16-fp16"):
        assert f'id="loss-window-wide-loss-window-{part}"' in svg
    # BF16 needs no scale, so it is no line here, and nobody computes in E5M2.
    assert "loss-window-fp16-bf16" not in svg
    assert "fp8_e5m2" not in svg
    assert "FP16: 2^8 to 2^13 was safe at every sampled step." in drawing.alt


def test_a_window_without_one_known_end_is_drawn() -> None:
    record = make_record("fp32", 0)
    windows = {"fp16": {"low": [None, 3.0], "high": [9.0, None]}}
    found = {"weight_gradient_steps": [0, 5], "windows": windows}
    record = dataclasses.replace(record, probes={"exponents": found})
    drawing = _drawn(make_verdict("bf16"), [record])["loss-window"]
    ElementTree.fromstring(drawing.svg["narrow"])
    assert "safe at every sampled step" in drawing.alt


def test_long_names_keep_their_telling_end() -> None:
    name = _LONG.format(31)
    assert len(shortened(name)) == 44
    assert shortened(name).endswith("output_projection_dense")
    assert shortened("norm") == "norm"
    assert [power_text(10.0**k) for k in (-5, -3, 0, 2, 6)] == ["1e-5", "0.001", "1", "100", "1e6"]


def test_backticks_become_code_and_nothing_else_does() -> None:
    assert ticked("at `a<b>` & so") == "at <code>a&lt;b&gt;</code> &amp; so"
    assert ticked("one ` alone") == "one ` alone"
    assert markdown_prose("at `blocks_*.a` > 5 *x*") == r"at `blocks_*.a` > 5 \*x\*"
