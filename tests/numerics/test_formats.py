import subprocess
import sys

import ml_dtypes
import pytest
import torch

from harness.numerics.formats import BF16, FORMATS, FP16, get_format, is_format


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.name != "tf32"], ids=str)
def test_formats_agree_with_torch_finfo(fmt):
    """Oracle: torch.finfo."""
    info = torch.finfo(getattr(torch, fmt.storage_dtype))
    assert fmt.max_finite == info.max
    assert fmt.min_normal == info.smallest_normal
    assert fmt.unit_roundoff == info.eps / 2
    assert fmt.min_subnormal == info.smallest_normal * info.eps
    assert fmt.exponent_bits + fmt.mantissa_bits + 1 == info.bits


def test_tf32_is_the_exponent_of_fp32_with_the_mantissa_of_fp16():
    tf32 = get_format("tf32")
    assert (tf32.exponent_bits, tf32.mantissa_bits) == (8, 10)
    assert tf32.unit_roundoff == FP16.unit_roundoff == 2.0**-11
    assert tf32.min_subnormal == 2.0**-136


def test_fp16_overflows_from_65520():
    assert FP16.overflow_threshold == 65520.0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("e3m4", ml_dtypes.float8_e3m4),
        ("e4m3", ml_dtypes.float8_e4m3),
        ("e5m2", ml_dtypes.float8_e5m2),
        ("e8m7", ml_dtypes.bfloat16),
    ],
)
def test_formats_by_bits_agree_with_ml_dtypes(name, dtype):
    """Oracle: ml_dtypes.finfo, for its IEEE-like formats."""
    fmt, info = get_format(name), ml_dtypes.finfo(dtype)
    assert fmt.max_finite == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert fmt.unit_roundoff == float(info.eps) / 2
    assert fmt.storage_dtype == "float32"


def test_formats_by_bits_have_the_values_of_the_named_ones():
    for name, other in (("e5m10", FP16), ("e8m7", BF16), ("e5m2", get_format("fp8_e5m2"))):
        fmt = get_format(name)
        assert fmt.max_finite == other.max_finite
        assert fmt.min_subnormal == other.min_subnormal
        assert fmt.overflow_threshold == other.overflow_threshold


def test_a_format_by_bits_is_one_object():
    assert get_format("e5m3") is get_format("e5m3")


@pytest.mark.parametrize("name", ["e1m3", "e9m3", "e5m0", "e5m23", "e05m3", "E5M3", "e5m3x", ""])
def test_bits_beyond_fp32_are_no_format(name):
    assert not is_format(name)
    with pytest.raises(ValueError, match="e<exponent bits 2-8>m<mantissa bits 1-22>"):
        get_format(name)


def test_unknown_format_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown format 'fp12'; known: fp32, tf32, bf16"):
        get_format("fp12")


def test_formats_and_counts_need_no_torch():
    code = (
        "import sys; import harness.numerics.formats, harness.numerics.exponent_counts; "
        "import harness.precision.policy; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
