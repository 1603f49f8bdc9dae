"""What a due step shows its probes, by which names, and that hooks go away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_workloads import FP32, TinyWorkload, class_batches, dropout_mlp, run, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.probes import step_probes
from harness.probes.base import NamedTensor, StepProbe
from harness.probes.step_probes import StepProbes
from harness.runs.loop import TrainingRun
from harness.runs.settings import ProbeSettings


class Witness(StepProbe):
    """Writes down everything it is shown."""

    name = "witness"
    metrics = {}  # noqa: RUF012
    wants_activations = True

    def __init__(self, *, every: int, num_steps: int) -> None:
        super().__init__(every=every, num_steps=num_steps)
        self.calls: list[tuple[str, list[tuple[int, ...]], list[tuple[int, ...]]]] = []
        self.output_gradients: list[tuple[str, tuple[int, ...]]] = []
        self.weight_gradients: list[tuple[str, str]] = []
        self.weights: list[tuple[str, str]] = []
        self.events: list[str] = []

    def start(self, step: int, *, loss_scale: float) -> None:
        self.events.append(f"start {step} {loss_scale}")

    def forward(self, module: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        shapes = [tuple(t.shape) for t in inputs], [tuple(t.shape) for t in outputs]
        self.calls.append((module, *shapes))

    def output_gradient(self, module: str, gradient: Tensor) -> None:
        self.output_gradients.append((module, tuple(gradient.shape)))

    def gradients(self, gradients: Sequence[NamedTensor]) -> None:
        self.events.append("gradients")
        self.weight_gradients = [(g.module, g.name) for g in gradients]

    def before_update(self, parameters: Sequence[NamedTensor]) -> None:
        self.events.append("before")
        self.weights = [(p.module, p.name) for p in parameters]
        assert len(parameters) == len(self.weights)
        assert all(p.source is not None for p in parameters)

    def after_update(self, parameters: Sequence[NamedTensor], *, skipped: bool) -> None:
        self.events.append(f"after skipped={skipped}")

    def flush(self) -> None:
        self.events.append("flush")


def witnessed(
    model: nn.Module,
    *,
    loss: Any = None,
    batches: Any = class_batches,
    optimizer: Any = None,
    **values: Any,
) -> Witness:
    """Train one step with a witness; return it."""
    workload = TinyWorkload(
        model=lambda: model,
        data=batches,
        held_out_batches=0,
        **({} if loss is None else {"loss": loss}),
        **({} if optimizer is None else {"optimizer": optimizer}),
    )
    asked = settings(1, probes=ProbeSettings.off())
    training = TrainingRun(workload, values.pop("policy", FP32), asked, None)
    witness = Witness(every=1, num_steps=1)
    training.probes = StepProbes({}, num_steps=1)
    training.probes._probes["witness"] = witness
    training.train(torch.device("cpu"))
    assert not any(m._forward_hooks for m in model.modules())
    return witness


def summed(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().sum()


def test_names_shapes_and_order() -> None:
    witness = witnessed(dropout_mlp())
    assert witness.events == [
        "start 0 1.0", "gradients", "before", "after skipped=False", "flush",
    ]  # fmt: skip
    assert [name for name, *_ in witness.calls] == ["0", "1", "2", "3"]  # not the container
    assert witness.calls[0][1:] == ([(16, 12)], [(16, 24)])
    assert witness.output_gradients == [
        ("3", (16, 4)), ("2", (16, 24)), ("1", (16, 24)), ("0", (16, 24)),
    ]  # fmt: skip
    expected = [("0", "weight"), ("0", "bias"), ("3", "weight"), ("3", "bias")]
    assert witness.weight_gradients == witness.weights == expected


class Shared(nn.Module):
    """One layer called three times, whose weight a second layer holds as well."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(12, 12)
        self.tied = nn.Linear(12, 12, bias=False)
        self.tied.weight = self.again.weight
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.again(self.again(x)))
        return self.tied(x) * self.scale + self.nothing.sum()


def test_shared_tied_unused_scalar_and_empty() -> None:
    witness = witnessed(Shared(), loss=summed)
    assert [name for name, *_ in witness.calls] == ["again", "again", "again", "tied", "(model)"]
    assert witness.output_gradients == [
        ("(model)", (16, 12)), ("tied", (16, 12)), *[("again", (16, 12))] * 3,
    ]  # fmt: skip
    owned = [("(model)", "scale"), ("(model)", "nothing"), ("again", "weight"), ("again", "bias")]
    assert witness.weight_gradients == owned
    assert witness.weights == [*owned, ("unused", "weight"), ("unused", "bias")]


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 4)

    def forward(self, batch: dict[str, Tensor], *, factor: Tensor) -> Any:
        out = self.inner(batch["x"])
        return {"out": (out, [out * factor]), "labels": batch["y"], "nothing": None}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Containers()
        self.block.extra = nn.Parameter(torch.ones(1))  # so that the block itself is watched

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.block({"x": x, "y": y}, factor=torch.ones(4))
        return found["out"][0] + found["out"][1][0] + self.block.extra


