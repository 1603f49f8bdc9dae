"""The page: written whole from the results, by the command alone, and again bit for bit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from factories import make_record
from synthetic_bank import ARMS, MARGIN, Planted, SyntheticBank

import harness
from harness.analysis.rule import DecisionRule
from harness.calibration import study
from harness.calibration.arm_tables import arm_row
from harness.calibration.bank import Bank, run_key, write_run
from harness.calibration.in_short import in_short
from harness.calibration.page_text import margins_text, share_text, table
from harness.calibration.study import JUDGED_FOLDER, StudyResult, run_study
from harness.calibration.tables import wanted_text
from harness.calibration.targets import Aim

COMMAND = "python -m harness.calibration --quick --seeds 9"
FEW = {name: ARMS[name] for name in ("fp32_noise", "fp32_ulp", "bf16", "two_margins", "nan")}


def _bank(folder: Path) -> Bank:
    bank = SyntheticBank().add("gpt_cool", FEW, seeds=range(9))
    bank.add("recurrent", {**FEW, "stalls": ARMS["stalls"]}, seeds=range(9)).write(folder)
    return Bank(folder)


def _studied(folder: Path) -> StudyResult:
    """Judge the bank below a folder and write the page into the folder, with three draws."""
    return run_study(Bank(folder / "bank"), output=folder, draws=3, command=COMMAND, workers=1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StudyResult]:
    folder = tmp_path_factory.mktemp("study")
    bank = _bank(folder / "bank")
    return folder, run_study(
        bank, output=folder / "docs", draws=6, command=COMMAND, quick=True, workers=1
    )


def test_the_page_has_every_section_and_its_figures(written: tuple[Path, StudyResult]) -> None:
    folder, result = written
    text = result.document.read_text(encoding="utf-8")
    assert result.document == folder / "docs" / "calibration.md"
    assert re.findall(r"^## (.*)$", text, flags=re.M) == [
        "What it must show",
        "How it was done",
        "Tasks and arms",
        "Rules side by side",
        "By size of the harm",
        "Operating characteristic",
        "Seeds and compute",
        "The planted faults",
        "What this does not show",
        "Every arm",
    ]
    linked = set(re.findall(r"\]\((calibration/\w+\.png)\)", text))
    assert {p.name for p in (folder / "docs" / "calibration").iterdir()} == {
        Path(link).name for link in linked
    }
    assert len(linked) == 5
    for link in linked:
        data = (folder / "docs" / link).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        # Small enough to be committed.
        assert len(data) < 120_000
    assert text.isascii()
    assert f"Written by `{COMMAND}`;" in text


def test_targets_are_those_of_the_reported_half(written: tuple[Path, StudyResult]) -> None:
    _, result = written
    text = result.document.read_text(encoding="utf-8")
    (row,) = (t for t in result.targets if t.title == "harmful arms accepted, worst arm")
    # Draws of three odd seeds do not meet the runs that fail: the arm is accepted there.
    aim = row.aims["3"]
    assert aim.value is not None
    assert aim.value == max(
        arm.tallies["ours@3"].accept
        for task in result.tasks
        if task.task == "recurrent"
        for arm in task.arms
        if arm.group == "harm"
    )
    line = next(x for x in text.splitlines() if x.startswith("| harmful arms accepted, worst arm"))
    said = "met" if aim.value <= 0.03 else "MISSED"
    assert f"{share_text(aim.value)}: {said}" in line


def test_every_table_is_a_table(written: tuple[Path, StudyResult]) -> None:
    text = written[1].document.read_text(encoding="utf-8")
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.M)
    assert len(blocks) >= 9
    for block in blocks:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.strip().splitlines()}
        assert len(widths) == 1, block[:200]


def test_all_arms_are_listed(written: tuple[Path, StudyResult]) -> None:
    text = written[1].document.read_text(encoding="utf-8").split("## Every arm")[1]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == 11
    (stalls,) = (row for row in rows if "`stalls`" in row)
    assert "quiet fault" in stalls
    assert "stagnation" in stalls


def test_the_same_bank_gives_the_same_bytes_and_is_not_judged_again(
    written: tuple[Path, StudyResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first = written
    before = first.document.read_bytes()
    pictures = {p: p.read_bytes() for p in (folder / "docs" / "calibration").iterdir()}

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("judged again")

    monkeypatch.setattr(study, "judge_task", refuse)
    again = run_study(
        Bank(folder / "bank"),
        output=folder / "docs",
        draws=6,
        command=COMMAND,
        quick=True,
        workers=1,
    )
    assert again.document.read_bytes() == before
    assert {p: p.read_bytes() for p in pictures} == pictures
    with pytest.raises(AssertionError, match="judged again"):
        run_study(
            Bank(folder / "bank"),
            output=folder / "docs",
            draws=7,
            command=COMMAND,
            quick=True,
            workers=1,
        )
    with pytest.raises(AssertionError, match="judged again"):
        run_study(
            Bank(folder / "bank"),
            output=folder / "docs",
            draws=6,
            command=COMMAND,
            workers=1,
            rule=DecisionRule(gross_margins=4.0),
        )


def test_a_changed_bank_or_a_broken_store_is_judged_again(tmp_path: Path) -> None:
    bank = SyntheticBank().add("recurrent", FEW, seeds=range(8))
    bank.write(tmp_path / "bank")

    first = _studied(tmp_path)
    assert first.tasks[0].num_seeds == 8
    stored = tmp_path / "bank" / JUDGED_FOLDER / "recurrent.json"
    stored.write_text("{")
    assert _studied(tmp_path).tasks[0].to_json() == first.tasks[0].to_json()
    for name, arm in bank.stored_arms("recurrent").items():
        record = next(iter(bank.records("recurrent")[name].values()))
        policy = dataclasses.replace(
            make_record("fp32", 8, workload="recurrent"),
            policy=name,
            policy_content=record.policy_content,
            run_key=run_key(arm.key, 8),
        )
        write_run(tmp_path / "bank", policy)
    assert _studied(tmp_path).tasks[0].num_seeds == 9


@pytest.mark.slow
def test_processes_change_nothing(written: tuple[Path, StudyResult]) -> None:
    folder, first = written
    for stored in (folder / "bank" / JUDGED_FOLDER).iterdir():
        stored.unlink()
    again = run_study(
        Bank(folder / "bank"),
        output=folder / "docs",
        draws=6,
        command=COMMAND,
        quick=True,
        workers=2,
    )
    assert again.document.read_bytes() == first.document.read_bytes()
    assert [t.to_json() for t in again.tasks] == [t.to_json() for t in first.tasks]


def test_a_bank_without_harm_or_without_seeds_still_gives_a_page(tmp_path: Path) -> None:
    few = {"bf16": ARMS["bf16"], "fault": Planted(diverges=frozenset({0}))}
    SyntheticBank().add("recurrent", few, seeds=range(2)).write(tmp_path / "bank")
    result = _studied(tmp_path)
    text = result.document.read_text(encoding="utf-8")
    assert "No task has a usable source of noise." in text
    assert {aim.met for t in result.targets for aim in t.aims.values()} == {None}


def test_an_empty_bank_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no runs to judge"):
        run_study(Bank(tmp_path), output=tmp_path, draws=3, command=COMMAND)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "n/a"),
        (0.0, "0 %"),
        (0.0001, "<0.1 %"),
        (0.004, "0.4 %"),
        (0.03, "3.0 %"),
        (0.126, "13 %"),
        (0.953, "95.3 %"),
        (0.9994, "99.9 %"),
        (0.9995, ">99.9 %"),
        (0.9999, ">99.9 %"),
        (1.0, "100 %"),
    ],
)
def test_shares_never_round_to_nothing_or_to_all(share: float | None, text: str) -> None:
    assert share_text(share) == text


def test_sizes_in_margins() -> None:
    values = (0.004, -0.001, 1.234, -2.5, 12.34, 99.96, 1234.5, 2e6, float("inf"), float("nan"))
    assert [margins_text(v) for v in values] == [
        "0", "0", "1.23", "-2.50", "12.3", "100", "1234", "2e+06", "not finite", "n/a",
    ]  # fmt: skip


def test_a_bar_in_a_cell_ends_no_cell() -> None:
    text = table(("a", "b"), [("x|y", "`code`")], numbers=1)
    assert text.splitlines() == ["| a | b |", "| --- | ---: |", "| x\\|y | `code` |"]


def test_a_bank_of_few_seeds_claims_nothing_about_looks(tmp_path: Path) -> None:
    bank = SyntheticBank().add("gpt_cool", FEW, seeds=range(4))
    bank.add("recurrent", FEW, seeds=range(4)).write(tmp_path / "bank")
    stale = tmp_path / "calibration" / "pairs.png"
    stale.parent.mkdir()
    stale.touch()
    result = _studied(tmp_path)
    text = result.document.read_text(encoding="utf-8")
    measured = [a.met for t in result.targets for a in t.aims.values() if a.met is not None]
    not_measured = [
        a for t in result.targets for a in t.aims.values() if a.limit is not None and a.met is None
    ]
    assert len(measured) == 5
    assert len(not_measured) == 8
    assert re.search(r"5 targets that could be measured are met. 8 targets could not be", text)
    assert "ours with looks" not in text.split("## How it was done")[0]
    assert "No task has the 8 seeds that looks may take." in text
    # The intervals are over half B, which is one task here.
    assert "as far as one task can tell" in text
    assert not stale.exists()


def test_arms_that_were_never_trained_are_named(tmp_path: Path) -> None:
    bank = SyntheticBank().add("recurrent", FEW, seeds=range(3))
    bank.write(tmp_path / "bank")
    for path in (tmp_path / "bank" / "recurrent" / "two_margins").iterdir():
        path.unlink()
    result = _studied(tmp_path)
    assert result.tasks[0].incomplete == ("two_margins",)
    assert "Left out, as some of their seeds are missing: `recurrent/two_margins`." in (
        result.document.read_text(encoding="utf-8")
    )


def test_a_null_arm_that_its_seeds_call_grey_is_called_so(tmp_path: Path) -> None:
    # Eight seeds of three margins of noise: two standard errors are about two margins.
    arms = {"fp32_noise": Planted(kind="null", policy="fp32", luck=3 * MARGIN)}
    SyntheticBank().add("recurrent", arms, seeds=range(8)).write(tmp_path / "bank")
    result = _studied(tmp_path)
    (arm,) = result.tasks[0].arms
    assert (arm.group, arm.truth.label) == ("null", "grey")
    assert arm_row(arm)[2:4] == ["null", "grey"]


def test_targets_in_words_are_their_limits() -> None:
    assert wanted_text(Aim(value=None, limit=0.005)) == "at most 0.5 %"
    assert wanted_text(Aim(value=0.1, limit=0.95, at_least=True)) == "at least 95 %"
    assert wanted_text(Aim(value=0.1, limit=None)) == "none"


def test_a_stored_result_rests_on_all_code_that_judges() -> None:
    """What `judging` imports of this room is in the hash that a stored result carries."""
    package = Path(harness.__file__).parent
    waiting, needed = ["judging", "contenders"], set()
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            text = (package / "calibration" / f"{name}.py").read_text(encoding="utf-8")
            waiting += re.findall(r"^from harness\.calibration\.(\w+) import", text, flags=re.M)
    # The bank is what is judged; its records carry their own hash.
    hashed = {Path(name).stem for name in study._JUDGING if name.startswith("calibration/")}
    assert hashed == needed - {"bank"}


def test_the_first_lines_say_what_a_verdict_is_worth_and_what_is_in_no_rate(
    written: tuple[Path, StudyResult],
) -> None:
    _, result = written
    assert "Can a verdict be trusted?" in result.document.read_text(encoding="utf-8")
    (recurrent,) = (task for task in result.tasks if task.task == "recurrent")
    (nan,) = (arm for arm in recurrent.arms if arm.name == "nan")
    tally = dataclasses.replace(nan.tallies["ours@looks"], accept=0.64, reject=0.36)
    tally = dataclasses.replace(tally, inconclusive=0.0)
    rare = dataclasses.replace(
        nan,
        name="rare",
        truth=dataclasses.replace(nan.truth, label="intermittent", hard_failures=0.125),
        tallies={**nan.tallies, "ours@looks": tally},
    )
    tasks = (dataclasses.replace(recurrent, arms=(*recurrent.arms, rare)),)
    text = in_short(tasks, "B", names="half B")
    assert "accepted were `recurrent/rare` in 64 % (12 % of the seeds fail)" in text
    harm = [arm for arm in recurrent.arms if arm.group == "harm"]
    assert f"The {len(harm)} arms that harm" in text
    # Without looks there is nothing to say.
    none = tuple(dataclasses.replace(task, arms=()) for task in tasks)
    assert in_short(none, "B", names="half B") == ""
