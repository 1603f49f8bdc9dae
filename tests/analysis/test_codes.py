"""Every reason code that the analyzer can emit is explained, and every explanation is used."""

from __future__ import annotations

import re
from pathlib import Path

from harness.analysis import codes

SOURCES = Path(codes.__file__).parent


def emitted_codes() -> set[str]:
    """Return every upper-case string constant of the analyzer's sources that looks like a code."""
    found: set[str] = set()
    for path in SOURCES.glob("*.py"):
        if path.name not in ("codes.py", "findings.py"):
            found |= set(re.findall(r'"([A-Z][A-Z0-9]+(?:_[A-Z0-9]+)*)"', path.read_text()))
    return found


def test_every_emitted_code_is_documented_and_none_is_stale() -> None:
    assert emitted_codes() == set(codes.CODES)


def test_explanations_say_something() -> None:
    for code, text in codes.CODES.items():
        assert len(text) > 60, code
        assert text.endswith("."), code
