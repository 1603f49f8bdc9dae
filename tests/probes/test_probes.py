"""Gradient counts and lost updates against element-wise oracles."""

from __future__ import annotations

import pytest
import torch

from harness.probes.flat import flat_chunks
from harness.probes.gradients import GradientProbe
from harness.probes.lost_updates import LostUpdateProbe


def test_chunks_hold_everything_in_order() -> None:
    tensors = [torch.arange(5.0), torch.empty(0), torch.arange(7.0).bfloat16().reshape(7, 1)]
    for limit in (1, 6, 100):
        chunks = list(flat_chunks(tensors, limit=limit))
        assert all(c.dtype is torch.float32 for c in chunks)
        assert torch.cat(chunks).tolist() == [*range(5), *range(7)]
    assert len(list(flat_chunks(tensors, limit=6))) == 2
    assert not list(flat_chunks([]))


def test_gradient_counts_match_the_casts() -> None:
    """Oracle: torch's own casts, on values away from the histogram's documented edges."""
    exponents = torch.arange(-60, 40, dtype=torch.float64)
    values = (1.25 * 2.0**exponents).float()
    probe = GradientProbe(tail_start=3)
    probe.observe([values, torch.zeros(10)], step=0)
    probe.observe([values[:50]], step=3)
    sampled = probe.sampled()
    half = values.half()
    assert sampled["grad_total"] == (110.0, 50.0)
    assert sampled["grad_nonzero"] == (100.0, 50.0)
    assert sampled["grad_flushed_fp16"][0] == float((half == 0).sum())
    assert sampled["grad_overflow_fp16"][0] == float(half.isinf().sum())
    subnormal = (half != 0) & (half.abs() < 2.0**-14)
    assert sampled["grad_subnormal_fp16"][0] == float(subnormal.sum())
    assert sampled["grad_flushed_bf16"] == (0.0, 0.0)
    assert probe.zero_share() == pytest.approx((10 / 110 + 0) / 2)
    histograms = probe.histograms()
    assert sum(histograms["grad/all"]) == 160
    assert sum(histograms["grad/tail"]) == 50


def test_gradient_probe_without_gradients() -> None:
    probe = GradientProbe(tail_start=0)
    assert probe.zero_share() is None
    assert sum(probe.histograms()["grad/all"]) == 0
    probe.observe([], step=0)
    assert probe.sampled()["grad_nonzero"] == (0.0,)
    assert probe.zero_share() is None


def test_nonfinite_gradients_are_not_in_the_denominator() -> None:
    probe = GradientProbe(tail_start=0)
    probe.observe([torch.tensor([1.0, float("inf"), float("nan")])], step=0)
    assert probe.sampled()["grad_nonzero"] == (1.0,)
    assert probe.histograms()["grad/all"][255] == 2


@pytest.mark.parametrize("stored_format", ["fp32", "bf16"])
def test_lost_updates_by_hand(stored_format: str) -> None:
    """At weight 1, BF16's spacing is 2^-7 upwards: half of it is lost, more than half is not."""
    dtype = torch.float32 if stored_format == "fp32" else torch.bfloat16
    steps = torch.tensor([0.0, 2.0**-8, 2.0**-7, 2.0**-9, 0.5], dtype=torch.float32)
    weight = torch.nn.Parameter(torch.ones(5, dtype=dtype))
    weight.grad = (steps != 0).to(dtype)
    ignored = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    probe = LostUpdateProbe(stored_format=stored_format)
    probe.before_update([weight, ignored])
    with torch.no_grad():
        weight.copy_((weight.float() + steps).to(dtype))
        ignored += 1
    probe.after_update([weight, ignored])
    probe.skipped()
    assert probe.sampled() == {"lost_update_bf16": (2.0, 0.0), "update_total": (4.0, 0.0)}


def test_fp16_weights_are_not_counted_as_bf16() -> None:
    assert LostUpdateProbe(stored_format="fp16").sampled() == {}
