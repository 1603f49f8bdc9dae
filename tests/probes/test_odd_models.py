"""Models that hold, return or do what a probe could stumble over: none of it may end a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_workloads import (
    BF16,
    CLASSES,
    FEATURES,
    FP32,
    TF32,
    TinyWorkload,
    class_batches,
    cross_entropy,
    numbers,
    run,
)
from torch import Tensor, nn
from torch.nn import functional as F

from harness.probes.tensors import tensors_within
from harness.runs.record import RunRecord
from harness.runs.settings import ProbeSettings

STEPS = 4
EVERY_STEP = ProbeSettings(
    exponents_every=1, weight_gradients_every=1, norms_every=1, lost_updates_every=1
)


class Layers(nn.Module):
    """Two linear layers with attributes of the names `first` and `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class GivesWeight(nn.Module):
    """Returns its parameter, as a table of prompts or of positions does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(0.1 * torch.randn(FEATURES, CLASSES))

    def forward(self) -> Tensor:
        return self.table


class UsesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = GivesWeight()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.prompts()


class Imaginary(nn.Module):
    """Returns a tensor whose sign is a bit of the tensor and not of its elements."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x).conj().imag


class Keeps(Layers):
    """Holds buffers of every layout and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(16).to_sparse())
        self.register_buffer("rows", torch.eye(16).to_sparse_csr())
        self.register_buffer("ragged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
        self.register_buffer(
            "jagged",
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        )
        self.register_buffer("eighth", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("spectrum", torch.ones(3, dtype=torch.complex64))
        self.register_buffer(
            "codes", torch.quantize_per_tensor(torch.randn(300), 0.1, 0, torch.qint8)
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = torch.sparse.mm(self.graph, x.float())
        return super().forward(x)


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([0, 4, 9, len(x)])
        return self.layers(torch.nested.nested_tensor_from_jagged(x, lengths)).values()


class Grows(Layers):
    """Gets a layer during training, and a parameter of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList()
        self.rows = nn.Parameter(torch.zeros(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 3 and not self.more:
            self.more.append(nn.Linear(FEATURES, FEATURES))
            self.rows.data = torch.zeros(5)
        for layer in self.more:
            x = layer(x)
        return super().forward(x) + self.rows.sum()


def scripted_part() -> nn.Module:
    model = Layers()
    model.first = torch.jit.script(model.first)
    return model


def vmapped(model: nn.Module, batch: Any) -> Tensor:
    weights = dict(model.named_parameters())

    def one(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x[None],))[0]

    return F.cross_entropy(torch.func.vmap(one)(batch[0]), batch[1])


def with_derivatives(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    slopes = torch.func.vmap(torch.func.grad(lambda row: model(row[None]).sum()))(x)
    _, along = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return F.cross_entropy(model(x), y) + 0.1 * slopes.square().mean() + along.square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Products(Layers):
    """Calls ops that multiply matrices in kernels of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Bilinear(FEATURES, FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        far = torch.cdist(x, self.first.weight, compute_mode="use_mm_for_euclid_dist")
        return super().forward(self.pairs(x, x)) + far.mean(1, keepdim=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "returns its weight": UsesWeight,
    "negative bit": lambda: nn.Sequential(Imaginary(), nn.Linear(FEATURES, CLASSES)),
    "buffers of every kind": Keeps,
    "jagged tensors": Jagged,
    "products within ops": Products,
    "TorchScript part": scripted_part,
    "TorchScript": lambda: torch.jit.script(Layers()),
}


class Softmax(Layers):
    """Its softmax is in FP32, and what follows in BF16's backward pass has to know that."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.last(torch.tanh(self.first(x))), -1).log()


LOSSES = {"vmap": vmapped, "grad and jvp": with_derivatives}
CASES = {
    **{name: TinyWorkload(model=model) for name, model in MODELS.items()},
    **{name: TinyWorkload(model=Layers, loss=loss) for name, loss in LOSSES.items()},
    "grows": TinyWorkload(model=Grows, optimizer=sgd),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(jit|nested tensors is in|quantized tensor|CSR).*"),
    pytest.mark.filterwarnings("ignore:.*Sparse.*"),
]


def trained(workload: TinyWorkload, **values: Any) -> tuple[RunRecord, nn.Module]:
    kept: list[nn.Module] = []

    def model() -> nn.Module:
        kept.append(workload.model())
        return kept[-1]

    record = run(dataclasses.replace(workload, model=model), steps=STEPS, **values)
    return record, kept[0]


@pytest.mark.parametrize("policy", [FP32, BF16, TF32], ids=lambda p: p.name)
@pytest.mark.parametrize("case", CASES)
def test_probes_neither_end_nor_change_the_run(case: str, policy: Any) -> None:
    record, model = trained(CASES[case], policy=policy, probes=EVERY_STEP)
    bare, _ = trained(CASES[case], policy=policy, probes=ProbeSettings.off())
    ours, theirs = numbers(record), numbers(bare)
    for measured in (ours, theirs):
        measured["sampled"] = measured["histograms"] = None
        measured["final"].pop("zero_grad_share", None)
    assert repr(ours) == repr(theirs)
    assert RunRecord.from_json(record.to_json()) == record
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_a_weight_that_a_module_returns_has_one_gradient_a_step() -> None:
    record, _ = trained(CASES["returns its weight"], probes=EVERY_STEP)
    seen = record.probes["exponents"]["modules"]["prompts"]
    assert seen["output_gradients"]["elements"] == STEPS * FEATURES * CLASSES


@pytest.mark.parametrize("case", LOSSES)
def test_calls_inside_transforms_are_said_not_to_be_seen(case: str) -> None:
    record, _ = trained(CASES[case], probes=EVERY_STEP)
    for probe in ("exponents", "norms"):
        reasons = record.probes[probe]["not_applicable"]
        assert "calls of `first` inside torch.func transforms" in reasons


def test_layers_that_came_later_count_as_moved() -> None:
    record, _ = trained(CASES["grows"], probes=ProbeSettings.off())
    start, more = 16 * (FEATURES + 1) + CLASSES * 17, FEATURES * (FEATURES + 1) + 5
    assert record.final["num_parameters"] == start + more
    # The old layers' weights moved, all of the new one and of what changed its shape count so.
    assert record.final["moved_weight_share"] == 1.0
    assert record.final["unmoved_tensors"] == 0.0


def test_torchscript_computes_what_python_would() -> None:
    script = TinyWorkload(model=lambda: torch.jit.script(Softmax()))
    plain = TinyWorkload(model=Softmax)
    ours, theirs = (trained(w, policy=BF16)[0] for w in (script, plain))
    assert ours.series["loss"] == theirs.series["loss"]
    assert ours.audit == theirs.audit


@dataclasses.dataclass(frozen=True)
class Output:
    hidden: Tensor
    name: str = "text"


class Wrapped(nn.Linear):
    def forward(self, x: Tensor) -> Output:
        return Output(super().forward(x))


class Unwrapped(nn.Linear):
    def forward(self, output: Output) -> Tensor:
        return super().forward(torch.tanh(output.hidden))


def test_tensors_in_dataclasses_are_seen() -> None:
    assert list(tensors_within({"a": (Output(torch.ones(1)), None, 3)})) == [torch.ones(1)]
    model = TinyWorkload(model=lambda: nn.Sequential(Wrapped(FEATURES, 16), Unwrapped(16, CLASSES)))
    record, _ = trained(model, probes=EVERY_STEP)
    norms = record.probes["norms"]["modules"]
    assert norms["0"]["output_rms"][0] > 0
    assert norms["1"]["input_rms"][0] > 0
    assert "not_applicable" not in record.probes["norms"]


class Parts(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return iter([x])


def test_outputs_without_tensors_are_said() -> None:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.parts = Parts()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(next(self.parts(x)))

    record, _ = trained(TinyWorkload(model=Model), probes=EVERY_STEP)
    reasons = record.probes["norms"]["not_applicable"]
    assert reasons == ["output of `parts`: list_iterator without tensors"]


def ragged_batches(seed: int, steps: int) -> Any:
    for x, y in class_batches(seed, steps):
        parts = [x[:2], x[2:5]]
        yield (
            x,
            y,
            x.to_sparse(),
            torch.nested.nested_tensor(parts),
            torch.nested.nested_tensor(parts, layout=torch.jagged),
            torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        )


def test_batches_of_any_layout_have_a_fingerprint() -> None:

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch[:2])

    workload = TinyWorkload(data=ragged_batches, loss=loss)
    one, two = (run(workload, steps=STEPS) for _ in range(2))
    assert one.fingerprints.batches == two.fingerprints.batches
    other = run(
        dataclasses.replace(workload, data=lambda s, n: ragged_batches(s + 1, n)), steps=STEPS
    )
    assert other.fingerprints.batches != one.fingerprints.batches
    assert one.series["loss"] == run(steps=STEPS).series["loss"]
