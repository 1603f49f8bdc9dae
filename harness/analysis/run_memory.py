"""Answers about run records, remembered for as long as the record lives.

A grid asks the same of one run many times: FP32's tail once per candidate, everything again at each
look of a sequential plan, and in a study of the rule's error rates once per draw of seeds.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from harness.runs.record import RunRecord

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Identity of a record -> its weak reference (whose callback clears the entry) and the answers. A
# record has no hash, as its series lie in dictionaries, so a `WeakKeyDictionary` cannot hold it.
_ANSWERS: dict[int, tuple[weakref.ref[RunRecord], dict[Any, tuple[Any, Any]]]] = {}


def once_per_run(
    function: Callable[Concatenate[RunRecord, _P], _T],
) -> Callable[Concatenate[RunRecord, _P], _T]:
    """Let a pure function of a record, and of other values, compute each answer once.

    Arguments are told apart by identity and must not change afterwards, as frozen values do not;
    they are kept alive until the record itself goes. An equal but distinct argument costs a second
    computation, never a wrong answer.
    """

    @functools.wraps(function)
    def remembered(record: RunRecord, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        answers = _answers_of(record)
        key = (function, *map(id, args), *((name, id(kwargs[name])) for name in sorted(kwargs)))
        found = answers.get(key)
        if found is None:
            # What is kept must not hold the record itself, or it would never go.
            kept = [x for x in (*args, *kwargs.values()) if x is not record]
            found = answers[key] = (function(record, *args, **kwargs), kept)
        answer: _T = found[0]
        return answer

    return remembered


def num_remembered() -> int:
    """Return how many records have answers: none but those that are alive."""
    return len(_ANSWERS)


def _answers_of(record: RunRecord) -> dict[Any, tuple[Any, Any]]:
    identity = id(record)
    found = _ANSWERS.get(identity)
    if found is None or found[0]() is not record:
        reference = weakref.ref(record, functools.partial(_forget, _ANSWERS, identity))
        found = _ANSWERS[identity] = (reference, {})
    return found[1]


def _forget(
    answers: dict[int, tuple[weakref.ref[RunRecord], dict[Any, tuple[Any, Any]]]],
    identity: int,
    reference: weakref.ref[RunRecord],
) -> None:
    # `answers` is handed in: at the exit of Python the module's own name may be gone already.
    found = answers.get(identity)
    # Another record may have taken the identity before this callback ran.
    if found is not None and found[0] is reference:
        del answers[identity]
