"""The probe's ratios against gradients drawn here, and thresholds that fail where they should."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from factories import make_point, make_same_point

from harness.analysis.probe_findings import ProbeFindings
from harness.analysis.rule import DecisionRule
from harness.analysis.same_point_rule import measure, probe_reasons
from harness.runs.same_point.record import ModuleError, Point

RULE = DecisionRule()
K, SIZE = 16, 4000
Array = np.ndarray[Any, np.dtype[np.float64]]


def point_of(reference: Array, candidate: Array, *, step: int = 10) -> Point:
    """Return the sums of a point, written out from their definitions."""
    errors = candidate - reference
    mean, mean_error = reference.mean(0), errors.mean(0)
    pairs = [(i, j) for i in range(K) for j in range(K) if i != j]
    return Point(
        step=step,
        kind="trajectory",
        learning_rate=1e-3,
        noise=sum(((f - mean) ** 2).sum() for f in reference) / (K - 1),
        mean_gradient_sq=float((mean**2).sum()),
        error_sq=float(np.mean([(e**2).sum() for e in errors])),
        mean_error_sq=float((mean_error**2).sum()),
        error_noise=sum(((e - mean_error) ** 2).sum() for e in errors) / (K - 1),
        cross=float(sum(candidate[i] @ reference[j] for i, j in pairs)),
        self_cross=float(sum(reference[i] @ reference[j] for i, j in pairs)),
        retained=1.0,
        updated=1.0,
    )


def gradients(seed: int, *, signal: float = 1.0, noise: float = 1.0) -> Array:
    """Return K gradients: one true gradient of energy SIZE * signal^2 and noise per batch."""
    draw = np.random.default_rng(seed)
    true = signal * draw.standard_normal(SIZE)
    return true + noise * draw.standard_normal((K, SIZE))


def found(*points: Point, **fields: Any) -> ProbeFindings:
    result = measure(make_same_point(points=points, **fields), RULE)
    assert isinstance(result, ProbeFindings)
    return result


def test_equal_gradients_have_no_error_and_pass() -> None:
    f = gradients(0)
    probe = found(point_of(f, f))
    assert (probe.noise_ratio, probe.rounding_bias, probe.descent) == (0.0, 0.0, pytest.approx(1))
    assert (probe.retention, probe.passes, probe.weak_signal) == (1.0, True, False)


def test_unbiased_rounding_noise_is_seen_as_noise_alone() -> None:
    points = []
    for seed in range(4):
        f = gradients(seed)
        own = np.random.default_rng(100 + seed).standard_normal(f.shape)
        points.append(point_of(f, f + 0.5 * own, step=seed))
    probe = found(*points)
    # Noise of variance 0.25 beside minibatch noise of variance 1, over 256,000 draws.
    assert probe.noise_ratio == pytest.approx(0.25, rel=0.02)
    # Unbiased estimates: the noise of the mean is taken out. Their spread is about 0.25 / K /
    # sqrt(4 * SIZE / 2) = 2e-4 for the bias and 0.5 / sqrt(16 * 4 * SIZE) = 1e-3 for the descent.
    assert probe.rounding_bias == pytest.approx(0, abs=1e-3)
    assert probe.descent == pytest.approx(1, abs=5e-3)
    assert probe.failing == ("PROBE_ROUNDING_NOISE",)


def test_a_gradient_that_is_shortened_is_biased_and_descends_less() -> None:
    f = gradients(1)
    probe = found(point_of(f, 0.7 * f))
    assert probe.descent == pytest.approx(0.7)
    # |0.3 f|^2 / |f|^2; the estimate subtracts the noise of the mean from both.
    assert probe.rounding_bias == pytest.approx(0.09)
    # Error of batch j is 0.3 f_j, whose energy is signal plus noise: 2 * 0.09.
    assert probe.noise_ratio == pytest.approx(0.18, rel=0.1)
    assert set(probe.failing) == {
        "PROBE_DESCENT_LOSS",
        "PROBE_ROUNDING_BIAS",
        "PROBE_ROUNDING_NOISE",
    }


def test_sums_are_pooled_before_they_are_divided() -> None:
    """A point whose true gradient is next to nothing must not decide: pooled it hardly counts."""
    good = make_point(signal=4.0, eta=1.0)
    tiny = make_point(signal=1e-9, eta=-50.0, beta=50.0)
    probe = found(good, good, good, tiny)
    assert probe.descent == pytest.approx(1)
    assert probe.passes


def test_an_unresolved_gradient_is_not_divided_by() -> None:
    f = gradients(2, signal=0.01)
    bias = np.random.default_rng(9).standard_normal(SIZE)
    probe = found(point_of(f, f + 0.2 * bias))
    assert probe.weak_signal
    assert probe.descent is None
    # 0.04 of energy per weight, relative to the noise of the mean, 1/16 per weight.
    assert probe.rounding_bias == pytest.approx(0.04 * K, rel=0.1)
    assert probe.failing == ("PROBE_ROUNDING_BIAS",)


def test_the_same_gradient_in_every_batch_leaves_no_noise_to_compare_with() -> None:
    f = np.tile(gradients(3)[:1], (K, 1))
    probe = found(point_of(f, f * (1 + 1e-3)))
    assert probe.noise_ratio is None
    assert probe.descent == pytest.approx(1.001)
    assert probe.passes


def test_the_least_retention_counts_and_the_final_rate_counts_for_it_alone() -> None:
    points = [
        make_point(step=12, retention=0.99),
        make_point(step=40, retention=0.95),
        make_point(step=116, kind="final_rate", retention=0.4, nu=100.0, eta=-3.0),
    ]
    probe = found(*points)
    assert (probe.retention, probe.retention_step) == (0.4, 116)
    assert (probe.retention_kind, probe.tests_final_rate) == ("final_rate", True)
    assert probe.failing == ("PROBE_STAGNATION",)
    assert probe.steps == (12, 40)
    (reason,) = probe_reasons(probe, RULE, kind="test")
    assert "only 40 % of FP32's update is stored at the planned final learning rate" in (
        reason.message
    )
    assert "already" not in reason.message
    assert (reason.value, reason.threshold) == (0.4, 0.9)


def test_where_the_weights_first_stall_is_said_beside_the_worst_point() -> None:
    points = [
        make_point(step=12, retention=0.99),
        make_point(step=40, retention=0.54),
        make_point(step=116, retention=0.2),
        make_point(step=116, kind="final_rate", retention=1e-4),
    ]
    probe = found(*points)
    assert probe.retentions == (0.99, 0.54, 0.2)
    (reason,) = probe_reasons(probe, RULE, kind="test")
    assert (
        "next to nothing of FP32's update is stored at the planned final learning rate (already "
        "after 40 steps 54 %)" in reason.message
    )


def test_a_point_that_updates_nothing_has_no_retention() -> None:
    """The learning rate may have decayed to zero at the last point."""
    still = make_point(step=116, kind="final_rate", retained=0.0, updated=0.0)
    assert found(make_point(), still).retention == 1.0
    alone = found(make_point(retained=0.0, updated=0.0))
    assert alone.retention is None
    assert alone.passes


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"error_sq": math.inf}, "PROBE_ROUNDING_NOISE"),
        ({"error_sq": math.nan}, "PROBE_ROUNDING_NOISE"),
        ({"mean_error_sq": math.inf, "error_noise": math.inf}, "PROBE_ROUNDING_BIAS"),
        ({"cross": math.nan}, "PROBE_DESCENT_LOSS"),
        ({"cross": -math.inf}, "PROBE_DESCENT_LOSS"),
        ({"retained": math.nan}, "PROBE_STAGNATION"),
    ],
)
def test_what_is_not_finite_fails(fields: dict[str, float], code: str) -> None:
    probe = found(make_point(), make_point(**fields))
    assert probe.failing == (code,)
    (reason,) = probe_reasons(probe, RULE, kind="warning")
    assert "not finite" in reason.message


@pytest.mark.parametrize(
    ("ratios", "code"),
    [
        ({"nu": 0.11}, "PROBE_ROUNDING_NOISE"),
        ({"nu": 0.099}, None),
        ({"beta": 0.051}, "PROBE_ROUNDING_BIAS"),
        ({"beta": 0.049}, None),
        ({"eta": 0.89}, "PROBE_DESCENT_LOSS"),
        ({"eta": 1.11}, "PROBE_DESCENT_LOSS"),
        ({"eta": 1.09}, None),
        ({"retention": 0.899}, "PROBE_STAGNATION"),
        ({"retention": 0.901}, None),
        ({"retention": -0.5}, "PROBE_STAGNATION"),
    ],
)
def test_thresholds(ratios: dict[str, float], code: str | None) -> None:
    probe = found(make_point(**ratios))
    assert probe.failing == (() if code is None else (code,))


def test_thresholds_are_constants_of_the_rule() -> None:
    rule = DecisionRule(probe_noise_ratio=0.5, probe_retention=0.5)
    probe = measure(make_same_point(nu=0.4, retention=0.6), rule)
    assert isinstance(probe, ProbeFindings)
    assert probe.passes


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (make_same_point(failed="RuntimeError: no."), "RuntimeError: no"),
        (make_same_point(points=()), "it has no point"),
        (make_same_point(points=[make_point(noise=math.nan)]), "FP32's own gradients are not"),
        (
            make_same_point(points=[make_point(noise=0.0, mean_gradient_sq=0.0)]),
            "gradients are zero",
        ),
    ],
)
def test_no_measurement_says_why(record: Any, why: str) -> None:
    result = measure(record, RULE)
    assert isinstance(result, str)
    assert why in result


def test_figures_of_the_whole_model_are_carried_along() -> None:
    whole = ModuleError(
        module="(model)",
        kind="Net",
        gradient_error=0.01,
        cosine=0.999,
        flushed_share=0.2,
        sqnr_db=40.0,
        sign_agreement=0.98,
        fp64_error=0.011,
        fp32_fp64_error=1e-6,
    )
    probe = found(make_point(), modules=[whole, ModuleError(module="a", kind="Linear", cosine=0.5)])
    assert (probe.relative_error, probe.cosine, probe.flushed_share) == (0.01, 0.999, 0.2)
    assert (probe.sqnr_db, probe.sign_agreement) == (40.0, 0.98)
    assert (probe.fp64_error, probe.fp32_fp64_error) == (0.011, 1e-6)
