"""The house rules that a reviewer would otherwise have to remember, read off the source.

Who may import whom, what stays free of torch, where global precision is set, what each YAML says,
and that nothing of one machine is in the tree.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "harness"

# Room -> what it may import of the harness, besides itself. A dotted name admits that module only.
ALLOWED = {
    "numerics": set(),
    "precision": {"numerics"},
    "probes": {"numerics", "precision"},
    "workloads": {"numerics", "precision"},
    "runs": {"numerics", "precision", "probes", "workloads"},
    "tracking": {"runs.record", "runs.record_files"},
    "progress": set(),
    "analysis": {
        "numerics",
        "precision.directions",
        "precision.module_names",
        "precision.policy",
        "runs.record",
        "runs.record_files",
        "runs.same_point.record",
    },
    "report": {
        "analysis",
        "numerics",
        "precision.policy",
        "runs.notes",
        "runs.record",
        "runs.record_files",
    },
    "calibration": {
        "numerics",
        "precision",
        "probes",
        "workloads",
        "runs",
        "analysis",
        "report",
    },
    # The command line and what it is made of see everything below.
    "cli": None,
    "config": None,
    "config_schema": set(),
    "error_text": None,
    "experiment": None,
    "__main__": None,
    "__init__": set(),
}
TORCH_FREE_ROOMS = ("analysis", "report", "progress", "tracking")
TORCH_FREE_MODULES = (
    "harness.numerics.formats",
    "harness.precision.module_names",
    "harness.precision.policy",
    "harness.runs.record",
    "harness.runs.same_point.record",
    "harness.runs.timing.record",
    "harness.cli",
    "harness.config",
    "harness.config_schema",
)
# `isolation` puts back what a user's file may have changed.
SWITCH_SETTERS = ("harness.precision.execution", "harness.workloads.isolation")
HYDRA_ROOMS = {"cli", "config", "error_text", "experiment"}
MAX_LINES = 330


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path
    return found


MODULES = _modules()


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@functools.cache
def _imports(module: str) -> frozenset[str]:
    """Return the dotted names that a module imports anywhere, also inside functions.

    What is imported only for a type checker does not run and does not count.
    """
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    return frozenset(
        name for node in ast.walk(tree) if node not in skipped for name in _named(node)
    )


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield str(node.module)
        # `from harness.runs import record` imports a module as well.
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _own(module: str) -> set[str]:
    """Return the harness modules that a module imports, packages on the way included."""
    found = set()
    for name in _imports(module):
        parts = name.split(".")
        found |= {".".join(parts[: k + 1]) for k in range(len(parts))} & MODULES.keys()
    return found - {"harness", module}


def _reachable(module: str) -> set[str]:
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting.extend(_own(current))
    return seen


def _third_party(module: str) -> set[str]:
    return {name.split(".")[0] for name in _imports(module)}


def test_every_room_is_in_the_table() -> None:
    assert {_room(module) for module in MODULES} <= ALLOWED.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    allowed = ALLOWED[_room(module)]
    if allowed is None:
        return
    for name in _own(module):
        inside = name.removeprefix("harness.")
        is_package_of_allowed = any(a.startswith(f"{inside}.") for a in allowed)
        assert (
            _room(name) == _room(module)
            or _room(name) in allowed
            or inside in allowed
            or is_package_of_allowed
        ), f"{module} imports {name}"


@pytest.mark.parametrize(
    "module",
    [
        m
        for m in MODULES
        # The command line reaches everything; what it loads is tested below.
        if _room(m) not in HYDRA_ROOMS
        and (_room(m) in ("analysis", "report") or m in TORCH_FREE_MODULES)
    ],
)
def test_torch_mlflow_and_hydra_stay_out_at_any_depth(module: str) -> None:
    for name in _reachable(module):
        unwanted = _third_party(name) & {"torch", "mlflow", "hydra", "omegaconf"}
        assert not unwanted, f"{module} reaches {unwanted} through {name}"


def test_hydra_and_mlflow_have_their_rooms() -> None:
    for module in MODULES:
        if _third_party(module) & {"hydra", "omegaconf"}:
            assert _room(module) in HYDRA_ROOMS, module
        if "mlflow" in _third_party(module):
            assert _room(module) == "tracking", module


def _loaded_after(program: str) -> set[str]:
    """Return which heavy packages a fresh Python has loaded after `program`."""
    heavy = "torch mlflow scipy matplotlib sklearn pandas hydra".split()
    code = f"{program}\nimport sys\nprint(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_a_report_is_read_without_torch() -> None:
    loaded = _loaded_after("import harness.analysis.analyzer, harness.report.writer")
    assert not loaded & {"torch", "mlflow", "hydra"}


def test_the_command_line_loads_nothing_heavy() -> None:
    loaded = _loaded_after("import harness.cli, harness.config, harness.experiment.callback")
    assert loaded == {"hydra"}


def test_progress_and_tracking_load_nothing_heavy() -> None:
    loaded = _loaded_after(
        "import harness.progress, harness.tracking.store, harness.tracking.spool"
    )
    assert loaded == set()


def test_global_precision_is_set_in_one_place() -> None:
    switches = re.compile(
        r"\.fp32_precision\s*=[^=]|\.allow_tf32\s*=[^=]|set_float32_matmul_precision\("
        r"|set_default_dtype\("
    )
    for module, path in MODULES.items():
        if module not in SWITCH_SETTERS:
            found = switches.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{module}: {found}"


@pytest.mark.parametrize("module", MODULES)
def test_modules_stay_readable_in_one_sitting(module: str) -> None:
    num_lines = len(MODULES[module].read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES, f"{module} has {num_lines} lines: split it by what it does"


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "policy").glob("*.yaml")), ids=str)
def test_every_policy_says_what_it_is(path: Path) -> None:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert values.get("description", "").strip(), f"{path.name} has no description"
    assert values["name"] == path.stem


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.yaml")), ids=str)
def test_every_sweep_says_which_question_it_answers(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")


def _tree() -> Iterator[Path]:
    for name in ("harness", "conf", "sweeps", "tests", "benchmarks", "notebooks", "docs", ".ci"):
        yield from (p for p in (ROOT / name).rglob("*") if p.is_file())
    yield from (p for p in ROOT.iterdir() if p.suffix in {".md", ".toml", ".yaml"})


def test_nothing_of_one_machine_is_in_the_tree() -> None:
    # Put together here, so that this file passes its own test.
    places = "|".join(f"/{name}/" for name in ("root", "home", "work", "Users", "opt", "mnt"))
    personal = re.compile(rf"(?<![\w.~:$}}\-])(?:{places})\w|\.\./" + "shared")
    for path in _tree():
        if path.suffix in {".png", ".pyc", ".jpg"}:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found = personal.search(line)
            assert found is None, f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_code_is_ascii() -> None:
    for path in [*MODULES.values(), *(ROOT / "conf").rglob("*.yaml")]:
        assert path.read_bytes().isascii(), path


class TestTheChecksThemselves:
    """Each check sees what it is there for."""

    def test_an_import_inside_a_function_counts(self) -> None:
        tree = ast.parse("def f():\n    from torch import nn\n")
        assert {n for node in ast.walk(tree) for n in _named(node)} == {"torch", "torch.nn"}

    def test_a_heavy_import_is_noticed(self) -> None:
        assert "scipy" in _loaded_after("import scipy.stats")

    def test_reachability_follows_imports(self) -> None:
        assert "harness.runs.record" in _reachable("harness.tracking.spool")
        assert "mlflow" in _third_party("harness.tracking.location")
