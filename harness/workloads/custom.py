"""The user's own model: loaded from a file or module, checked for what is missing, not changed."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from harness.workloads import custom_file
from harness.workloads.batches import leading_size
from harness.workloads.isolation import global_state_kept, seed_everything
from harness.workloads.settings import CustomSettings, closest

DEFAULT_STEPS = 300
# Name -> the arguments it is called with.
REQUIRED = {
    "build_model": ("seed",),
    "batches": ("seed", "steps"),
    "loss_fn": ("model", "batch"),
    "make_optimizer": ("model",),
}
OPTIONAL = {
    "make_scheduler": ("optimizer", "steps"),
    "held_out": ("seed",),
    "eval_fn": ("model",),
}
CONSTANTS = ("CLIP", "STEPS", "SEEDS")
# Shorter or longer words for the same thing, which a comparison of spellings would miss.
_OTHER_WORDS = {
    "model": "build_model",
    "get_model": "build_model",
    "loss": "loss_fn",
    "optimizer": "make_optimizer",
    "make_optim": "make_optimizer",
    "scheduler": "make_scheduler",
    "schedule": "make_scheduler",
    "heldout": "held_out",
    "validation": "held_out",
    "evaluate": "eval_fn",
    "clip_grad": "CLIP",
    "num_steps": "STEPS",
}


class CustomWorkload:
    """A user's file or module as a `Workload`.

    Attributes:
        source: The file; errors raised in it are reported with its lines.
        module_name: Its name in `sys.modules`.
        hints: Sentences on names in the file that look like optional ones misspelt.
    """

    # What the user's loss is measured in, only the user knows.
    loss_unit = "loss units"

    def __init__(self, settings: CustomSettings) -> None:
        self.source = custom_file.find_source(settings.file, settings.module)
        self.data_sha256 = custom_file.source_sha256(self.source)
        self._module = _load(self.source, settings.module, self.data_sha256)
        self.module_name = self._module.__name__
        self.hints = _check_names(self._module, self.source)
        self._functions = {
            name: _function(self._module, name, arguments, self.source)
            for name, arguments in (REQUIRED | OPTIONAL).items()
            if hasattr(self._module, name)
        }
        self.name = settings.name or self.source.stem
        self.clip = _clip(self._module, settings, self.source)
        self.default_steps = settings.steps or _steps(self._module, self.source)
        first_line = (self._module.__doc__ or "").strip().partition("\n")[0]
        self.description = settings.description or first_line or f"The model in {self.source.name}"
        self.settings: dict[str, Any] = {
            **settings.recorded(),
            "name": self.name,
            "loss_unit": self.loss_unit,
            "steps": self.default_steps,
            "clip": self.clip,
        }

    def build_model(self, seed: int) -> nn.Module:
        """Return what the user's `build_model` returns."""
        return self._functions["build_model"](seed)  # type: ignore[no-any-return]

    def batches(self, seed: int, steps: int) -> Iterator[Any]:
        """Return an iterator over what the user's `batches` returns (a list or a loader too)."""
        return iter(self._functions["batches"](seed, steps))

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the user's loss."""
        return self._functions["loss_fn"](model, batch)  # type: ignore[no-any-return]

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the user's optimizer."""
        return self._functions["make_optimizer"](model)  # type: ignore[no-any-return]

    def make_scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """Return the user's schedule, or None if the file defines none."""
        make = self._functions.get("make_scheduler")
        return None if make is None else make(optimizer, steps)

    def held_out(self, seed: int) -> list[Any] | None:
        """Return the user's held-out batches, or None if the file defines none."""
        get = self._functions.get("held_out")
        found = None if get is None else get(seed)
        return None if found is None else list(found)

    def eval_fn(self, model: nn.Module) -> float | None:
        """Return the user's figure as a float, or None if the file defines none."""
        evaluate = self._functions.get("eval_fn")
        return None if evaluate is None else float(evaluate(model))

    def num_items(self, batch: Any) -> int | None:
        """Return the leading dimension of the batch's first tensor; None if it has no tensor."""
        return leading_size(batch)

    def num_tokens(self, batch: Any) -> None:
        """Return None: which dimension counts tokens, only the user knows."""


def located(error: BaseException, source: Path | None) -> str:
    """Return `FILE line N: Type: message` for an exception that passed through `source`.

    The line is the innermost one of that file; without any, only type and message (its first
    line) are given.
    """
    lines = str(error).strip().splitlines() or ["(no message)"]
    text = f"{type(error).__name__}: {lines[0]}"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name} line {error.lineno}: SyntaxError: {error.msg}"
    if source is None:
        return text
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename) == source]
    return f"{source.name} line {inside[-1].lineno}: {text}" if inside else text


