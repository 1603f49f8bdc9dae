import pytest
import torch

from harness.numerics.exponent_counts import scale_window
from harness.numerics.exponents import (
    _scattered,
    counts,
    exponent_histogram,
    exponent_histograms,
)
from harness.numerics.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32
from harness.numerics.rounding import round_to_format


def wide_values(n=50_000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.empty(n).uniform_(-40, 20, generator=generator)
    signs = torch.randint(0, 2, (n,), generator=generator) * 2.0 - 1
    return signs * torch.exp2(exponents)


def test_histogram_bins_are_the_biased_exponents():
    """Oracle: frexp."""
    values = wide_values()
    expected = torch.bincount(torch.frexp(values).exponent.long() - 1 + 127, minlength=256)
    assert torch.equal(exponent_histogram(values), expected)


def test_zeros_subnormals_and_nonfinite_have_their_bins():
    values = torch.tensor([0.0, -0.0, 1e-40, torch.inf, -torch.inf, torch.nan, 1.0])
    histogram = exponent_histogram(values)
    assert (histogram[0], histogram[255], histogram[127]) == (3, 3, 1)
    assert histogram.sum() == 7
    assert exponent_histogram(torch.empty(0)).sum() == 0


def odd_tensors():
    return [
        wide_values(1000),
        torch.empty(0, 3),
        torch.tensor([0.0, -0.0, 1e-40, 3.0]),
        wide_values(300_000, seed=1).view(300, 1000).t(),  # beyond the cache, not contiguous
        wide_values(70, seed=2).bfloat16(),
        wide_values(30, seed=3).half(),
        torch.tensor(1.0),
        wide_values(40, seed=4).double(),
        torch.relu(wide_values(300_001, seed=5)),
        torch.relu(wide_values(1_500_000, seed=6)),
        wide_values(30, seed=7).view(5, 6)[:, ::2],
    ]


def test_one_row_per_tensor():
    """Oracle: one histogram per tensor by frexp, and a comparison with zero."""
    histograms, zeros = exponent_histograms(odd_tensors())
    for tensor, histogram, count in zip(odd_tensors(), histograms, zeros, strict=True):
        wide = tensor.double().flatten()
        assert count == int((wide == 0).sum())
        ordinary = wide[(wide.abs() >= 2.0**-126) & wide.isfinite()]
        expected = torch.bincount(torch.frexp(ordinary).exponent.long() + 126, minlength=256)
        expected[255] = (~wide.isfinite()).sum()
        expected[0] = wide.numel() - expected.sum()
        assert torch.equal(histogram, expected)
    assert (histograms[2, 0], zeros[2]) == (3, 2)  # an FP32 subnormal is no zero


@pytest.mark.parametrize("chosen", [[0], [1], [2], [1, 1], [4, 0, 3], [8, 9], [2, 9, 2]])
def test_tensors_in_any_order(chosen):
    everything, _ = exponent_histograms(odd_tensors())
    tensors = [odd_tensors()[k] for k in chosen]
    assert torch.equal(exponent_histograms(tensors)[0], everything[chosen])


def test_the_scatter_for_a_gpu_without_a_kernel_counts_the_same():
    """Run here on the CPU; that it reads nothing back is tested on the meta device."""
    flat = [t.reshape(-1) for t in odd_tensors()]
    for ours, theirs in zip(_scattered(flat), exponent_histograms(flat), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fmt", [FP16, BF16, FP32], ids=lambda f: f.name)
@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**-6])
def test_counts_agree_with_rounding_every_element(fmt, scale):
    """Oracle: the cast itself. Thresholds are powers of two, so edges are kept out of the data."""
    values = wide_values()
    scaled = values * scale
    rounded = round_to_format(scaled, fmt)
    magnitude = rounded.abs()
    found = counts(exponent_histogram(values).tolist(), fmt, scale)
    assert found["flushed"] == int((rounded == 0).sum())
    assert found["nonzero"] == values.numel()
    # Values that round up to the least normal one, at most half a spacing below it, are counted.
    edge = (scaled.abs() < fmt.min_normal) & (magnitude == fmt.min_normal)
    subnormal = (magnitude > 0) & (magnitude < fmt.min_normal)
    assert found["subnormal"] == int((subnormal | edge).sum())
    # Between the rounding threshold and the next power of two: documented sliver.
    sliver = magnitude.isinf() & (
        scaled.abs() < 2 * 2.0 ** torch.tensor(fmt.max_finite).log2().floor()
    )
    assert found["overflow"] == int((magnitude.isinf() & ~sliver).sum())
    assert found["near_max"] >= found["overflow"]


def test_known_fp16_counts():
    values = torch.tensor([0.0, 2.0**-26, 2.0**-24, 2.0**-14, 1.0, 40000.0, 65536.0, torch.nan])
    found = counts(exponent_histogram(values).tolist(), FP16)
    assert found == {
        "flushed": 1,
        "subnormal": 1,
        "near_max": 2,
        "overflow": 1,
        "nonzero": 6,
        "nonfinite": 1,
    }
    scaled = counts(exponent_histogram(values).tolist(), FP16, scale=65536.0)
    assert (scaled["flushed"], scaled["subnormal"], scaled["overflow"]) == (0, 0, 3)


@pytest.mark.parametrize("fmt", [FP16, BF16, TF32, FP8_E4M3, FP8_E5M2], ids=lambda f: f.name)
def test_the_window_is_where_counts_change(fmt):
    """Oracle: `counts` at every power of two."""
    histogram = exponent_histogram(wide_values() * 2.0**-10).tolist()
    low, high = scale_window(histogram, fmt)
    for power in range(-120, 121):
        found = counts(histogram, fmt, 2.0**power)
        assert (found["flushed"] <= 0.001 * found["nonzero"]) == (power >= low), power
        assert (found["overflow"] == 0) == (power <= high), power


def test_windows_by_hand():
    one = exponent_histogram(torch.ones(1)).tolist()
    # 2^-25 is the first power of two that FP16 rounds to zero in `counts`' terms; 2^15 its last.
    assert scale_window(one, FP16) == (-25, 15)
    two = exponent_histogram(torch.tensor([1.0, 2.0**-60])).tolist()
    low, high = scale_window(two, FP16)
    assert low > high  # no scale suits both
    assert scale_window(two, FP16, max_flushed_share=0.5) == (-25, 15)
    assert scale_window(exponent_histogram(torch.zeros(3)).tolist(), FP16) is None
    assert scale_window(exponent_histogram(torch.tensor([1.0, torch.inf])).tolist(), FP16) is None
    with pytest.raises(ValueError, match="255 bins"):
        scale_window([0] * 255, FP16)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="at least one tensor"):
        exponent_histograms([])
    with pytest.raises(ValueError, match="takes float32"):
        exponent_histogram(torch.ones(3, dtype=torch.float16))
    with pytest.raises(ValueError, match="255 bins"):
        counts([0] * 255, FP16)
    with pytest.raises(ValueError, match=r"scale=0\.0"):
        counts([0] * 256, FP16, scale=0.0)
