"""A run asked whether it need go on: when it is asked, what it leaves, what it never changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from tiny_workloads import BF16, FP16, FP32, TinyWorkload, cross_entropy, numbers, settings
from torch import Tensor, nn

from harness.analysis.in_run_gates import InRunGate
from harness.analysis.rule import DecisionRule
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import ENDED_EARLY, RunRecord
from harness.runs.trainer import train
from harness.runs.triage.finished_run import triaged

Series = Mapping[str, Sequence[float]]


def trained(
    policy: PrecisionPolicy,
    ended_by: Callable[[Series], str | None] | None,
    *,
    workload: TinyWorkload | None = None,
    steps: int = 90,
) -> RunRecord:
    record = train(
        workload or TinyWorkload(),
        policy,
        settings(steps),
        run_key="key",
        environment={"device_kind": "cpu"},
        ended_by=ended_by,
    )
    assert record.crash is None, record.crash.traceback
    return record


def test_it_is_asked_after_each_fetch_but_the_last_and_sees_all_series_in_full() -> None:
    seen: list[dict[str, int]] = []

    def look(series: Series) -> None:
        seen.append({name: len(values) for name, values in series.items()})

    record = trained(BF16, look, steps=75)
    assert [set(lengths.values()) for lengths in seen] == [{25}, {50}]
    assert set(seen[0]) == set(record.series)


@pytest.mark.parametrize("policy", [BF16, FP16], ids=lambda p: p.name)
def test_a_gate_that_lets_a_run_go_on_changes_no_number(policy: PrecisionPolicy) -> None:
    gate = InRunGate(policy, trained(FP32, None), DecisionRule())
    assert numbers(trained(policy, gate)) == numbers(trained(policy, None))


def test_an_ended_run_is_the_beginning_of_the_whole_one_and_says_so() -> None:
    whole = trained(BF16, None)
    record = trained(BF16, lambda s: "enough" if len(s["loss"]) >= 50 else None)
    assert record.status == "diverged"
    assert {"step": 50, "kind": ENDED_EARLY, "message": "enough"} in record.events
    assert record.num_steps == 90
    for name in ("loss", "grad_norm", "nonfinite_grad", "learning_rate"):
        assert record.series[name] == whole.series[name][:50], name
    assert record.fingerprints.batches == whole.fingerprints.batches[:50]
    assert record.final["num_parameters"] == whole.final["num_parameters"]
    assert RunRecord.from_json(record.to_json()) == record


def exploding_at(step: int, *, by: float) -> TinyWorkload:
    """Return a workload whose loss is raised from a step on, unless it computes in FP32."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            calls[0] += 1
        low = torch.is_autocast_enabled("cpu")
        value = cross_entropy(model, batch)
        return value + by if low and calls[0] > step else value

    def data(seed: int, steps: int) -> Any:
        calls[0] = 0
        yield from TinyWorkload().data(seed, steps)

    calls = [0]
    return TinyWorkload(loss=loss, data=data, held_out_batches=0)


def test_an_overflow_ends_the_run_at_the_fetch_and_is_still_traced_to_its_step() -> None:
    workload = exploding_at(30, by=float("inf"))
    gate = InRunGate(BF16, None, DecisionRule())
    record = trained(BF16, gate, workload=workload)
    assert len(record.series["loss"]) == 50
    event = next(e for e in record.events if e["kind"] == ENDED_EARLY)
    assert event["message"] == "the loss is not finite at step 30"
    told = triaged(record, workload, BF16, settings(90))
    assert told.probes["triage"]["step"] == 30


def test_a_run_lost_for_good_is_ended_and_the_same_with_a_short_blow_up_is_not() -> None:
    # No held-out set: the tiny one is of other classes, and what was learned is read off it.
    reference = trained(FP32, None, workload=TinyWorkload(held_out_batches=0), steps=120)
    lost = exploding_at(45, by=100.0)
    record = trained(BF16, InRunGate(BF16, reference, DecisionRule()), workload=lost, steps=120)
    assert record.status == "diverged"
    # The first fetch with 30 steps behind the first third of 120 and the blow-up at 45.
    assert len(record.series["loss"]) == 75
    early = exploding_at(95, by=100.0)
    record = trained(BF16, InRunGate(BF16, reference, DecisionRule()), workload=early, steps=120)
    assert (record.status, len(record.series["loss"])) == ("completed", 120)


def test_losses_never_finite_are_told_by_the_gate_and_without_one_by_their_streak() -> None:
    workload = exploding_at(0, by=float("inf"))
    kinds = {}
    for name, gate in (("gate", InRunGate(BF16, None, DecisionRule())), ("none", None)):
        record = trained(BF16, gate, workload=workload)
        assert (record.status, len(record.series["loss"])) == ("diverged", 25)
        kinds[name] = {event["kind"] for event in record.events}
    assert ENDED_EARLY in kinds["gate"]
    assert "stopped" not in kinds["gate"]
    assert "stopped" in kinds["none"]
    assert ENDED_EARLY not in kinds["none"]
