"""The command from nothing to the page, on trainings and faults of the catalogue."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
from bank_processes import session_is_empty, wait_for

from harness.calibration import __main__ as command
from harness.calibration.arms import arms_of

HERE = Path(__file__).resolve().parent
TASKS = ("mlp_regression", "convnet")
NUM_SEEDS = 3

pytestmark = pytest.mark.slow


def test_the_quick_study_from_training_to_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of its three tasks, one of each half, with as many seeds as make a verdict."""
    bank, output = tmp_path / "bank", tmp_path / "out"
    arguments = ["--quick", "--tasks", ",".join(TASKS), "--seeds", str(NUM_SEEDS)]
    arguments += ["--bank", str(bank), "--output", str(output)]
    assert command.run(arguments) == 0
    captured = capsys.readouterr()
    page = output / "calibration.md"
    assert captured.out.splitlines()[-1] == f"wrote {page}"
    assert captured.err == ""
    arms = {task: [arm.name for arm in arms_of(task, quick=True)] for task in TASKS}
    assert len(list(bank.glob("*/*/seed-*.json"))) == NUM_SEEDS * sum(map(len, arms.values()))

    text = page.read_text(encoding="utf-8")
    assert (
        f"`python -m harness.calibration --quick --tasks {','.join(TASKS)} --seeds {NUM_SEEDS}`"
        in text
    )
    # Every arm is there with a verdict of three pairs, and no run was void.
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.*) \|$", text, flags=re.M)
    assert {(task, arm) for task, arm, _ in listed} == {
        (task, arm) for task, names in arms.items() for arm in names[1:]
    }
    is_now = {(task, arm): rest.split(" | ") for task, arm, rest in listed}
    assert not any(cells[1] == "void" for cells in is_now.values())
    assert all(re.fullmatch(r"[\d.]+ / [\d.]+ / [\d.]+", cells[6]) for cells in is_now.values())
    # What was planted to be gross is found for what it is, and BF16 is not.
    gross = is_now["mlp_regression", "fp16_underflow@12"]
    assert (gross[1], gross[6]) == ("harm", "0.00 / 0.00 / 1.00")
    assert is_now["convnet", "bf16"][6].endswith("/ 0.00")
    # Three seeds are enough for neither looks nor what is drawn of them.
    figures = sorted(path.name for path in (output / "calibration").iterdir())
    assert figures == ["operating.png", "rules.png"]
    for name in figures:
        assert f"](calibration/{name})" in text
        image = matplotlib.image.imread(output / "calibration" / name)
        # Axes without data leave 2.3 % of the picture anything but white.
        assert (image[..., :3].min(axis=-1) < 0.9).mean() > 0.035

    before = page.read_bytes()
    assert command.run(arguments) == 0
    assert "0 runs and 0 same-point probes to come" in capsys.readouterr().out
    assert page.read_bytes() == before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interruption_while_judging_waits_for_nobody(tmp_path: Path, name: str) -> None:
    """In the background, where a shell has SIGINT ignored, and for the started process alone."""
    code = (
        "import sys; from pathlib import Path; from bank_processes import SleepyBank\n"
        "from harness.calibration.interrupts import answer_interrupts\n"
        "from harness.calibration.study import run_study\n"
        "answer_interrupts()\n"
        "folder = Path(sys.argv[1])\n"
        "try: run_study(SleepyBank(folder), output=folder, draws=1, command='', workers=2)\n"
        "except KeyboardInterrupt: sys.exit(130)\n"
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    wait_for(lambda: len(list(tmp_path.glob("judging-*"))) == 2)
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "")
    wait_for(lambda: session_is_empty(process.pid), seconds=10)
