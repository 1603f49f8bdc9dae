"""Curves from records, against brute force; gaps and stops stay visible."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from factories import crashed, diverged, make_record, with_series
from report_samples import make_findings, make_verdict

from harness.report import evidence as ev


@pytest.mark.parametrize("num_steps", [1, 7, 99, 100, 101, 300, 12345])
def test_binned_is_the_mean_of_each_bin(num_steps: int) -> None:
    values = np.random.default_rng(0).standard_normal(num_steps)
    width = ev.bin_width(num_steps)
    wanted = [values[k : k + width].mean() for k in range(0, num_steps, width)]
    # Sums of a few numbers in another order: a few ulp.
    np.testing.assert_allclose(ev.binned(values, num_steps), wanted, rtol=1e-13, atol=1e-15)
    assert len(ev.bin_centres(num_steps)) == len(wanted) <= 100


def test_binned_skips_single_non_finite_steps_and_leaves_a_gap_after_the_end() -> None:
    values = np.array([1.0, math.inf, 3.0, math.nan, math.nan, math.nan])
    out = ev.binned(values, 300)
    assert out[0] == 2.0
    assert np.isnan(out[1:]).all()


def _evidence(records: list, *policies: str) -> ev.Evidence:
    findings = make_findings(*(make_verdict(p) for p in policies), num_steps=120, tail_start=80)
    return ev.gather(findings, records)


def test_gather_sorts_and_drops_strangers() -> None:
    records = [make_record("bf16", 1), make_record("fp32", 1), make_record("fp32", 0)]
    got = _evidence([*records, make_record("tf32", 0)], "bf16", "fp16")
    assert got.policies == ("fp32", "bf16", "fp16")
    assert got.compared == ("bf16", "fp16")
    assert [r.seed for r in got.runs["fp32"]] == [0, 1]
    assert got.runs["fp16"] == ()


def test_difference_pairs_by_seed() -> None:
    records = [make_record("fp32", s, seed_sd=1.0) for s in (0, 1)]
    records += [make_record("bf16", s, seed_sd=1.0, offset=0.5) for s in (0, 1, 2)]
    curve = ev.difference_curve(_evidence(records, "bf16"), "bf16")
    assert curve is not None
    assert curve.num_runs == 2
    # The offset grows in over the first tenth; unpaired, the seeds' own levels would show.
    np.testing.assert_allclose(curve.middle[20:], 0.5, atol=1e-12)
    np.testing.assert_allclose(curve.high[20:] - curve.low[20:], 0.0, atol=1e-12)


def test_the_mean_ends_where_the_first_seed_does_and_the_range_goes_on() -> None:
    records = [make_record("fp32", s) for s in (0, 1)]
    records += [make_record("bf16", 0), diverged(make_record("bf16", 1), at_step=60)]
    curve = ev.series_curve(_evidence(records, "bf16"), "bf16", "loss")
    assert curve is not None
    assert np.isfinite(curve.middle[:30]).all()
    assert np.isnan(curve.middle[31:]).all()
    assert np.isfinite(curve.low[31:]).all()
    (stop,) = curve.stops
    assert stop.status == "diverged"
    assert stop.step == 58.5
    assert math.isfinite(stop.value)


def test_a_run_without_one_finite_value_has_a_stop_without_a_place() -> None:
    record = with_series(make_record("bf16", 0), loss=[math.nan] * 5)
    record = dataclasses.replace(record, status="diverged")
    got = _evidence([make_record("fp32", 0), record], "bf16")
    for curve in (ev.series_curve(got, "bf16", "loss"), ev.difference_curve(got, "bf16")):
        assert curve is not None
        assert np.isnan(curve.middle).all()
        assert math.isnan(curve.stops[0].value)


def test_curves_without_data_are_none() -> None:
    got = _evidence([make_record("fp32", 0), crashed(make_record("bf16", 0))], "bf16")
    assert ev.series_curve(got, "bf16", "loss") is None
    assert ev.difference_curve(got, "bf16") is None
    assert ev.exponent_shares(got, "bf16", "grad/all") is None
    assert ev.sampled_share_curve(got, "bf16", counted="grad_nonzero", total="grad_total") is None


def test_sampled_share_divides_seed_by_seed() -> None:
    record = make_record("bf16", 0)
    count = len(record.sampled_steps)
    parts = {"grad_flushed_fp16": (3.0,) * count, "grad_nonzero": (12.0,) * (count - 1) + (0.0,)}
    record = dataclasses.replace(record, sampled={**record.sampled, **parts})
    curve = ev.sampled_share_curve(
        _evidence([record], "bf16"), "bf16", counted="grad_flushed_fp16", total="grad_nonzero"
    )
    assert curve is not None
    assert (curve.middle[:-1] == 0.25).all()
    assert math.isnan(curve.middle[-1])  # nothing to lose, so no share


def test_exponent_shares_leave_out_zeros_and_non_finite() -> None:
    counts = [0] * 256
    counts[0], counts[255], counts[127], counts[100] = 50, 7, 3, 1
    record = dataclasses.replace(make_record("bf16", 0), histograms={"grad/all": tuple(counts)})
    shares = ev.exponent_shares(_evidence([record], "bf16"), "bf16", "grad/all")
    assert shares is not None
    assert shares.shape == (254,)
    assert shares[126] == 0.75  # biased exponent 127 is 2^0, entry k stands for 2^(k-126)
    assert shares[99] == 0.25


def test_trouble_names_every_run_that_is_not_whole() -> None:
    records = [make_record("fp32", s) for s in (0, 1, 2)]
    records += [
        diverged(make_record("bf16", 0), at_step=33),
        crashed(make_record("bf16", 1), sentence="It broke in module 'op'."),
    ]
    lines = ev.trouble(_evidence(records, "bf16"))
    assert lines == (
        "bf16 seed 0: diverged: the first non-finite loss is at step 33",
        "bf16 seed 1: crashed: It broke in module 'op'.",
        "bf16 seed 2: there is no run",
    )


def test_typical_is_the_median_after_warm_up() -> None:
    record = with_series(make_record(), step_time_s=[9.0] * 12 + [1.0, 2.0, math.nan, 3.0] * 27)
    assert ev.typical(record, "step_time_s") == 2.0
    assert ev.typical(record, "nothing") is None
