"""How an error of Hydra or OmegaConf is told to a user: one line, in the user's own terms."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from harness import config_schema
from harness.config import CONF, SWEEPS, UnknownSettingError, load_choice
from harness.config_schema import HarnessConf

# Where Hydra and OmegaConf go on about themselves.
_NOT_FOR_USERS = ("Config search path", "full_key:", "reference_type=", "object_type=", "See http")
_UNKNOWN_SETTING = re.compile(r"Could not override '([^']+)'")
_WITHOUT_PLUS = re.compile(r"To append to your default list use (\+sweep=\S+)")
_UNKNOWN_FIELD = re.compile(r"Key '([^']+)' not in '(\w+Conf)'")
_NOT_AN_OVERRIDE = re.compile(r"Error parsing override '([^']*)'")


def one_line(error: BaseException) -> str:
    """Return the message of an error as one line that says what to do."""
    if isinstance(error, UnknownSettingError):
        return unknown_setting(error.name)
    text = _joined(error)
    if found := _WITHOUT_PLUS.search(text):
        return f"write {found.group(1)}, with the plus sign"
    if found := _UNKNOWN_SETTING.search(text):
        return unknown_setting(found.group(1))
    if found := _UNKNOWN_FIELD.search(text):
        where = text.split(":")[0] if text.startswith("In ") else "configuration"
        return f"{where}: {_unknown_field(*found.groups())}"
    if found := _NOT_AN_OVERRIDE.match(text):
        return _not_an_override(found.group(1), text)
    return text


def unknown_setting(name: str) -> str:
    """Return the line for a setting that does not exist, with the closest that does."""
    if name in ("workload.file", "workload.module"):
        return f"{name} needs workload=custom"
    return f"unknown setting {name!r}{did_you_mean(name, known_settings())}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" or, where nothing is close, where to look."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=2, cutoff=0.6)
    if not close:
        return "; --help lists the settings"
    return f"; did you mean {' or '.join(close)}?"


def known_settings() -> set[str]:
    """Return every setting that a command line can name."""
    names = set(_fields(HarnessConf, ""))
    for group in ("workload", "decision"):
        for path in (CONF / group).glob("*.yaml"):
            names |= {f"{group}.{key}" for key in load_choice(group, path.stem)}
    return names


def _fields(schema: Any, prefix: str) -> Iterator[str]:
    for name, kind in typing.get_type_hints(schema).items():
        yield prefix + name
        if dataclasses.is_dataclass(kind):
            yield from _fields(kind, f"{prefix}{name}.")


def _unknown_field(name: str, schema: str) -> str:
    known = [f.name for f in dataclasses.fields(getattr(config_schema, schema))]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
    return f"unknown field {name!r}{hint}"


def _not_an_override(given: str, text: str) -> str:
    if "=" in given:
        return text
    sweeps = {path.stem for path in SWEEPS.glob("*.yaml")}
    hint = f"did you mean +sweep={given}?" if given in sweeps else "lists are a,b without spaces"
    return f"{given!r} is not of the form key=value; {hint}"


def _joined(error: BaseException) -> str:
    text = ""
    for line in filter(None, (line.strip() for line in str(error).splitlines())):
        if line.startswith(_NOT_FOR_USERS):
            break
        separator = "" if not text else " " if text.endswith((".", ":", ",")) else ", "
        text += separator + line
    text = text.replace("', Available options in", "'. Available options in")
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and str(cause) not in text:
        text = f"{text}: {_joined(cause)}"
    return text
