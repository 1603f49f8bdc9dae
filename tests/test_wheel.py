"""The wheel, built through the sdist as pip does it, runs from an empty folder with its YAML."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


def _run(*command: str | Path, cwd: Path, **more: object) -> str:
    # A PYTHONPATH would bring the checkout back in.
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **more,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    # Without isolation, since that would download hatchling: the test extra has it.
    pytest.importorskip("hatchling", reason="needs the build backend; the test extra has it")
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(scope="module")
def python(distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a new environment that has the wheel, and our dependencies by path."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    # One `pip --python` instead of a pip of its own: that takes seconds to install.
    _run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"),
        distributions["wheel"],
        cwd=folder,
    )
    site = Path(
        _run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
        ).strip()
    )
    # Lines of a .pth file come after the environment's own packages, and .pth files found there
    # are not followed: an editable install of the checkout stays out.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def _contents(path: Path) -> set[str]:
    if path.suffix == ".whl":
        return set(zipfile.ZipFile(path).namelist())
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers()}


def test_everything_is_inside(distributions: dict[str, Path]) -> None:
    wheel, sdist = _contents(distributions["wheel"]), _contents(distributions["sdist"])
    for kind in ("conf", "sweeps"):
        for path in (ROOT / kind).rglob("*.yaml"):
            name = path.relative_to(ROOT).as_posix()
            assert f"harness/_{name}" in wheel
            assert name in sdist
    for package in ("harness", "hydra_plugins"):
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.relative_to(ROOT).as_posix() in wheel
                assert path.relative_to(ROOT).as_posix() in sdist
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= sdist
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    assert not any(name.startswith("tests") for name in wheel)


def test_it_is_the_installed_one_that_runs(python: Path, tmp_path: Path) -> None:
    where = _run(python, "-c", "import harness; print(harness.__file__)", cwd=tmp_path)
    assert where.startswith(str(python.parent.parent))


def test_help_from_an_empty_folder(python: Path, tmp_path: Path) -> None:
    text = _run(python, "-m", "harness", "--help", cwd=tmp_path)
    assert "sweep" in text
    assert "bf16_fallback" in text  # the YAML came along
    assert _run(python.with_name("harness"), "--help", cwd=tmp_path) == text
    assert list(tmp_path.iterdir()) == []  # asking for help leaves nothing behind


def test_a_dry_run_from_an_empty_folder(python: Path, tmp_path: Path) -> None:
    text = _run(python, "-m", "harness", "+sweep=smoke", "dry_run=true", cwd=tmp_path)
    assert "digits_convnet" in text
