"""Planted faults: whatever differs between two runs is found, and the first of it named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from factories import crashed, diverged, make_record

from harness.analysis.pairing import make_pair, pairing_fault
from harness.runs.record import RunRecord

REFERENCE = make_record("fp32", 1)
CANDIDATE = make_record("bf16", 1, offset=0.1)


def with_prints(record: RunRecord, **changes: Any) -> RunRecord:
    return dataclasses.replace(
        record, fingerprints=dataclasses.replace(record.fingerprints, **changes)
    )


def changed(values: tuple[int, ...], at: int) -> tuple[int, ...]:
    return (*values[:at], values[at] + 1, *values[at + 1 :])


def test_equal_fingerprints_are_a_pair_whatever_the_losses() -> None:
    assert make_pair(CANDIDATE, REFERENCE).fault is None


def test_the_first_difference_is_named() -> None:
    prints = CANDIDATE.fingerprints
    weights = with_prints(CANDIDATE, init_sha256="0" * 64)
    batch = with_prints(CANDIDATE, batches=changed(prints.batches, 7))
    mask = with_prints(CANDIDATE, dropout=changed(prints.dropout, 5))
    both = with_prints(batch, dropout=changed(prints.dropout, 5))
    held_out = with_prints(CANDIDATE, held_out_sha256="0" * 64)
    assert pairing_fault(weights, REFERENCE) == "the initial weights differ"
    assert pairing_fault(batch, REFERENCE) == "batch 7 differs"
    assert pairing_fault(mask, REFERENCE) == "the dropout masks of step 5 differ"
    assert pairing_fault(both, REFERENCE) == "the dropout masks of step 5 differ"
    assert pairing_fault(held_out, REFERENCE) == "the held-out sets differ"


def test_swapped_batches_are_found() -> None:
    a, b, *rest = CANDIDATE.fingerprints.batches
    assert pairing_fault(with_prints(CANDIDATE, batches=(b, a, *rest)), REFERENCE) is not None


def test_a_run_that_ended_early_is_compared_over_its_steps() -> None:
    short = diverged(CANDIDATE)
    assert pairing_fault(short, REFERENCE) is None
    prints = short.fingerprints
    last = len(prints.batches) - 1
    assert pairing_fault(with_prints(short, batches=changed(prints.batches, last)), REFERENCE)


def test_the_unfinished_step_of_a_crash_is_not_compared() -> None:
    assert pairing_fault(crashed(CANDIDATE, at_step=3), REFERENCE) is None
    assert pairing_fault(with_prints(crashed(CANDIDATE), init_sha256=""), REFERENCE) is None
    # It may not have got as far as its held-out set.
    assert pairing_fault(with_prints(crashed(CANDIDATE), held_out_sha256=None), REFERENCE) is None


def test_seeds_are_never_crossed() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        make_pair(make_record("bf16", 2), REFERENCE)
