"""The Jinja environments: everything escaped, undefined names an error."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

_MINUS = "\N{MINUS SIGN}"
_TIMES = "\N{MULTIPLICATION SIGN}"


def html_environment() -> jinja2.Environment:
    """Return the environment of the HTML templates, with autoescape."""
    environment = _environment(autoescape=True)
    environment.filters["number"] = typeset
    environment.filters["ticked"] = ticked
    return environment


def markdown_environment() -> jinja2.Environment:
    """Return the environment of the Markdown template; its `cell` filter escapes."""
    environment = _environment(autoescape=False)
    environment.filters["cell"] = markdown_cell
    environment.filters["prose"] = markdown_prose
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


def ticked(text: str) -> Markup:
    """Return a sentence as HTML, escaped, with names between backticks set as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def markdown_cell(text: str) -> str:
    """Return text that is neither HTML nor a table bar nor a line break in Markdown."""
    text = " ".join(str(text).split())
    text = text.replace("&", "&amp;")
    # A bracket before a digit opens and closes no tag, and `<0.01` stays readable as plain text.
    text = re.sub(r"<(?![\d ])", "&lt;", text)
    text = re.sub(r">(?! ?-?\d)", "&gt;", text)
    text = re.sub(r"([\\`*|])", r"\\\1", text)
    # An underscore inside a word and a bracket without a link behind it mean nothing in Markdown;
    # leaving them keeps names and intervals readable as plain text.
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    return text.replace("](", "]\\(").replace("]:", "]\\:")


def markdown_prose(text: str) -> str:
    """Return a sentence as in `markdown_cell`, but with names between backticks as code."""
    parts = re.split(r"`([^`\n]+)`", str(text))
    # Odd parts were between backticks: they mean themselves there, even brackets.
    return "".join(f"`{p}`" if k % 2 else _inner(p) for k, p in enumerate(parts))


def _inner(text: str) -> str:
    """Escape, keeping a blank at either end, which `markdown_cell` would drop."""
    head = " " if text[:1].isspace() else ""
    tail = " " if text[-1:].isspace() and text.strip() else ""
    return f"{head}{markdown_cell(text)}{tail}"


def markdown_code(text: str) -> str:
    """Return text as an indented code block, one that its content cannot end."""
    return "\n".join(f"    {line}" for line in str(text).splitlines())
