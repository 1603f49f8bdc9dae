"""The written report: what is on the page, what is escaped, what happens without data."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from factories import crashed, make_grid
from report_samples import make_findings, make_verdict, realistic_findings, realistic_records

from harness.analysis.findings import Choice, Reason
from harness.report.templating import markdown_cell, markdown_code, typeset
from harness.report.text import safe_name
from harness.report.writer import write_index, write_report

_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class _Tags(HTMLParser):
    """Collects tags and checks that they nest."""

    _VOID = frozenset({"meta", "link", "br", "img", "hr", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self._VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def _parse(page: str) -> _Tags:
    tags = _Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    return tags


def test_files_are_there_and_small(written: Any) -> None:
    paths = written.paths
    assert paths.html.stat().st_size < 2_000_000
    assert json.loads(paths.decision.read_text())["chosen_policy"] == "bf16"
    assert {p.stem for p in paths.figures} >= {"loss", "decision", "difference", "exponents"}
    assert all(p.read_text().startswith("<?xml") for p in paths.figures)


def test_the_page_has_its_sections_in_order(written: Any) -> None:
    tags = _parse(written.html)
    headings = [text.strip() for text in tags.headings]
    assert headings[0] == written.findings.choice.sentence
    assert headings[1:] == [
        "Verdicts",
        "The paired difference: the figure that decides",
        "The evidence, in the order a sceptic asks",
        "Time and memory",
        "What was not tested",
        "What the codes mean",
        "How to reproduce it",
    ]
    figures = re.findall(r'<figure id="figure-([\w-]+)"', written.html)
    assert figures == [
        "decision",
        # The guilty candidates first.
        "rounding-bf16_pure",
        "rounding-fp16_unscaled",
        "rounding-tf32",
        "rounding-fp16",
        "rounding-bf16",
        "rounding-bf16_fallback",
        "exponents",
        "exponent-kinds",
        "loss-window",
        "loss-scale",
        "underflow",
        "lost-updates",
        "loss",
        "difference",
        "gradient-norm",
        "cost",
        "device-time",
        "memory",
    ]


def test_the_first_screen_holds_choice_reasons_and_scope(written: Any) -> None:
    hero = written.html.split("<header", 1)[1].split("</header>", 1)[0]
    findings = written.findings
    for wanted in (findings.choice.sentence, *findings.choice.reasons, findings.scope):
        assert html.escape(wanted) in hero


def test_the_page_is_self_contained_and_needs_no_script(written: Any) -> None:
    tags = _parse(written.html)
    assert not [t for t, _ in tags.seen if t in ("script", "link", "img", "iframe")]
    for _, attributes in tags.seen:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")


def test_landmarks_and_labels(written: Any) -> None:
    tags = _parse(written.html)
    names = [t for t, _ in tags.seen]
    assert names.count("main") == 1
    assert names.count("h1") == 1
    assert {"header", "nav", "footer"} <= set(names)
    for tag, attributes in tags.seen:
        if attributes.get("role") == "region":
            assert attributes["tabindex"] == "0"
            assert attributes["aria-label"]
        if tag == "svg":
            assert attributes["role"] == "img"
    assert names.count("figure") == names.count("figcaption")


def test_cautions_stand_under_the_scope_and_nowhere_else(written: Any) -> None:
    hero, rest = written.html.split("</header>", 1)
    (caveat,) = written.findings.caveats
    assert html.escape(caveat.message) in hero
    assert hero.index(written.findings.scope) < hero.index(caveat.message)
    assert caveat.message not in rest
    markdown = written.paths.markdown.read_text()
    assert markdown.index(caveat.message) < markdown.index("## Verdicts")


def test_the_margin_is_explained_on_both_pages(written: Any) -> None:
    for text in (written.html, written.paths.markdown.read_text()):
        assert "1 margin = 0.02 nats: 1 % of what FP32 learned (2 nats)." in text
        assert "decision.margin=0.02" in text


def test_columns_without_a_figure_are_left_out(folder: Path) -> None:
    records = make_grid(["fp32", "bf16"], held_out=False)
    verdict = make_verdict(
        estimates={"train": make_verdict().estimates["train"]}, peak_memory_ratio=None
    )
    findings = make_findings(verdict, num_steps=120, tail_start=80)
    paths = write_report(findings, records, folder)
    table = paths.html.read_text().split('<table class="verdicts cards"', 1)[1]
    heads = re.findall(r'<th scope="col">(.*?)</th>', table.split("</thead>", 1)[0])
    assert heads == ["Policy", "Verdict", "Training loss (margins)", "Main reason"]
    assert "| policy | verdict | training loss (margins) | main reason |" in (
        paths.markdown.read_text()
    )


def test_ratio_columns_name_the_reference(written: Any) -> None:
    assert '<th scope="col">Step time / fp32</th>' in written.html
    assert '<th scope="col">Memory / fp32</th>' in written.html
    assert "| step time / fp32 | memory / fp32 |" in written.paths.markdown.read_text()


def test_details_read_as_sentences(folder: Path) -> None:
    lost = {"lost_update_share": (0.6, 0.63), "flushed_share_fp16": (0.01, 0.02)}
    control = Reason(code="CONTROL", message="It gets no verdict.", kind="caveat")
    findings = make_findings(
        make_verdict("tf32", step_time_ratio=None, diagnostics=lost),
        make_verdict("bf16_pure", diagnostics=lost, speed_note="not measured: no timing stage"),
        make_verdict("fp32_twin", is_control=True, reasons=(control,)),
        num_steps=120,
        tail_start=80,
    )
    records = [
        dataclasses.replace(r, peak_memory_source="whole process: high-water mark (VmHWM)")
        for r in make_grid(["fp32", "tf32", "bf16_pure", "fp32_twin"])
    ]
    page = html.unescape(write_report(findings, records, folder).html.read_text())
    for wanted in (
        "updates that BF16 weights would lose",
        "updates that its BF16 weights lost (an FP32 weight: would lose)",
        "gradient elements FP16 would flush to zero without loss scaling",
        "It was emulated on this device, so there is no step time.",
        "Step time was not measured: no timing stage.",
        "tf32 is emulated: operands rounded to 10 mantissa bits.",
        "Peak memory is the high-water mark (VmHWM); it counts the whole process.",
        "p-value of the acceptance test",
        "in at most 2.5 %, above the upper end in at most 5 % of such experiments",
        "The control is the exception: its initial weights were moved on purpose",
    ):
        assert wanted in page
    for unwanted in ("lost update share", "p (accept)", "one-sided", "both endpoints"):
        assert unwanted not in page


def test_every_policy_has_its_numbers_in_html_and_markdown(written: Any) -> None:
    markdown = written.paths.markdown.read_text()
    for verdict in written.findings.verdicts:
        (line,) = [
            row
            for row in markdown.splitlines()
            if row.startswith((f"| {verdict.policy} |", f"| {verdict.policy} (emulated) |"))
            and row.count("|") == 8
            and ("accept" in row or "reject" in row or "inconcl" in row or "control" in row)
        ]
        label = "control" if verdict.is_control else verdict.outcome
        assert label in line
        assert f'<span class="name">{verdict.policy}</span>' in written.html
    assert "tf32 (emulated)" in markdown
    assert "python -m harness +sweep=precision workload=char_gpt" in markdown


def test_markdown_is_tables_without_html(written: Any) -> None:
    markdown = written.paths.markdown.read_text()
    assert not re.search(r"<[a-zA-Z/]", markdown)
    lines = markdown.splitlines()
    for index, line in enumerate(lines):
        if line.startswith("| ---"):
            columns = line.count("|")
            assert lines[index - 1].count("|") == columns
            assert lines[index + 1].startswith("|")
            assert len(re.findall(r"(?<!\\)\|", lines[index + 1])) == columns


def test_runs_in_trouble_are_named(written: Any) -> None:
    for text in (written.html, written.paths.markdown.read_text()):
        assert "fp16_unscaled seed 1: diverged: the first non-finite loss is at step 140" in text
        assert "fp16_unscaled seed 2: there is no run" in text


def test_names_are_escaped_everywhere(folder: Path) -> None:
    """Planted fault: every name and sentence tries to become markup."""
    evil = '<script>alert("1")</script>|`x`$a$'
    records = [
        dataclasses.replace(r, policy=evil if r.policy == "bf16" else r.policy)
        for r in make_grid(["fp32", "bf16"])
    ]
    reason = Reason(code="NONINFERIOR", message=evil)
    findings = make_findings(
        make_verdict(evil, description=evil, reasons=(reason,), settle_command=f"run\n{evil}"),
        workload=evil,
        num_steps=120,
        tail_start=80,
        scope=evil,
        choice=Choice(policy=evil, sentence=evil, speed_basis=evil, reasons=(evil,)),
        not_tested=(evil,),
        caveats=(reason,),
        environment={evil: evil},
        command=evil,
        device=evil,
    )
    paths = write_report(findings, records, folder)
    page = paths.html.read_text()
    _parse(page)
    assert "<script" not in page
    assert 'href="javascript' not in page
    assert "<script" not in re.sub(r"(?m)^    .*$", "", paths.markdown.read_text())
    for figure in paths.figures:
        assert "<script" not in figure.read_text()
    index = write_index([findings], folder).read_text()
    _parse(index)
    assert "<script" not in index


def test_a_model_without_a_verdict_says_so(folder: Path) -> None:
    findings = make_findings(
        failed="The reference fp32 crashed in seed 0.",
        choice=Choice(policy=None, sentence="No choice for char_gpt.", speed_basis="n/a"),
    )
    records = [crashed(r) for r in make_grid(["fp32"])]
    paths = write_report(findings, records, folder)
    page = paths.html.read_text()
    _parse(page)
    assert "The reference fp32 crashed in seed 0." in page
    assert "There is no verdict on any policy." in page
    assert paths.figures == ()
    assert "The reference fp32 crashed in seed 0." in paths.markdown.read_text()


def test_no_records_and_bare_verdicts(folder: Path) -> None:
    bare = make_verdict(reasons=(), estimates={}, diagnostics={}, peak_memory_ratio=None)
    findings = make_findings(
        bare, seeds=(), num_steps=0, tail_start=0, not_tested=(), command="", rule={}, caveats=()
    )
    paths = write_report(dataclasses.replace(findings, environment={}), [], folder)
    _parse(paths.html.read_text())


def test_figures_of_an_earlier_report_are_removed(folder: Path) -> None:
    records = make_grid(["fp32", "bf16"])
    findings = make_findings(make_verdict(), num_steps=120, tail_start=80)
    first = write_report(findings, records, folder)
    second = write_report(findings, [], folder)
    assert {p.name for p in (folder / "figures").iterdir()} == {p.name for p in second.figures}
    assert len(second.figures) < len(first.figures)


def test_non_finite_estimates_are_words_on_the_page(written: Any) -> None:
    row = written.html.split('<span class="name">fp16_unscaled</span>', 1)[1].split("</tr>", 1)[0]
    assert "non-finite" in row
    assert not re.search(r">\s*[+-]?nan\b", written.html)
    assert math.isnan(written.findings.verdicts[-1].estimates["train"].mean_difference)


def test_every_code_links_to_its_explanation(written: Any) -> None:
    for code in ("NONINFERIOR", "GROSS_DEGRADATION", "CI_SPANS_MARGIN", "PROBE_MISSING"):
        assert f'href="#code-{code}"' in written.html
        assert f'<dt id="code-{code}">' in written.html


def test_index_links_to_each_model(folder: Path) -> None:
    names = ["char_gpt", "../odd name"]
    all_findings = [make_findings(make_verdict(), workload=name) for name in names]
    for findings in all_findings:
        write_report(findings, [], folder / safe_name(findings.workload))
    index = write_index(all_findings, folder)
    tags = _parse(index.read_text())
    links = [
        attributes["href"]
        for tag, attributes in tags.seen
        if tag == "a" and not (attributes["href"] or "").startswith("#")
    ]
    assert len(links) == 2
    for link in links:
        assert link is not None
        target = (folder / link).resolve()
        assert target.is_file()
        assert target.is_relative_to(folder.resolve())


def test_index_without_models(folder: Path) -> None:
    assert "There is no report." in write_index([], folder).read_text()


def test_typeset_touches_numbers_only() -> None:
    assert typeset("-0.5 [-1.0, +2.0]") == "\u22120.5 [\u22121.0, +2.0]"
    assert typeset("0.81x") == "0.81\u00d7"
    assert typeset("7.4e-05") == "7.4e-05"
    assert typeset("pre-2 matrix") == "pre-2 matrix"


def test_markdown_escapes() -> None:
    assert markdown_cell("a|b *c* `d`\nnext") == r"a\|b \*c\* \`d\` next"
    assert markdown_cell("<b>&") == "&lt;b&gt;&amp;"
    assert markdown_cell("<0.01 [>-0.01, <!-- x -->") == "<0.01 [>-0.01, &lt;!-- x --&gt;"
    assert markdown_cell("bf16_pure [+1, +2]") == "bf16_pure [+1, +2]"
    assert markdown_cell("_x_ [t](javascript:1)") == r"\_x\_ [t]\(javascript:1)"
    assert markdown_code("a\nb") == "    a\n    b"


def test_the_report_imports_neither_torch_nor_trackers(tmp_path: Path) -> None:
    """A report must open in a second on a laptop, and drawing needs no display."""
    script = (
        "import sys; import harness.report.writer, harness.report.terminal; "
        "heavy = {'torch', 'mlflow', 'hydra', 'matplotlib', 'jinja2', 'scipy'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.browser
@pytest.mark.skipif(_CHROMIUM is None, reason="needs Chromium on the PATH")
@pytest.mark.parametrize("width", [390, 500, 1280])
@pytest.mark.parametrize("which", ["report", "index"])
def test_the_page_never_scrolls_sideways(
    tmp_path: Path, written: Any, width: int, which: str
) -> None:
    """The page fits the window, and on a phone so do the verdicts (other tables may scroll)."""
    probe = (
        "<script>const boxes = [...document.querySelectorAll('.cards, .chips')];"
        "const inner = Math.max(...boxes.map(b => b.getBoundingClientRect().right));"
        f"const cards = {width} < 640 ? inner : 0;"
        "const widest = Math.max(document.documentElement.scrollWidth, Math.ceil(cards));"
        "parent.document.title = 'measured ' + widest + '/' + innerWidth;</script>"
    )
    page = written.html
    if which == "index":
        page = write_index([written.findings], tmp_path / "index").read_text(encoding="utf-8")
    page = page.replace("</body>", probe + "</body>")
    # The page's own policy forbids scripts, so the copy that measures goes without it.
    page = re.sub(r"<meta http-equiv[^>]*>", "", page)
    # Chromium's narrowest window is 500, so the page sits in a frame of the width in question.
    frame = f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(page)}">'
    target = tmp_path / "frame.html"
    target.write_text(f"<!doctype html><title></title>{frame}</iframe>", encoding="utf-8")
    command = [
        str(_CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1400,900", "--dump-dom", target.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    found = re.search(r"measured (\d+)/(\d+)", done.stdout)
    assert found is not None
    assert int(found[2]) == width
    assert int(found[1]) <= width


def test_two_models_do_not_share_state(folder: Path) -> None:
    records = realistic_records("digits_convnet")
    findings = realistic_findings(records, "digits_convnet")
    paths = write_report(findings, records, folder)
    assert "digits_convnet" in paths.html.read_text()


def test_a_model_without_verdicts_has_no_empty_table(tmp_path: Path) -> None:
    findings = make_findings(failed="The reference fp32 crashed (seed 1): planted.")
    page = write_report(findings, [], tmp_path).markdown.read_text(encoding="utf-8")
    assert "There is no verdict on any policy." in page
    assert "| policy | verdict |" not in page
