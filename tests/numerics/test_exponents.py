import pytest
import torch

from harness.numerics.exponents import counts, exponent_histogram
from harness.numerics.formats import BF16, FP16, FP32
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


def test_histogram_on_a_device_without_bincount_sync_is_the_same():
    """The scatter used on CUDA gives the same counts; run here on the CPU."""
    values = wide_values(1000)
    bits = (values.view(torch.int32) >> 23) & 255
    scattered = torch.zeros(256, dtype=torch.int64).scatter_add_(
        0, bits.long(), torch.ones(1000, dtype=torch.int64)
    )
    assert torch.equal(scattered, exponent_histogram(values))


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


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="takes float32"):
        exponent_histogram(torch.ones(3, dtype=torch.float16))
    with pytest.raises(ValueError, match="255 bins"):
        counts([0] * 255, FP16)
    with pytest.raises(ValueError, match=r"scale=0\.0"):
        counts([0] * 256, FP16, scale=0.0)
