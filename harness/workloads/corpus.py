"""The text of the character model: where it comes from, its alphabet, and its held-out part."""

from __future__ import annotations

import hashlib
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HELD_OUT_SHARE = 0.1
# A character this rare teaches a 300-step model nothing; it shares one symbol with its like.
MIN_OCCURRENCES = 10
# Written at installation time from the machine's own paths, so no two machines share them.
_MACHINE_SPECIFIC = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text as symbol numbers.

    Attributes:
        train: int64, one-dimensional: all but the last tenth of the text.
        held_out: int64, one-dimensional: the last tenth.
        alphabet: The characters of symbols 0, 1, ...; if any character was too rare, one more
            symbol stands for all of those.
        num_symbols: How many symbols there are.
        sha256: Hash of the text (UTF-8), before rare characters were merged.
        source: Where the text comes from, for the report.
    """

    train: Tensor
    held_out: Tensor
    alphabet: str
    num_symbols: int
    sha256: str
    source: str


def read_corpus(text: str | None, *, num_characters: int | None) -> Corpus:
    """Read a text file, or the standard library's sources if `text` is None.

    Bytes that are not UTF-8 become U+FFFD.

    Raises:
        ValueError: The file is missing, unreadable or empty, or this Python has no sources.
    """
    if text is None:
        content, source = _standard_library(num_characters), "Python's standard library"
    else:
        content, source = _read_file(Path(text)), Path(text).name
    content = content[:num_characters]
    if not content:
        raise ValueError(f"workload.text={text} is empty")
    symbols, alphabet, num_symbols = _encode(content)
    split = len(content) - max(1, int(HELD_OUT_SHARE * len(content)))
    return Corpus(
        train=symbols[:split],
        held_out=symbols[split:],
        alphabet=alphabet,
        num_symbols=num_symbols,
        sha256=hashlib.sha256(content.encode("utf-8")).hexdigest(),
        source=source,
    )


def _read_file(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"workload.text={path} cannot be read: {error.strerror}") from None


def _standard_library(num_characters: int | None) -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: list[str] = []
    length = 0
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        if path.name.startswith(_MACHINE_SPECIFIC):
            continue
        if num_characters is not None and length >= num_characters:
            break
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        length += len(parts[-1])
    if not parts:
        raise ValueError(
            f"this Python has no standard library sources in {folder}; "
            "give a text of your own with workload.text=PATH"
        )
    return "".join(parts)


def _encode(content: str) -> tuple[Tensor, str, int]:
    counts = Counter(content)
    alphabet = "".join(sorted(c for c, n in counts.items() if n >= MIN_OCCURRENCES))
    # One lookup over code points: a Python loop over two million characters takes half a second.
    table = np.full(max(map(ord, counts)) + 1, len(alphabet), dtype=np.int64)
    table[[ord(c) for c in alphabet]] = np.arange(len(alphabet))
    points = np.frombuffer(content.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    num_symbols = len(alphabet) + int(len(alphabet) < len(counts))
    return torch.from_numpy(table[points]), alphabet, num_symbols
