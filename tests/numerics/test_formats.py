import subprocess
import sys

import pytest
import torch

from harness.numerics.formats import FORMATS, FP16, get_format


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


def test_unknown_format_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown format 'fp12'; known: fp32, tf32, bf16"):
        get_format("fp12")


def test_formats_and_counts_need_no_torch():
    code = (
        "import sys; import harness.numerics.formats, harness.numerics.exponent_counts; "
        "import harness.precision.policy; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
