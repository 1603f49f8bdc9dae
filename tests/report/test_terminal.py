"""The table at the end of a sweep, at narrow and wide widths and in a log file."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from report_samples import estimate, make_findings, make_verdict
from rich.console import Console

from harness.analysis.codes import CODES
from harness.analysis.findings import Choice, ModelFindings, Ratio, Reason
from harness.report import phrases
from harness.report.terminal import print_findings

_PATH = Path(
    "/somewhere/rather/long/reports/precision-1a2b3c4d/char_gpt/deep/down/in/folders/report.html"
)

_PROBE_CAVEATS = ("PROBE_WEAK_SIGNAL", "PROBE_MISSING")  # never what decides


def _printed(findings: ModelFindings, width: int, **options: Any) -> str:
    file = io.StringIO()
    print_findings(findings, Console(file=file, width=width, **options), report_path=_PATH)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_fits_and_has_no_control_codes(written: Any, width: int) -> None:
    text = _printed(written.findings, width)
    assert "\x1b" not in text
    whole_lines = {str(_PATH), "seed=0,1,2,3,4"}  # what is copied is never wrapped
    for line in text.splitlines():
        assert len(line) <= width or any(part in line for part in whole_lines)
    for verdict in written.findings.verdicts:
        (row,) = [x for x in text.splitlines() if x.startswith((f"{verdict.policy} ",))]
        assert ("control" if verdict.is_control else verdict.outcome) in row
    reasons = {
        "bf16_pure": "far worse in every seed",
        "bf16": "inside the margin",
        "fp16_unscaled": "NaN or infinity",
        "fp32_twin": "for comparison only",
    }
    if width > 80:  # at 80 columns the longer ones wrap
        for policy, reason in reasons.items():
            (row,) = [x for x in text.splitlines() if x.startswith(f"{policy} ")]
            assert row.rstrip().endswith(reason)


def test_rows_carry_interval_ratios_and_emulation(written: Any) -> None:
    rows = {line.split()[0]: line for line in _printed(written.findings, 80).splitlines() if line}
    assert "1.42x" in rows["bf16"]
    assert "0.87x" in rows["bf16"]
    assert rows["tf32"].startswith("tf32 *")
    assert rows["bf16_pure"].count("[") == 1
    wide = _printed(written.findings, 140).splitlines()
    (row,) = [line for line in wide if line.startswith("bf16_pure ")]
    assert row.count("[") == 2


def test_ratios_are_named_after_the_reference_and_left_out_where_nothing_was_measured() -> None:
    timed = make_verdict(step_time_ratio=Ratio(value=0.8), peak_memory_ratio=None)
    text = _printed(make_findings(timed, make_verdict("fp16", peak_memory_ratio=None)), 80)
    assert "/ fp32" in text
    assert "0.80x" in text
    assert "memory" not in text
    bare = _printed(make_findings(make_verdict(peak_memory_ratio=None)), 80)
    assert "/ fp32" not in bare
    assert "n/a" not in bare


def test_without_a_held_out_set_only_the_training_loss_is_shown() -> None:
    verdict = make_verdict(estimates={"train": estimate((0.001, 0.002, 0.0015))})
    for width in (80, 140):
        text = _printed(make_findings(verdict), width)
        assert "training loss" in text
        assert "held-out" not in text
        assert "held_out" not in text


def test_the_size_of_the_margin_is_told_with_what_set_it(written: Any) -> None:
    text = _printed(written.findings, 120)
    assert "1 margin = 0.02 nats: 1 % of what FP32 learned (2 nats)." in text
    assert "decision.margin=0.02" in text
    verdict = make_verdict(
        estimates={
            "train": estimate((0.001, 0.002, 0.0015)),
            "held_out": dataclasses.replace(
                estimate((0.0, 0.0, 0.0), margin=0.04), margin_term="loss"
            ),
        }
    )
    text = _printed(make_findings(verdict), 120)
    assert "1 margin of training loss = 0.02 nats: 1 % of what FP32 learned (2 nats)." in text
    assert "1 margin of held-out loss = 0.04 nats: 2 % of FP32's loss at the end (2 nats)." in text


def test_cautions_on_the_model_take_a_line_each() -> None:
    caveats = tuple(
        Reason(code=code, message="a long message " * 20, kind="warning")
        for code in ("LOSS_NEAR_ZERO", "LOSS_NEAR_ZERO", "LR_FLOOR_NOT_TESTED", "CHAOTIC_MODEL")
    )
    text = _printed(make_findings(make_verdict(), caveats=caveats), 80)
    lines = [line.rstrip() for line in text.splitlines() if line.startswith("Caution: ")]
    assert len(lines) == 3
    assert all(line.endswith(")") for line in lines)
    assert lines[0].endswith("(LOSS_NEAR_ZERO)")


def test_every_caution_fits_a_line_and_every_phrase_has_a_documented_code() -> None:
    for code, phrase in phrases._CAUTIONS.items():
        assert len(f"Caution: {phrase} ({code})") <= 80
    assert set(phrases._CAUTIONS) | set(phrases._REASONS) <= set(CODES)


@pytest.mark.parametrize(
    "code", [c for c in CODES if c.startswith("PROBE_") and c not in _PROBE_CAVEATS]
)
def test_a_failing_probe_is_told_once_and_in_words(code: str) -> None:
    """More seeds do not answer it, so the code is the reason and what stands in their way."""
    verdict = make_verdict(
        "bf16",
        "inconclusive",
        reasons=(Reason(code=code, message="The weights stall."),),
        extra_seeds_reason=code,
    )
    text = _printed(make_findings(verdict), 80)
    assert text.count("The weights stall.") == 1
    assert code not in text


def test_what_is_emulated_is_said_once_per_kind() -> None:
    detail = (
        "BF16 tensors throughout; attention computed in FP32 from BF16 operands and rounded once, "
        "other ops native, following CUDA autocast's lists; accumulation order is not modelled."
    )
    reasons = (
        Reason(code="NONINFERIOR", message="m"),
        Reason(code="EMULATED", message=detail, kind="caveat"),
    )
    verdicts = [
        make_verdict(name, reasons=reasons, execution="emulated") for name in ("bf16", "bf16_pure")
    ]
    text = _printed(make_findings(*verdicts), 140)
    assert (
        "  bf16, bf16_pure: attention computed in FP32 from BF16 operands and rounded once, other "
        "ops native\n"
    ) in text


def test_recommendation_path_and_settling_command_are_whole(written: Any) -> None:
    text = _printed(written.findings, 80)
    assert f"Report: {_PATH}\n" in text
    command = "python -m harness +sweep=precision workload=char_gpt policy=fp32,bf16_fallback"
    assert f"  {command} seed=0,1,2,3,4\n" in text
    assert written.findings.choice.sentence in " ".join(text.split())


def test_names_are_not_console_markup() -> None:
    name = "[red]x[/red][/nothing]"
    reason = Reason(code="NONFINITE", message="[bold]m[/bold][/nothing]")
    findings = make_findings(
        make_verdict(name, "reject", reasons=(reason,)),
        workload=name,
        choice=Choice(policy=None, sentence=name, speed_basis="measured"),
    )
    text = _printed(findings, 200)
    # Heading, row, smallest harm, failure rate, reason, recommendation.
    assert text.count(name) == 6
    assert "[bold]m[/bold][/nothing]" in text


def test_a_failed_model_prints_its_sentence() -> None:
    text = _printed(make_findings(failed="The reference crashed."), 80)
    assert "No verdict: The reference crashed." in text
    settled = make_findings(make_verdict("bf16", "accept"), failed="The reference crashed.")
    assert "Incomplete: The reference crashed." in _printed(settled, 80)


def test_colour_only_in_a_terminal(written: Any) -> None:
    assert "\x1b[" in _printed(written.findings, 80, force_terminal=True, color_system="standard")


def test_output_is_ascii_where_the_stream_is(written: Any) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_findings(written.findings, Console(file=stream, width=80), report_path=_PATH)
    stream.flush()
    assert b"bf16_pure" in raw.getvalue()


def test_what_no_seeds_settle_says_what_would() -> None:
    reasons = (
        Reason(code="CI_SPANS_MARGIN", message="The seeds do not tell."),
        Reason(code="UNRESOLVABLE_AT_NMAX", message="A longer run would."),
    )
    verdict = make_verdict(
        "bf16", "inconclusive", reasons=reasons, extra_seeds_reason="UNRESOLVABLE_AT_NMAX"
    )
    assert "bf16: The seeds do not tell. A longer run would.\n" in _printed(
        make_findings(verdict), 100
    )
