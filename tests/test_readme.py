"""What the README tells people to type is right: commands, extras, files, exit codes."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _command(marker: str) -> str:
    found = re.search(rf"<!-- command: {marker} -->\n```\n(.*?)\n```", README, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("marker", ["start", "test"])
def test_the_two_commands_are_one_line_of_bash(marker: str) -> None:
    command = _command(marker)
    assert "\n" not in command
    subprocess.run(["bash", "-n", "-c", command], check=True)


def test_the_start_command_runs_the_sweep() -> None:
    assert _command("start").endswith("&& .venv/bin/python -m harness +sweep=precision")
    assert (ROOT / "sweeps" / "precision.yaml").is_file()


def test_the_test_command_installs_an_extra_that_exists() -> None:
    installed = shlex.split(_command("test").split("&&")[1])
    assert installed[-1] == ".[test]"
    assert "test" in PROJECT["optional-dependencies"]
    # The range of pyproject.toml takes this version, or pip would replace it.
    (torch_range,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    assert installed[2] == "torch==2.13.0"
    assert torch_range.specifier.contains("2.13.0")


def test_ci_runs_exactly_this_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    program = re.search(r"awk '(.*?)' README.md", script, re.DOTALL)
    assert program is not None
    found = subprocess.run(
        ["awk", program[1], "README.md"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == _command("test")


def test_the_python_versions_are_those_of_the_project() -> None:
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert "Python 3.11 to 3.13" in README


def test_every_policy_that_exists_is_named() -> None:
    for path in (ROOT / "conf" / "policy").glob("*.yaml"):
        assert f"`{path.stem}`" in README, path.stem


def test_the_example_model_defines_what_a_workload_needs() -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    names = {n.name for n in ast.parse(code[1]).body if isinstance(n, ast.FunctionDef)}
    assert {"build_model", "batches", "loss_fn", "make_optimizer"} <= names
    assert {"make_scheduler", "held_out"} <= names


def test_the_example_model_trains() -> None:
    import torch

    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    file: dict = {}
    exec(code[1], file)
    model = file["build_model"](0)
    optimizer = file["make_optimizer"](model)
    losses = []
    for batch in file["batches"](0, 60):
        loss = file["loss_fn"](model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == 60
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(file["build_model"](1)[0].weight, file["build_model"](1)[0].weight)


def test_files_that_are_linked_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
