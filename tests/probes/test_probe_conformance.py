"""What every registered step probe must do: change nothing, wait for nothing, declare its metrics.

A new probe is tested here by being registered.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_workloads import (
    BF16,
    BF16_PURE,
    FP16,
    FP32,
    TF32,
    TinyWorkload,
    class_batches,
    numbers,
    run,
    settings,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.probes.step_probes import STEP_PROBES, StepProbes
from harness.runs.loop import TrainingRun
from harness.runs.record import RunRecord
from harness.runs.settings import ProbeSettings

STEPS = 6
ALONE: dict[str, ProbeSettings] = {
    "exponents": dataclasses.replace(
        ProbeSettings.off(), exponents_every=1, weight_gradients_every=1
    ),
    "norms": dataclasses.replace(ProbeSettings.off(), norms_every=1),
    "lost_updates": dataclasses.replace(ProbeSettings.off(), lost_updates_every=1),
    "memory": dataclasses.replace(ProbeSettings.off(), memory=True),
}
# Skips its first steps.
FP16_SKIPPING = dataclasses.replace(
    FP16, loss_scale=LossScaleSettings(kind="dynamic", init_scale=2.0**26)
)


class Attending(nn.Module):
    """Checkpointed attention with dropout, a norm, and a tied sparse-free embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def _mixed(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.drop(self.attention(y, y, y, need_weights=False)[0])

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(checkpoint(self._mixed, self.table(ids), use_reentrant=False))


class Odd(nn.Module):
    """Sparse, complex, empty, scalar, unused, integer: whatever a model may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, sparse=True)
        self.spectrum = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Linear(2, 2)
        self.act = nn.ReLU(inplace=True)
        self.again = nn.Tanh()
        self.head = nn.Linear(6, 11)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        x = self.table(ids) * self.scale
        x = torch.fft.ifft(torch.fft.fft(x) * self.spectrum).real
        return self.head(self.again(self.again(self.act(x + 0.1))))


class Taught(nn.Module):
    """A student beside a frozen teacher in inference mode, which passes by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.teacher = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.student = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        with torch.inference_mode():
            taught = self.teacher(x)
        return self.student(x + taught.float().clone())


def id_batches(seed: int, steps: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(11, (8, 5), generator=generator)
        yield ids, (ids + 1) % 11


def next_token(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


MLP = TinyWorkload()
ATTENDING = TinyWorkload(model=Attending, data=id_batches, loss=next_token)
ODD = TinyWorkload(model=Odd, data=id_batches, loss=next_token, optimizer=sgd)
TAUGHT = TinyWorkload(model=Taught, data=id_batches, loss=next_token)
CLOSURE = TinyWorkload(
    optimizer=lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3), clip=None
)
RUNS: dict[str, tuple[TinyWorkload, PrecisionPolicy]] = {
    "dropout fp32": (MLP, FP32),
    "dropout tf32": (MLP, TF32),
    "dropout fp16 scaled": (MLP, FP16),
    "dropout fp16 skipping": (MLP, FP16_SKIPPING),
    "checkpoint, tied weights fp32": (ATTENDING, FP32),
    "checkpoint, tied weights bf16": (ATTENDING, BF16),
    "checkpoint, tied weights bf16_pure": (ATTENDING, BF16_PURE),
    "checkpoint, tied weights fp16 scaled": (ATTENDING, FP16),
    "sparse, complex, empty, scalar fp32": (ODD, FP32),
    "sparse, complex, empty, scalar bf16": (ODD, BF16),
    "inference mode tf32": (TAUGHT, TF32),
    "inference mode fp16 scaled": (TAUGHT, FP16),
    "closure bf16": (CLOSURE, BF16),
}


@functools.cache
def recorded(case: str, probe: str | None) -> tuple[RunRecord, dict[str, Tensor]]:
    """Train, with one probe at every step or with none; return the record and final weights."""
    workload, policy = RUNS[case]
    kept: list[nn.Module] = []

    def model() -> nn.Module:
        kept.append(workload.model())
        return kept[-1]

    chosen = ProbeSettings.off() if probe is None else ALONE[probe]
    record = run(dataclasses.replace(workload, model=model), policy, steps=STEPS, probes=chosen)
    return record, {k: v.detach().clone() for k, v in kept[0].state_dict().items()}


def test_every_probe_is_tested() -> None:
    assert set(ALONE) == set(STEP_PROBES)
    assert all(set(chosen.chosen(STEPS)) == {name} for name, chosen in ALONE.items())


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("probe", STEP_PROBES)
def test_training_is_bitwise_the_same(probe: str, case: str) -> None:
    """Losses, norms, masks, held-out losses and every weight and buffer."""
    (ours, our_weights), (bare, weights) = recorded(case, probe), recorded(case, None)
    with_it, without = numbers(ours), numbers(bare)
    for measured in (with_it, without):
        measured["sampled"] = measured["histograms"] = None
        measured["final"].pop("zero_grad_share", None)
    assert repr(with_it) == repr(without)  # as text, so that NaN equals NaN
    assert ours.audit == bare.audit
    assert ours.probes.get("audit") == bare.probes.get("audit")
    assert our_weights.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(torch.view_as_real(value) if value.is_complex() else value,
                           torch.view_as_real(our_weights[name]) if value.is_complex()
                           else our_weights[name]), name  # fmt: skip


def test_a_probe_that_changes_something_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = STEP_PROBES["norms"]
    watch = probe.before_update

    def nudge(self: Any, parameters: Any) -> None:
        parameters[0].value.mul_(1.0 + 2.0**-20)
        watch(self, parameters)

    monkeypatch.setattr(probe, "before_update", nudge)
    changed = run(MLP, FP32, steps=STEPS, probes=ALONE["norms"])
    assert changed.series["loss"] != recorded("dropout fp32", None)[0].series["loss"]


STRUCTURE = {"steps", "weight_gradient_steps", "view", "modules", "windows", "not_applicable"}
STRUCTURE |= {"step", "largest"}


def returned_metrics(result: dict[str, Any]) -> set[str]:
    """Return the names of a result's values, its structure and its names of modules left out."""
    names = set(result) - STRUCTURE
    for columns in result.get("modules", {}).values():
        for name, value in columns.items():
            names |= set(value) if isinstance(value, dict) else {name}
    for window in result.get("windows", {}).values():
        names |= set(window)
    return names


@pytest.mark.parametrize("probe", STEP_PROBES)
def test_declared_metrics_are_those_returned(probe: str) -> None:
    found: set[str] = set()
    for case in RUNS:
        result = recorded(case, probe)[0].probes[probe]
        found |= returned_metrics(result)
        json.dumps(result)
    assert found == set(STEP_PROBES[probe].metrics)
    for name, metric in STEP_PROBES[probe].metrics.items():
        assert metric.description.endswith("."), name
        assert metric.unit in {"share", "count", "bytes", "log2", "1"}, name


@pytest.mark.parametrize("probe", STEP_PROBES)
@pytest.mark.parametrize("case", RUNS)
def test_results_survive_the_record(case: str, probe: str) -> None:
    record = recorded(case, probe)[0]
    assert set(record.probes) - {"audit", "triage"} == {probe}
    again = RunRecord.from_json(record.to_json())
    assert repr(again.to_json()) == repr(record.to_json())


@pytest.mark.parametrize("probe", STEP_PROBES)
def test_odd_tensors_are_counted_or_said(probe: str) -> None:
    result = recorded("sparse, complex, empty, scalar fp32", probe)[0].probes[probe]
    assert "input of `table`: int64 values are not floating-point" in result.get(
        "not_applicable", ["input of `table`: int64 values are not floating-point"]
    )
    if probe == "exponents":
        root = result["modules"]["(model)"]["weights"]
        assert root["elements"] == STEPS * (2 * 6 + 1)  # complex pairs, a scalar, an empty one
    if probe == "lost_updates":
        assert result["modules"]["(model)"]["updates"][0] <= 13
        assert result["modules"]["table"]["updates"][0] > 0


def device_reads(policy: PrecisionPolicy, workload: TinyWorkload, probes: StepProbes) -> Counter:
    """Count the reads of ten steps, without what flushes them."""
    asked = settings(10, probes=ProbeSettings.off())
    training = TrainingRun(dataclasses.replace(workload, held_out_batches=0), policy, asked, None)
    training.probes = probes
    probes.flush = lambda: None  # type: ignore[method-assign]
    with torch.autograd.profiler.profile() as profile:
        training.train(torch.device("cpu"))
    # A dispatch mode (an audit, a probe of attention) passes an op on: one read, recorded twice.
    return Counter(
        event.name
        for event in profile.function_events
        if event.name in ("aten::_local_scalar_dense", "aten::item")
        and (event.cpu_parent is None or event.cpu_parent.name != "PythonDispatchMode")
    )


@pytest.mark.parametrize("policy", [FP32, FP16, BF16_PURE], ids=lambda p: p.name)
@pytest.mark.parametrize("probe", STEP_PROBES)
def test_ten_steps_read_no_more_than_the_bare_loop(probe: str, policy: PrecisionPolicy) -> None:
    """On a CPU; that nothing is copied to the host either: `test_device_waits`, on no device."""
    bare = device_reads(policy, MLP, StepProbes({}, num_steps=10))
    with_it = device_reads(policy, MLP, StepProbes(ALONE[probe].chosen(10), num_steps=10))
    assert with_it == bare
    assert bare["aten::item"] >= 10  # AdamW itself


def test_a_read_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        STEP_PROBES["norms"], "gradients", lambda self, gradients: gradients[0].value.sum().item()
    )
    monkeypatch.setattr(STEP_PROBES["norms"], "before_update", lambda self, parameters: None)
    monkeypatch.setattr(
        STEP_PROBES["norms"], "after_update", lambda self, parameters, skipped: None
    )
    bare = device_reads(FP32, MLP, StepProbes({}, num_steps=10))
    reading = device_reads(FP32, MLP, StepProbes(ALONE["norms"].chosen(10), num_steps=10))
    assert (reading - bare)["aten::item"] == 10


def test_batches_of_the_tiny_workload_are_the_same_each_time() -> None:
    """What the comparisons above rest on."""
    one, two = (list(class_batches(3, 2)) for _ in range(2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, two, strict=True))
