"""Conformance: every policy trains every built-in workload on the same weights, data and masks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tiny_workloads import BF16, FP16, FP32, TF32, TinyWorkload, class_batches, run
from torch import Tensor, nn
from torch.nn import functional as F

from harness.analysis.pairing import pairing_fault
from harness.precision.policy import PrecisionPolicy
from harness.workloads.registry import make_workload

CONF = Path(__file__).parents[2] / "conf"
POLICIES = {
    path.stem: PrecisionPolicy.from_mapping(yaml.safe_load(path.read_text()))
    for path in sorted((CONF / "policy").glob("*.yaml"))
}
SMALL_TEXT = {"context": 32, "num_layers": 1, "width": 32, "num_heads": 2, "batch_size": 4}
WORKLOADS: dict[str, dict[str, Any]] = {
    "char_gpt": SMALL_TEXT,
    "char_gpt_hot": SMALL_TEXT,
    "char_gpt_124m": {**SMALL_TEXT, "vocabulary_size": 1000, "num_characters": 200_000},
    "digits_convnet": {},
}


def composed(name: str) -> dict[str, Any]:
    """Return the YAML of a workload with its `defaults` merged, as Hydra does it."""
    data = yaml.safe_load((CONF / "workload" / f"{name}.yaml").read_text())
    merged: dict[str, Any] = {}
    for base in data.pop("defaults", ["_self_"]):
        merged |= data if base == "_self_" else composed(base)
    return merged


class WithoutHeldOut:
    """A workload less its held-out set, which takes longer than three steps."""

    def __init__(self, workload: Any) -> None:
        self._workload = workload

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def held_out(self, seed: int) -> None:
        return None

    def eval_fn(self, model: nn.Module) -> None:
        return None


def built_in(name: str) -> Any:
    return WithoutHeldOut(make_workload(composed(name) | WORKLOADS[name]))


def test_every_built_in_workload_is_here() -> None:
    files = {path.stem for path in (CONF / "workload").glob("*.yaml")}
    assert files - {"custom"} == WORKLOADS.keys()


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_policy_has_the_fingerprints_of_fp32(name: str) -> None:
    workload = built_in(name)
    reference = run(workload, POLICIES["fp32"], steps=2)
    assert all(reference.fingerprints.dropout)
    for policy in POLICIES.values():
        record = run(workload, policy, steps=2)
        assert record.fingerprints == reference.fingerprints, policy.name
        assert pairing_fault(record, reference) is None
    # The fingerprint can tell: another seed has other masks.
    other = run(workload, POLICIES["bf16"], steps=2, seed=1).fingerprints
    assert not set(other.dropout) & set(reference.fingerprints.dropout)


class Denoiser(nn.Module):
    """Draws noise, times and gates in the format of its activations, as a diffusion model does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        time = torch.randint(0, 10, (len(x), 1)) / 10
        noise = torch.randn_like(h) + torch.normal(h.detach(), h.detach().abs())
        noise = noise + torch.randn(h.shape, dtype=h.dtype) + torch.empty_like(h).log_normal_()
        noise = noise + torch.randn_like(h.t()).t()  # not contiguous
        order = torch.randperm(h.shape[1])
        choice = torch.multinomial(h.detach().float().softmax(-1), 2)
        gate = torch.bernoulli(torch.full_like(h, 0.5)) * F.gumbel_softmax(h, dim=-1)
        z = torch.distributions.Normal(h.detach(), 1.0).sample()
        h = (h + time * noise)[:, order] * gate + z + choice.sum()
        return self.outer(F.dropout(h, 0.1))


class OnTheHost(nn.Module):
    """Draws from NumPy's and Python's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.rand(24)).float()  # noqa: NPY002 - as users' code does
        return self.outer(F.relu(self.inner(x) + random.random() * noise))


LOW = (TF32, BF16, FP16)
DIRECTED = PrecisionPolicy(
    name="directed",
    compute_format="bf16",
    fp32_modules=("forward:inner", "backward:outer"),
    fp32_ops=("forward:dropout", "backward:relu"),
)
HEAD = PrecisionPolicy(name="head", compute_format="bf16", fp32_selectors=("output_head",))


@pytest.mark.parametrize("policy", [*LOW, DIRECTED, HEAD], ids=lambda p: p.name)
@pytest.mark.parametrize("model", [Denoiser, OnTheHost])
def test_noise_drawn_in_the_step_is_paired(model: type[nn.Module], policy: Any) -> None:
    """Also where a policy runs a part of the model twice, or traces it once beforehand."""
    workload = TinyWorkload(model=model, data=class_batches)
    reference, record = run(workload, FP32), run(workload, policy)
    assert any(reference.fingerprints.dropout)
    assert record.fingerprints == reference.fingerprints


class DrawsByFormat(nn.Module):
    """Planted fault: how much is drawn depends on the format of an activation."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.inner, self.outer, self.draw = nn.Linear(12, 24), nn.Linear(24, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if h.dtype is torch.bfloat16:
            self.draw()
        return self.outer(h)


@pytest.mark.parametrize(
    "draw",
    [random.random, np.random.rand, lambda: torch.rand(3), lambda: F.dropout(torch.ones(3), 0.5)],
    ids=["python", "numpy", "torch", "dropout"],
)
def test_a_draw_that_only_one_policy_makes_is_caught(draw: Any) -> None:
    workload = TinyWorkload(model=lambda: DrawsByFormat(draw))
    fault = pairing_fault(run(workload, BF16), run(workload, FP32))
    assert fault is not None
    assert "masks" in fault
