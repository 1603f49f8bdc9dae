"""What all kinds of records share on disk: strict JSON of one version, never half written."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

Record = TypeVar("Record")

# JSON has no such numbers.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def strict_json(fields: dict[str, Any], *, indent: int | None = None) -> str:
    """Return strict JSON; NaN and infinities become the strings `NaN`, `Infinity`, `-Infinity`.

    Args:
        fields: Plain values; tuples become lists, keys strings.
        indent: Spaces per level; None for one line without spaces.
    """
    separators = (",", ":") if indent is None else None
    return json.dumps(_encoded(fields), allow_nan=False, indent=indent, separators=separators)


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {str(k): _encoded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(v) for v in value]
    return value


def stored_number(value: Any) -> float | None:
    """Return a stored number, `NaN` and `Infinity` among them; None for null and anything else."""
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def with_numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of which no text is `NaN` or `Infinity`, with those strings as numbers."""
    return {
        key: _NON_FINITE.get(value, value) if isinstance(value, str) else value
        for key, value in fields.items()
    }


def versioned_fields(text: str, *, kind: str, readable: Collection[int]) -> dict[str, Any]:
    """Return the fields of a stored record, `schema_version` among them.

    Args:
        text: What `strict_json` returned.
        kind: What it should be, for the message: `run record`.
        readable: Schema versions that this release knows.

    Raises:
        ValueError: Not JSON, not a record, or of another version.
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a {kind}: {error}") from None
    if not isinstance(fields, dict) or "schema_version" not in fields:
        raise ValueError(f"not a {kind}: no schema_version")
    if fields["schema_version"] not in readable:
        known = " and ".join(map(str, readable))
        plural = "s" if len(readable) > 1 else ""
        raise ValueError(
            f"{kind} has schema version {fields['schema_version']}; this release reads "
            f"version{plural} {known}"
        )
    return fields


def read_if_there(path: Path, parse: Callable[[str], Record]) -> Record | None:
    """Return what a file holds; None when there is no such file.

    Raises:
        ValueError: As `parse`, with the file's path before the message.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_atomically(path: Path, text: str, *, synced: bool = True) -> None:
    """Write `text` so that a reader sees the old file or the new one, never a part of it.

    Args:
        path: Where.
        text: What.
        synced: Whether to wait for the disk, so that this holds over a power failure too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    # Not mkstemp: its files are readable by their owner alone, and reports are to be shared.
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
