"""Exponent histograms by module against element-wise oracles."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny_workloads import BF16, BF16_PURE, FP16, FP32, TinyWorkload, run

from harness.numerics.formats import FP16 as FP16_FORMAT
from harness.probes.base import NamedTensor
from harness.probes.exponent_samples import format_name, shifted
from harness.probes.exponents import ExponentsProbe
from harness.runs.settings import ProbeSettings

ONLY = ProbeSettings(
    exponents_every=1,
    weight_gradients_every=1,
    norms_every=None,
    lost_updates_every=None,
    memory=False,
)


def named(value: torch.Tensor, module: str = "a") -> NamedTensor:
    return NamedTensor(module=module, name="weight", value=value)


def one_step(
    probe: ExponentsProbe,
    step: int,
    gradients: list[NamedTensor],
    *,
    loss_scale: float = 1.0,
    output_gradients: tuple[torch.Tensor, ...] = (),
) -> None:
    probe.start(step, loss_scale=loss_scale)
    for gradient in output_gradients:
        probe.output_gradient("a", gradient)
    probe.gradients(gradients)
    probe.before_update([])
    probe.after_update([], skipped=False)


def probe_of(num_steps: int = 10, *, every: int | None = None) -> ExponentsProbe:
    return ExponentsProbe(every=every, weight_gradients_every=1, num_steps=num_steps)


def test_counts_match_the_casts() -> None:
    """Oracle: torch's own casts, on values away from the histogram's documented edges."""
    exponents = torch.arange(-60, 40, dtype=torch.float64)
    values = (1.25 * 2.0**exponents).float()
    probe = probe_of(num_steps=4)
    one_step(probe, 0, [named(values), named(torch.zeros(10), "b")])
    one_step(probe, 3, [named(values[:50])])
    probe.flush()
    steps, sampled = probe.sampled()
    half = values.half()
    assert steps == (0, 3)
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
    assert sum(histograms["grad/tail"]) == 50  # the last third of four steps begins at step 2
    modules = probe.result()["modules"]
    assert modules["b"]["weight_gradients"] == {
        "bins": {"0": 10},
        "elements": 10,
        "zeros": 10,
        "nonfinite": 0,
        "format": "fp32",
    }
    assert modules["a"]["weight_gradients"]["elements"] == 150


def test_without_gradients() -> None:
    probe = probe_of()
    assert probe.zero_share() is None
    assert sum(probe.histograms()["grad/all"]) == 0
    one_step(probe, 0, [])
    one_step(probe, 1, [named(torch.empty(0))])
    probe.flush()
    assert probe.sampled()[1]["grad_nonzero"] == (0.0, 0.0)
    assert probe.zero_share() is None
    assert probe.result()["windows"]["fp16"] == {"low": [None, None], "high": [None, None]}


def test_nonfinite_gradients_are_counted_apart_and_leave_no_window() -> None:
    probe = probe_of()
    one_step(probe, 0, [named(torch.tensor([1.0, math.inf, math.nan]))])
    probe.flush()
    assert probe.sampled()[1]["grad_nonzero"] == (1.0,)
    assert probe.histograms()["grad/all"][255] == 2
    assert probe.result()["modules"]["a"]["weight_gradients"]["nonfinite"] == 2
    assert probe.result()["windows"]["fp16"]["high"] == [None]


def test_the_window_is_what_every_power_of_two_says() -> None:
    """Oracle: multiply by each scale and cast."""
    torch.manual_seed(0)
    values = torch.exp2(torch.empty(5000).uniform_(-30, -3)) * 1.1
    probe = probe_of()
    one_step(probe, 0, [named(values)])
    probe.flush()
    low, high = (probe.result()["windows"]["fp16"][k][0] for k in ("low", "high"))
    for power in range(-10, 30):
        cast = (values.double() * 2.0**power).half()
        assert bool((cast == 0).sum() <= 0.001 * 5000) == (power >= low)
        assert bool(cast.isfinite().all()) == (power <= high)


def test_output_gradients_are_unscaled_and_narrow_the_window() -> None:
    for scale in (1024.0, 1000.0):
        probe = probe_of(every=1)
        gradient = torch.tensor([0.5, 2.0**-20, 0.0]) * scale
        one_step(
            probe,
            0,
            [named(torch.tensor([4.0]))],
            loss_scale=scale,
            output_gradients=(gradient, gradient),
        )
        probe.flush()
        result = probe.result()
        found = result["modules"]["a"]["output_gradients"]
        assert (found["elements"], found["zeros"]) == (6, 2)
        assert found["bins"] == {"0": 2, str(127 - 20): 2, str(127 - 1): 2}
        # 4.0 * 2^13 = 2^15 is in FP16's top binade; 2^-20 * 2^-5 is FP16's last rounding to zero.
        assert result["windows"]["fp16"] == {"low": [-5], "high": [13]}
    weights_only = probe_of()
    one_step(weights_only, 0, [named(torch.tensor([4.0]))], output_gradients=(gradient,))
    weights_only.flush()
    assert "output_gradients" not in weights_only.result()["modules"]["a"]


def test_shifting_keeps_the_ends() -> None:
    histogram = torch.zeros(256, dtype=torch.int64).numpy()
    histogram[[0, 5, 250, 255]] = 1, 2, 3, 4
    down, up = shifted(histogram, -10), shifted(histogram, 10)
    assert (down[0], down[240], down[255]) == (3, 3, 4)
    assert (up[0], up[15], up[254], up[255]) == (1, 2, 3, 4)
    assert down.sum() == up.sum() == 10


def test_updates_of_a_large_model_are_taken_group_by_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("harness.probes.exponents.CHUNK_ELEMENTS", 50)
    before = [named(torch.zeros(n), module) for n, module in ((40, "a"), (70, "b"), (9, "a"))]
    after = [named(torch.full_like(p.value, 2.0**-k), p.module) for k, p in enumerate(before)]
    probe = probe_of(every=1)
    probe.start(0, loss_scale=1.0)
    probe.before_update(before)
    probe.after_update(after, skipped=False)
    probe.flush()
    found = probe.result()["modules"]
    assert found["a"]["updates"]["bins"] == {"127": 40, "125": 9}
    assert found["b"]["updates"]["bins"] == {"126": 70}


def test_a_run_has_every_kind_of_every_module() -> None:
    record = run(probes=ONLY)
    found = record.probes["exponents"]
    assert found["view"] == "what_if"
    assert found["steps"] == found["weight_gradient_steps"] == list(range(10))
    assert set(found["modules"]["0"]) == {
        "weights",
        "inputs",
        "output_gradients",
        "weight_gradients",
        "updates",
    }
    # A dropout layer owns no weights.
    assert set(found["modules"]["2"]) == {"inputs", "output_gradients"}
    inputs = found["modules"]["0"]["inputs"]
    assert inputs["elements"] == 10 * 16 * 12
    json.dumps(found, allow_nan=False)
    # Both come from the same counts.
    kinds = [m["weight_gradients"] for m in found["modules"].values() if "weight_gradients" in m]
    assert sum(k["elements"] for k in kinds) == sum(record.sampled["grad_total"])
    assert sum(k["bins"].get("0", 0) for k in kinds) == record.histograms["grad/all"][0]


def test_observed_and_what_if_are_told_apart() -> None:
    for policy, expected in ((FP32, "what_if"), (BF16, "observed"), (BF16_PURE, "observed")):
        assert run(policy=policy, probes=ONLY).probes["exponents"]["view"] == expected
    pure = run(policy=BF16_PURE, probes=ONLY).probes["exponents"]["modules"]["0"]
    assert pure["weights"]["format"] == pure["weight_gradients"]["format"] == "bf16"
    assert format_name(torch.float8_e4m3fn) == "fp8_e4m3"
    assert format_name(torch.complex64) == "complex64"


def test_a_loss_scale_does_not_show() -> None:
    """The same gradients, but for rounding, with and without a scale of 2^16."""
    workload = TinyWorkload(clip=None)
    plain = run(workload, BF16, steps=1, probes=ONLY).probes["exponents"]
    scaled = run(workload, FP16, steps=1, probes=ONLY).probes["exponents"]

    def largest(found: dict) -> int:
        bins = found["modules"]["3"]["output_gradients"]["bins"]
        return max(map(int, bins))

    assert abs(largest(plain) - largest(scaled)) <= 1  # rounding may cross a power of two
    assert FP16_FORMAT.max_finite < 2.0**16


def test_cadences() -> None:
    probe = ExponentsProbe(every=4, weight_gradients_every=3, num_steps=11)
    assert [s for s in range(11) if probe.due(s)] == [0, 3, 4, 6, 8, 9, 10]
    all_kinds = []
    for step in range(11):
        if probe.due(step):
            probe.start(step, loss_scale=1.0)
            all_kinds += [step] * probe.wants_activations
    assert all_kinds == [0, 4, 8, 10]
    only = ExponentsProbe(every=None, weight_gradients_every=5, num_steps=11)
    assert [s for s in range(11) if only.due(s)] == [0, 5, 10]
    rare = ExponentsProbe(every=5, weight_gradients_every=None, num_steps=11)
    assert [s for s in range(11) if rare.due(s)] == [0, 5, 10]
