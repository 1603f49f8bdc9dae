"""The user's workload file as text: where it is, its hash, its constants; it is never imported."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path


def find_source(file: str | None, module: str | None) -> Path:
    """Return the absolute path of the workload's source, given as a path or a module name.

    A module is looked for in the current folder, then on `sys.path`; no package is imported.

    Raises:
        ValueError: There is no such file or module.
    """
    if file is not None:
        path = Path(file).expanduser().absolute()
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise ValueError(f"workload.file={file} {what}")
        return path
    assert module is not None
    search: list[str] | None = [str(Path.cwd()), *sys.path]
    origin: str | None = None
    parent = ""
    for part in module.split("."):
        parent = f"{parent}.{part}" if parent else part
        spec = PathFinder.find_spec(parent, search) if part and search is not None else None
        if spec is None:
            raise ValueError(f"workload.module={module}: there is no module {parent!r}")
        origin, locations = spec.origin, spec.submodule_search_locations
        search = None if locations is None else list(locations)
    if origin is None or not origin.endswith(".py"):
        raise ValueError(f"workload.module={module} is not a Python source file")
    return Path(origin)


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a workload file.

    Raises:
        ValueError: The file cannot be read or is not Python; the message names file and line.
    """
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from None
    except SyntaxError as error:
        raise ValueError(f"{path.name} line {error.lineno}: SyntaxError: {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"{path.name} is not Python source: {error}") from None


def read_seeds(path: Path) -> tuple[int, ...] | None:
    """Return the file's `SEEDS`, or None if it has none; the file is parsed, not run.

    Accepts a literal tuple or list, and `range(...)` of literals.

    Raises:
        ValueError: The file is not Python, or `SEEDS` is anything else.
    """
    found: tuple[int, ...] | None = None
    for name, value in _assignments(parse(path)):
        if name == "SEEDS":
            found = _whole_numbers(value, path)
    return found


def local_sources(path: Path) -> list[Path]:
    """Return the source files that the workload imports from its own folder or package.

    Directly or through one another; found in the import statements, so imports by computed
    names are missed. Sorted; `path` itself is not among them.

    Raises:
        ValueError: One of the files is not Python.
    """
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        for imported in _imported_files(current, import_folders(path)):
            if imported not in found and imported != path:
                found.add(imported)
                waiting.append(imported)
    return sorted(found)


def import_folders(path: Path) -> tuple[Path, ...]:
    """Return the folders that the file's own imports start from: its own, and its package's."""
    top = path.parent
    while (top / "__init__.py").is_file() and top.parent != top:
        top = top.parent
    # Installed packages are told apart by their versions, and their sources are many.
    folders = dict.fromkeys((path.parent, top))
    return tuple(f for f in folders if f.name not in ("site-packages", "dist-packages"))


def source_sha256(path: Path) -> str:
    """Return the SHA-256 of the file; where it imports files of its own, over all of them.

    Raises:
        ValueError: The file is not Python.
    """
    digest = hashlib.sha256(path.read_bytes())
    for other in local_sources(path):
        digest.update(other.name.encode())
        digest.update(hashlib.sha256(other.read_bytes()).digest())
    return digest.hexdigest()


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that the module's top level assigns, `A, B = 1, 2` taken apart."""
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            yield from _taken_apart(statement.target, statement.value)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                yield from _taken_apart(target, statement.value)


def _taken_apart(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
        for one_target, one_value in zip(target.elts, value.elts, strict=False):
            yield from _taken_apart(one_target, one_value)


def _whole_numbers(value: ast.expr, path: Path) -> tuple[int, ...]:
    try:
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "range":
            numbers = tuple(range(*(ast.literal_eval(argument) for argument in value.args)))
        else:
            numbers = tuple(ast.literal_eval(value))
    except (ValueError, TypeError):
        numbers = ()
    if not numbers or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(
            f"{path.name} line {value.lineno}: SEEDS must be written out, as in SEEDS = (0, 1, 2)"
        )
    return numbers


def _imported_files(path: Path, folders: tuple[Path, ...]) -> Iterator[Path]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _first_found(folders, alias.name)
        elif isinstance(node, ast.ImportFrom):
            bases = folders if node.level == 0 else path.parents[node.level - 1 : node.level]
            module = node.module or ""
            yield from _first_found(bases, module)
            for alias in node.names:
                yield from _first_found(bases, f"{module}.{alias.name}".lstrip("."))


def _first_found(bases: Sequence[Path], module: str) -> list[Path]:
    """Return the files that importing dotted `module` from one of the folders runs."""
    for base in bases:
        files = []
        where = base
        for part in filter(None, module.split(".")):
            where = where / part
            candidates = (where / "__init__.py", where.with_name(f"{part}.py"))
            files += [candidate for candidate in candidates if candidate.is_file()][:1]
        if files:
            return files
    return []
