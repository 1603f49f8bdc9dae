"""Content hashes: the same for the same computation, another for another one."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from harness.calibration.content import content_hash

PLAIN = """
def halve(x):
    return helper(x) / 2.0

def helper(x):
    return x + 1
"""


def namespace(source: str) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "mine"}
    exec(source, found)
    return found


def hash_of(source: str, name: str = "halve") -> str:
    return content_hash(namespace(source)[name])


@pytest.mark.parametrize(
    "source",
    [
        "# a comment, and other line numbers\n\n" + PLAIN,
        PLAIN.replace("def halve(x):", 'def halve(x):\n    """Halve it."""'),
        PLAIN + "\ndef unrelated(x):\n    return x\n",
    ],
)
def test_what_computes_nothing_changes_nothing(source: str) -> None:
    assert hash_of(source) == hash_of(PLAIN)


@pytest.mark.parametrize(
    "source",
    [
        PLAIN.replace("2.0", "4.0"),
        PLAIN.replace("/ 2.0", "* 2.0"),
        PLAIN.replace("def halve(x)", "def halve(x, y=1)"),
        PLAIN.replace("x + 1", "x + 2"),  # in what it calls
        PLAIN.replace("helper(x) /", "other(x) /").replace("def helper", "def other"),
    ],
)
def test_what_computes_something_else_changes_it(source: str) -> None:
    assert hash_of(source) != hash_of(PLAIN)


def test_docstrings_do_not_hide_constants() -> None:
    first = 'def f():\n    "a"\n    return "b"\n'
    assert hash_of(first, "f") == hash_of(first.replace('"a"', '"c"'), "f")
    assert hash_of(first, "f") != hash_of(first.replace('"b"', '"c"'), "f")
    bare = "def f():\n    return 1.0\n"
    assert hash_of(bare, "f") != hash_of(bare.replace("1.0", "2.0"), "f")


def closed_over(bits: int):
    return lambda x: x * bits


def ranges(x):
    return [(lambda y: y + 1.0)(x), {1: x}, x in {"a", "b"}]


class Rounder:
    places = 3

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def rounded(self, x):
        return round(x, self.bits + self.places)


@dataclass(frozen=True)
class Rule:
    shards: int
    send: Any


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (closed_over, 7, 8),
        (lambda bits: functools.partial(round, ndigits=bits), 7, 8),
        (lambda bits: Rounder(bits).rounded, 7, 8),
        (lambda bits: Rule(shards=2, send=closed_over(bits)), 7, 8),
        (lambda shards: Rule(shards=shards, send=round), 2, 4),
        (lambda dtype: lambda x: x.to(dtype), torch.bfloat16, torch.float16),
        (torch.tensor, [1.0, 2.0], [1.0, 3.0]),
        (torch.tensor, 1.0, 1),
        (np.asarray, [1.0, 2.0], [[1.0, 2.0]]),
        (np.float32, 1.0, 2.0),
        (lambda key: {"a": 1, key: 2}, "b", "c"),
        (lambda value: value, 1, 1.0),
        (lambda value: value, "1", 1),
        (lambda value: value, torch.exp, torch.log),
        (lambda value: value, [[1], 2], [1, [2]]),
    ],
)
def test_values_within_count(make, one, other) -> None:
    assert content_hash(make(one)) == content_hash(make(one))
    assert content_hash(make(one)) != content_hash(make(other))


def test_a_class_and_what_it_inherits_count() -> None:
    class Finer(Rounder):
        pass

    class Coarser(Rounder):
        places = 2

    hashes = {content_hash(kind(7).rounded) for kind in (Rounder, Finer, Coarser)}
    assert len(hashes) == 3


def test_what_is_read_off_a_module_counts() -> None:
    def reader(value: float):
        module = types.ModuleType("mine.formats")
        module.spacing, module.unread = value, value
        found = namespace("def f(x):\n    return x * formats.spacing\n")
        found["formats"] = module
        return found["f"]

    assert content_hash(reader(0.5)) == content_hash(reader(0.5))
    assert content_hash(reader(0.5)) != content_hash(reader(0.25))


def test_order_of_keys_does_not_count_and_order_of_items_does() -> None:
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    assert content_hash([1, 2]) != content_hash([2, 1])


def test_functions_that_call_each_other() -> None:
    source = "def f(x):\n    return g(x)\n\ndef g(x):\n    return f(x) if x else 0\n"
    assert hash_of(source, "f") != hash_of(source.replace("else 0", "else 1"), "f")
    assert hash_of(source, "f") != hash_of(source, "g")


def test_nested_code_counts() -> None:
    assert content_hash(ranges) == content_hash(ranges)
    source = "def f(x):\n    return [(lambda y: y + 1.0)(i) for i in x]\n"
    assert hash_of(source, "f") != hash_of(source.replace("1.0", "2.0"), "f")