def _load(source: Path, module: str | None, sha256: str) -> ModuleType:
    """Import the source once per process and content, with its folder importable.

    Raises:
        ValueError: Importing it raised; the message names line and exception.
    """
    folder = str(Path.cwd() if module is not None else source.parent)
    with _importable(folder), global_state_kept():
        # Data that a file draws at import must be the same in every process of a sweep.
        seed_everything(0)
        try:
            if module is not None:
                return importlib.import_module(module)
            return _load_file(source, sha256)
        except (Exception, SystemExit) as error:
            raise ValueError(f"cannot import {located(error, source)}") from error


def _load_file(source: Path, sha256: str) -> ModuleType:
    place = hashlib.sha256(str(source).encode()).hexdigest()[:8]
    stem = re.sub(r"\W", "_", source.stem)
    name = f"harness_workload_{stem}_{place}_{sha256[:8]}"
    if name in sys.modules:  # as any import; registering a custom op twice would fail
        return sys.modules[name]
    _forget_namesakes(source)
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _forget_namesakes(source: Path) -> None:
    """Drop modules of another workload's folder that this one's imports would be mistaken for."""
    for path in custom_file.local_sources(source):
        relative = path.relative_to(source.parent) if path.is_relative_to(source.parent) else path
        name = relative.parts[0].removesuffix(".py")
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded is not None and not Path(loaded).is_relative_to(source.parent):
            for key in [key for key in sys.modules if key.partition(".")[0] == name]:
                del sys.modules[key]


@contextlib.contextmanager
def _importable(folder: str) -> Iterator[None]:
    """Put a folder first on `sys.path`; afterwards it stays last, for imports inside functions."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def _check_names(module: ModuleType, source: Path) -> tuple[str, ...]:
    known = [*REQUIRED, *OPTIONAL, *CONSTANTS]
    own = [name for name in vars(module) if not name.startswith("_") and name not in known]
    lookalikes = {
        name: meant
        for name in own
        if (meant := _meant_by(name, known)) and not hasattr(module, meant)
    }
    missing = [name for name in REQUIRED if not hasattr(module, name)]
    if missing:
        wanted = ", ".join(f"{name}({', '.join(REQUIRED[name])})" for name in missing)
        found = [f"{name} (is it {meant}?)" for name, meant in lookalikes.items()]
        hint = f"; it has {', '.join(found)}" if found else ""
        raise ValueError(f"{source.name} does not define {wanted}{hint}")
    return tuple(
        f"{source.name} defines {name}, which the harness does not use; is it {meant}?"
        for name, meant in lookalikes.items()
        if _could_be(getattr(module, name), meant)
    )


def _meant_by(name: str, known: list[str]) -> str | None:
    if name.lower() in _OTHER_WORDS:
        return _OTHER_WORDS[name.lower()]
    spelled = {candidate.lower(): candidate for candidate in known}
    guess = closest(name.lower(), spelled)
    return spelled[guess.removeprefix("; did you mean ").removesuffix("?")] if guess else None


def _could_be(value: object, meant: str) -> bool:
    if meant in CONSTANTS:
        return isinstance(value, (int, float, tuple, list))
    return inspect.isfunction(value)


def _function(
    module: ModuleType, name: str, arguments: tuple[str, ...], source: Path
) -> Callable[..., Any]:
    function = getattr(module, name)
    call = f"{name}({', '.join(arguments)})"
    if not callable(function):
        raise ValueError(f"{source.name}: {name} is not a function; define {call}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        shown = f"{name}{inspect.signature(function)}"
        raise ValueError(f"{source.name}: {shown} cannot be called as {call}") from None
    except ValueError:
        pass  # a callable without a signature (written in C): calling it will tell
    return function  # type: ignore[no-any-return]


def _clip(module: ModuleType, settings: CustomSettings, source: Path) -> float | None:
    if settings.clip is not None:
        return settings.clip or None
    clip = getattr(module, "CLIP", None)
    if clip is None:
        return None
    if type(clip) not in (int, float) or not clip > 0:
        raise ValueError(f"{source.name}: CLIP={clip!r} is not allowed; allowed: a number above 0")
    return float(clip)


def _steps(module: ModuleType, source: Path) -> int:
    steps = getattr(module, "STEPS", DEFAULT_STEPS)
    if type(steps) is not int or steps < 1:
        raise ValueError(f"{source.name}: STEPS={steps!r} is not allowed; allowed: 1 or more")
    return steps
