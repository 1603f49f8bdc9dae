"""The command line before Hydra sees it, and how errors are told (no training)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from harness import cli
from harness.config import ConfigError


def test_plain_call_runs_the_internal_pair():
    assert cli.prepared([]) == ["--multirun", "+sweep=pair"]


def test_named_sweep_gets_multirun_mode_once():
    assert cli.prepared(["+sweep=precision"]) == ["--multirun", "+sweep=precision"]
    assert cli.prepared(["+sweep=precision", "-m"]) == ["-m", "+sweep=precision"]
    given = ["+sweep=precision", "hydra.mode=RUN"]
    assert cli.prepared(given) == given


@pytest.mark.parametrize("flag", ["--help", "--cfg=job", "--info", "--hydra-help"])
def test_information_flags_are_left_alone(flag):
    assert cli.prepared([flag]) == [flag]


def test_flags_between_overrides_are_moved_to_the_front():
    given = ["+sweep=precision", "--config-dir", "mine", "seed=1", "--config-name=x"]
    expected = ["--config-dir", "mine", "--config-name=x", "--multirun", "+sweep=precision"]
    assert cli.prepared(given) == [*expected, "seed=1"]


def test_an_unknown_flag_is_named():
    with pytest.raises(ConfigError, match="unknown flag --bogus"):
        cli.prepared(["+sweep=precision", "--bogus"])


def test_report_action_is_a_single_job():
    assert cli.prepared(["action=report", "sweep_id=latest"])[-1] == "hydra.mode=RUN"


def test_seeds_of_a_workload_file_are_defaults(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import torch_is_not_imported_here\nSEEDS = (3, 4)\n")
    given = ["+sweep=precision", "workload=custom", f"workload.file={path}"]
    assert "seed=3,4" in cli.prepared(given)
    for other in (
        "seed=1",
        "decision.seeds=3",
        "decision.looks=[3,5]",
        "decision.always_valid=true",
    ):
        assert "seed=3,4" not in cli.prepared([*given, other])


def test_policy_fields_make_a_policy_beside_the_reference():
    arguments = cli.prepared(
        ["policy=bf16", "policy.fp32_modules=[norm,head]", "policy.name=bf16_norm_head"]
    )
    assert "policy=fp32,_bf16_from_command_line" in arguments
    assert not any(a.startswith("policy.") for a in arguments)


def test_importing_the_command_line_imports_nothing_heavy():
    heavy = ["torch", "mlflow", "scipy", "matplotlib", "sklearn", "pandas"]
    code = f"import sys, harness.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signals_interrupt_in_the_background_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    number = getattr(signal, name)

    def ended_by_the_batch_system() -> None:
        os.kill(os.getpid(), number)
        time.sleep(1)

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    # As a shell starts a command in the background.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr(cli, "_application", ended_by_the_batch_system)
    monkeypatch.setattr(sys, "argv", ["harness"])
    for name in ("HYDRA_FULL_ERROR", cli.COMMAND_VARIABLE):  # the command line sets them
        monkeypatch.setenv(name, os.environ.get(name, ""))
    try:
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert stopped.value.code == 130
    assert "interrupted" in capsys.readouterr().err