def test_containers_keywords_and_integers() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(*batch).square().sum()

    witness = witnessed(Outer(), loss=loss)
    (inner, block) = witness.calls
    assert inner == ("block.inner", [(16, 12)], [(16, 4)])
    assert block == ("block", [(16, 12), (4,)], [(16, 4), (16, 4)])


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.part = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, self.first(x), use_reentrant=self._reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_seen_once(reentrant: bool) -> None:
    witness = witnessed(Checkpointed(reentrant=reentrant), loss=summed)
    assert [name for name, *_ in witness.calls] == ["first", "part.0", "part.1"]
    assert [name for name, _ in witness.output_gradients] == ["part.1", "part.0", "first"]


def test_in_place_ops_behind_a_module() -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 4))
    witness = witnessed(model)
    # Flatten returns what it was given: both hooks are on one tensor.
    assert [name for name, _ in witness.output_gradients] == ["3", "1", "2", "0"]


def test_a_closure_shows_its_first_evaluation() -> None:
    witness = witnessed(
        dropout_mlp(), optimizer=lambda m: torch.optim.LBFGS(m.parameters(), max_iter=4)
    )
    assert [name for name, *_ in witness.calls] == ["0", "1", "2", "3"]
    assert witness.events[1:4] == ["gradients", "before", "after skipped=False"]


def test_compiled_and_scripted_parts_are_left_out_and_said() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Linear(12, 12)
            self.compiled = nn.Linear(12, 4)
            self.compiled.compile(backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.compiled(self.plain(x))

    model = Compiled()
    probes = StepProbes({"norms": {"every": 1}}, num_steps=1)
    optimizer = torch.optim.SGD(model.parameters())
    probes.attach(model, optimizer, list(model.parameters()))
    reasons = probes.results()["norms"]["not_applicable"]
    assert reasons == ["activations of `compiled`: torch.compile would be invalidated by hooks"]
    with probes.watching(0, loss_scale=1.0):
        assert model.plain._forward_hooks
        assert not model.compiled._forward_hooks
    assert not model.plain._forward_hooks


def test_an_exception_removes_hooks_and_leaves_the_step_out() -> None:
    model = dropout_mlp()
    probes = StepProbes(ProbeSettings(exponents_every=1).chosen(5), num_steps=5)
    probes.attach(model, torch.optim.SGD(model.parameters()), list(model.parameters()))

    def fail() -> None:
        with probes.watching(0, loss_scale=1.0):
            probes.gradients([])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not any(m._forward_hooks for m in model.modules())
    with probes.watching(1, loss_scale=1.0):
        probes.gradients([])
        probes.before_update(list(model.parameters()))
        probes.after_update(list(model.parameters()), skipped=False)
    probes.flush()
    assert probes.sampled()[0] == (1,)
    assert probes.results()["exponents"]["steps"] == [1]


def test_series_of_different_cadences_share_their_steps() -> None:
    asked = ProbeSettings(exponents_every=None, weight_gradients_every=4, lost_updates_every=3)
    record = run(probes=asked)
    assert record.sampled_steps == (0, 3, 4, 6, 8, 9)
    assert record.sampled["grad_total"] == (412.0, 0.0, 412.0, 0.0, 412.0, 412.0)
    assert [n > 0 for n in record.sampled["update_total"]] == [True, True, False, True, False, True]
    off = run(probes=ProbeSettings.off())
    assert (off.sampled_steps, off.sampled, off.histograms, set(off.probes) - {"audit"}) == (
        (), {}, {}, set(),
    )  # fmt: skip
    assert "zero_grad_share" not in off.final


def test_weights_that_no_module_holds_have_a_place() -> None:
    model, outside = nn.Linear(12, 4), nn.Parameter(torch.ones(4))
    witness = witnessed(
        model,
        loss=lambda m, batch: (m(batch[0]) * outside).sum(),
        optimizer=lambda m: torch.optim.SGD([*m.parameters(), outside], lr=0.1),
    )
    # A root without children is the model itself.
    assert witness.weights == [("(model)", "weight"), ("(model)", "bias"), ("(no module)", "2")]


def test_an_unknown_probe_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'norm' is unknown; known: exponents, norms"):
        StepProbes({"norm": {"every": 1}}, num_steps=1)
    assert all(name == probe.name for name, probe in step_probes.STEP_PROBES.items())
