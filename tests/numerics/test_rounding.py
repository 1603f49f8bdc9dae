import pytest
import torch

from harness.numerics.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, get_format
from harness.numerics.rounding import overflows, round_mantissa, round_to_format

SIXTEEN_BIT = {"bf16": torch.bfloat16, "fp16": torch.float16}


def every_16bit_value(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def bits(values):
    return values.view(torch.int32)


def positive_finite(name):
    values = every_16bit_value(SIXTEEN_BIT[name]).float()
    return values[(values >= 0) & values.isfinite() & (bits(values) >= 0)].sort().values


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_every_16bit_value_is_left_alone(name):
    """Oracle: the 65536 values of the format itself."""
    values = every_16bit_value(SIXTEEN_BIT[name]).float()
    rounded = round_to_format(values, get_format(name))
    numbers = ~values.isnan()
    assert torch.equal(bits(rounded)[numbers], bits(values)[numbers])  # signs of zero included
    assert rounded.isnan().equal(values.isnan())


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_every_midpoint_goes_to_the_even_neighbour_and_the_next_value_up_goes_up(name):
    """Oracle: neighbours by bit pattern; midpoints are exact in FP32."""
    below, above = positive_finite(name)[:-1], positive_finite(name)[1:]
    middle = (below.double() + above.double()).div(2).float()
    below_is_even = torch.arange(len(below)) % 2 == 0  # consecutive bit patterns from +0
    even = torch.where(below_is_even, below, above)
    fmt = get_format(name)
    # The least BF16 subnormals have midpoints that FP32 holds as its own subnormals.
    for sign in (1.0, -1.0):
        assert torch.equal(round_to_format(sign * middle, fmt), sign * even)
        assert torch.equal(
            round_to_format(sign * torch.nextafter(middle, above), fmt), sign * above
        )
        assert torch.equal(
            round_to_format(sign * torch.nextafter(middle, below), fmt), sign * below
        )


def test_integer_rounding_agrees_with_the_bf16_cast_everywhere():
    """Oracle: the hardware cast, for the arithmetic that TF32 uses."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=generator)
    special = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7F800000, 0x7F7FFFFF, 1, 0, -1, -(2**31)])
    values = torch.cat([patterns, special]).to(torch.int32).view(torch.float32)
    expected, rounded = values.bfloat16().float(), round_mantissa(values, 7)
    numbers = ~values.isnan()
    assert torch.equal(bits(rounded)[numbers], bits(expected)[numbers])
    assert rounded.isnan().equal(values.isnan())


def test_tf32_matches_fp16_where_both_have_normal_values():
    """Oracle: TF32 keeps as many mantissa bits as FP16."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * 100
    values = values[values.abs() > FP16.min_normal]
    assert torch.equal(round_to_format(values, TF32), values.half().float())


def test_tf32_ties_carries_and_infinities():
    one = 1.0
    u = TF32.unit_roundoff
    values = torch.tensor([one + u, one + 3 * u, 2 - u / 2, 3.4e38, -torch.inf, torch.nan, -0.0])
    rounded = round_to_format(values, TF32)
    assert rounded[:3].tolist() == [1.0, 1 + 4 * u, 2.0]
    assert torch.isfinite(rounded[3])
    assert rounded[4] == -torch.inf
    assert rounded[5].isnan()
    assert torch.signbit(rounded[6])
    assert round_to_format(torch.tensor([3.4028235e38]), TF32).isinf().all()


def test_fp16_overflow_and_underflow_edges():
    values = torch.tensor([65519.996, 65520.0, -65520.0, 2.0**-25, 2.0**-25 * 1.0001, 2.0**-24])
    expected = [65504.0, torch.inf, -torch.inf, 0.0, 2.0**-24, 2.0**-24]
    assert round_to_format(values, FP16).tolist() == expected
    assert overflows(values, FP16).tolist() == [False, True, True, False, False, False]


def test_fp8_overflow_is_decided_before_the_cast():
    values = torch.tensor([448.0, 464.0, 464.1, 1e9, torch.inf, torch.nan])
    assert overflows(values, FP8_E4M3).tolist() == [False, False, True, True, False, False]
    rounded = round_to_format(values, FP8_E4M3)
    assert rounded[:2].tolist() == [448.0, 448.0]
    assert rounded[2:].isnan().all()
    assert round_to_format(torch.tensor([61439.0, 61440.0]), FP8_E5M2).tolist() == [
        57344.0,
        torch.inf,
    ]


@pytest.mark.parametrize("fmt", [FP8_E4M3, FP8_E5M2], ids=lambda f: f.name)
def test_every_fp8_midpoint_goes_to_the_even_neighbour(fmt):
    """Oracle: neighbours by bit pattern."""
    codes = torch.arange(128, dtype=torch.uint8).view(getattr(torch, fmt.storage_dtype)).float()
    codes = codes[codes.isfinite()]
    below, above = codes[:-1], codes[1:]
    even = torch.where(torch.arange(len(below)) % 2 == 0, below, above)
    assert torch.equal(round_to_format((below + above) / 2, fmt), even)


def test_fp32_is_the_identity_and_other_dtypes_are_refused():
    values = torch.randn(8)
    assert round_to_format(values, FP32) is values
    with pytest.raises(ValueError, match="takes float32"):
        round_to_format(values.double(), BF16)


@pytest.mark.parametrize("name", ["tf32", "bf16", "e8m3", "e5m3"])
@pytest.mark.parametrize("mode", ["nearest", "toward_zero"])
def test_a_sign_that_is_a_bit_of_the_tensor_is_seen(name, mode):
    values = torch.linspace(-3.0, 3.0, 101)
    negated = torch._neg_view(values)
    assert negated.is_neg()
    fmt = get_format(name)
    expected = round_to_format(-values, fmt, rounding=mode)
    assert torch.equal(round_to_format(negated, fmt, rounding=mode), expected)
