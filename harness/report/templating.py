"""The Jinja environments: everything escaped, undefined names an error."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2

_MINUS = "\N{MINUS SIGN}"
_TIMES = "\N{MULTIPLICATION SIGN}"


def html_environment() -> jinja2.Environment:
    """Return the environment of the HTML templates, with autoescape."""
    environment = _environment(autoescape=True)
    environment.filters["number"] = typeset
    return environment


def markdown_environment() -> jinja2.Environment:
    """Return the environment of the Markdown template; its `cell` filter escapes."""
    environment = _environment(autoescape=False)
    environment.filters["cell"] = markdown_cell
    environment.filters["code"] = markdown_code
    return environment


def _environment(*, autoescape: bool) -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("harness.report"),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def typeset(text: str) -> str:
    """Return a formatted number with a true minus and multiplication sign."""
    text = re.sub(r"(?<![\w.])-(?=\d)", _MINUS, text)
    return re.sub(r"(?<=\d)x\b", _TIMES, text)


def markdown_cell(text: str) -> str:
    """Return text that is neither HTML nor a table bar nor a line break in Markdown."""
    text = " ".join(str(text).split())
    text = text.replace("&", "&amp;")
    # A bracket before a digit opens and closes no tag, and `<0.01` stays readable as plain text.
    text = re.sub(r"<(?!\d)", "&lt;", text)
    text = re.sub(r">(?!-?\d)", "&gt;", text)
    text = re.sub(r"([\\`*|])", r"\\\1", text)
    # An underscore inside a word and a bracket without a link behind it mean nothing in Markdown;
    # leaving them keeps names and intervals readable as plain text.
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    return text.replace("](", "]\\(").replace("]:", "]\\:")


def markdown_code(text: str) -> str:
    """Return text as an indented code block, one that its content cannot end."""
    return "\n".join(f"    {line}" for line in str(text).splitlines())
