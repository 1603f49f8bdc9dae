"""Rounding to any format, in every way, against casts, other libraries and a table of values."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.numerics.formats import FP8_E4M3, FP16, ROUNDINGS, TF32, get_format
from harness.numerics.rounding import round_to_format

CASTS = {
    "fp16": torch.float16,
    "e5m10": torch.float16,
    "bf16": torch.bfloat16,
    "e8m7": torch.bfloat16,
    "fp8_e5m2": torch.float8_e5m2,
    "e5m2": torch.float8_e5m2,
}
# Formats of ml_dtypes, and up to which magnitude they share the values of ours: those without
# infinity or NaN go on where ours end.
LIBRARY = {
    "e3m4": (ml_dtypes.float8_e3m4, math.inf),
    "e4m3": (ml_dtypes.float8_e4m3, math.inf),
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, math.inf),
    "fp8_e5m2": (ml_dtypes.float8_e5m2, math.inf),
    "e8m7": (ml_dtypes.bfloat16, math.inf),
    "e2m3": (ml_dtypes.float6_e2m3fn, 3.75),
    "e3m2": (ml_dtypes.float6_e3m2fn, 14.0),
    "e2m1": (ml_dtypes.float4_e2m1fn, 3.0),
}
BY_BITS = ("e2m1", "e3m4", "e4m3", "e5m3", "e6m9", "e7m4", "e8m3", "e8m10", "e4m11")


def table(name):
    """Return the non-negative finite values of a format, in FP64, decoded code by code."""
    fmt = get_format(name)
    fractions = 2**fmt.mantissa_bits
    bias = 2 ** (fmt.exponent_bits - 1) - 1
    last = 2**fmt.exponent_bits - (1 if fmt.has_infinity else 0)
    codes = np.arange(last * fractions)
    exponent, fraction = codes // fractions, codes % fractions
    values = np.where(
        exponent == 0,
        np.ldexp(fraction / fractions, 1 - bias),
        np.ldexp(1 + fraction / fractions, exponent - bias),
    )
    return values if fmt.has_infinity else values[:-1]  # the last code of E4M3 is NaN


def neighbourhood(name):
    """Return the format's values, the midpoints, one FP32 ulp to both sides of each; both signs."""
    values = table(name)
    middle = (values[:-1] + values[1:]) / 2
    beyond = [get_format(name).overflow_threshold]
    points = torch.tensor(np.concatenate([values, middle, beyond]), dtype=torch.float32)
    infinity = torch.tensor(torch.inf)
    around = [points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)]
    return torch.cat([*around, *(-x for x in around)])


def random_patterns(n=200_000, seed=0):
    """Return FP32 values with random bits: every exponent, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32)
    special = [0, -(2**31), 1, 0x7F800000, 0x7F7FFFFF, 0x00800000, 0x007FFFFF, 0x7FC00000]
    return torch.cat([bits, torch.tensor(special, dtype=torch.int32)]).view(torch.float32)


def ordinary(n=100_000, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * torch.logspace(-9, 5, n)


def assert_same_bits(found, wanted):
    numbers = ~wanted.isnan()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[numbers].view(torch.int32), wanted[numbers].view(torch.int32))


@pytest.mark.parametrize("name", CASTS)
def test_every_value_every_midpoint_and_one_ulp_beside_agree_with_the_cast(name):
    """Oracle: torch's casts."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for values in (
        neighbourhood(name),
        every.view(torch.float16).float(),
        every.view(torch.bfloat16).float(),
        random_patterns(),
        ordinary(),
    ):
        assert_same_bits(round_to_format(values, get_format(name)), values.to(CASTS[name]).float())


@pytest.mark.parametrize("name", LIBRARY)
def test_random_and_adversarial_values_agree_with_ml_dtypes(name):
    """Oracle: the casts of ml_dtypes."""
    dtype, up_to = LIBRARY[name]
    values = torch.cat([neighbourhood(name), random_patterns(), ordinary()])
    values = values[(values.abs() <= up_to) | (math.isinf(up_to) & values.isnan())]
    assert len(values) > 10_000
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(values.numpy().astype(dtype).astype(np.float32))
    assert_same_bits(round_to_format(values, get_format(name)), wanted)


@pytest.mark.parametrize("name", ["e5m3", "e4m11", "e6m9", "e7m12", "e8m7", "e8m10"])
def test_values_in_range_agree_with_pychop(name):
    """Oracle: pychop, which gives 0 for some values just beyond a format's range."""
    pychop = pytest.importorskip("pychop", reason="pychop is not installed")
    pychop.backend("torch")
    fmt = get_format(name)
    values = torch.cat([random_patterns(50_000), ordinary(50_000)])
    values = values[values.abs() <= fmt.max_finite]
    for rounding, code in (("nearest", 1), ("toward_zero", 4)):
        chop = pychop.Chop(exp_bits=fmt.exponent_bits, sig_bits=fmt.mantissa_bits, rmode=code)
        found = round_to_format(values, fmt, rounding=rounding)
        assert torch.equal(found, chop(values.double()).float())


@pytest.mark.parametrize("name", [*BY_BITS, "fp8_e4m3"])
def test_nearest_and_toward_zero_agree_with_the_table(name):
    """Oracle: neighbours looked up in the table of the format's values."""
    grid, fmt = table(name), get_format(name)
    values = torch.cat([neighbourhood(name), random_patterns(50_000), ordinary(50_000)])
    values = values[values.isfinite()]
    magnitude = values.double().abs().numpy()
    index = np.searchsorted(grid, magnitude, side="right") - 1
    below, above = grid[index], grid[np.minimum(index + 1, len(grid) - 1)]
    cut = round_to_format(values, fmt, rounding="toward_zero")
    assert torch.equal(cut.abs().double(), torch.from_numpy(below))
    assert torch.equal(cut.signbit(), values.signbit())
    with np.errstate(invalid="ignore"):
        up = (magnitude - below > above - magnitude) | (
            (magnitude - below == above - magnitude) & (index % 2 == 1)
        )
    wanted = np.where(up, above, below)
    past = magnitude >= fmt.overflow_threshold
    if not fmt.has_infinity:
        past = magnitude > fmt.overflow_threshold
    wanted = np.where(past, np.inf if fmt.has_infinity else np.nan, wanted)
    found = round_to_format(values, fmt)
    assert_same_bits(found, torch.from_numpy(wanted).float().copysign(values))


def test_ways_to_overflow():
    big, infinity = torch.tensor([1e9, -1e9]), torch.tensor([torch.inf, -torch.inf])
    assert round_to_format(big, FP16).tolist() == infinity.tolist()
    assert round_to_format(big, FP16, rounding="toward_zero").tolist() == [65504.0, -65504.0]
    assert round_to_format(infinity, FP16, rounding="toward_zero").tolist() == infinity.tolist()
    assert round_to_format(infinity, FP8_E4M3, rounding="toward_zero").isnan().all()
    for rounding, fmt in itertools.product(ROUNDINGS, (FP16, FP8_E4M3, TF32, get_format("e5m3"))):
        for values in (torch.tensor([3.3e38, -3.3e38]), infinity):
            limited = round_to_format(values, fmt, rounding=rounding, saturate=True)
            if fmt is not TF32 or values is infinity:
                assert limited.tolist() == [fmt.max_finite, -fmt.max_finite]
            assert limited.isfinite().all()
        assert round_to_format(torch.tensor([torch.nan]), fmt, saturate=True).isnan().all()


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e4m3", "e8m10", "e5m3", "e2m1"])
def test_stochastic_rounding_is_unbiased(name):
    """The mean of n draws is within 5 standard errors of the value, among subnormals too.

    180 means at fixed seeds: one beyond 5 standard errors has a chance of 1e-4.
    """
    fmt, n = get_format(name), 20_000
    grid = table(name)
    generator = torch.Generator().manual_seed(3)
    for low, share in itertools.product(
        (0, 1, 2 ** (fmt.mantissa_bits - 1) or 1, len(grid) // 2, len(grid) - 2),
        (0.01, 0.3, 0.5, 0.77, 0.999),
    ):
        below, above = grid[low], grid[low + 1]
        value = torch.tensor(below + share * (above - below), dtype=torch.float32)
        if not below < float(value) < above:
            continue  # FP32 has no value that far inside: BF16's least subnormals are exempt
        chance = (float(value) - below) / (above - below)
        for sign in (1, -1):
            drawn = round_to_format(
                (sign * value).expand(n).contiguous(),
                fmt,
                rounding="stochastic",
                generator=generator,
            )
            up = (drawn.double().abs() == above).double().mean()
            assert ((drawn.double().abs() == above) | (drawn.double().abs() == below)).all()
            assert drawn.signbit().all() == (sign < 0)
            standard_error = math.sqrt(chance * (1 - chance) / n)
            assert abs(float(up) - chance) < 5 * standard_error


def test_every_share_of_three_dropped_bits_is_its_chance():
    """With k eighths of the spacing above a value, the chance of going up is k / 8."""
    fmt, n = get_format("e8m20"), 40_000
    generator = torch.Generator().manual_seed(4)
    for k in range(8):
        values = torch.full((n,), 1 + k * 2.0**-23)
        drawn = round_to_format(values, fmt, rounding="stochastic", generator=generator)
        up = (drawn > 1).double().mean().item()
        # 5 standard errors, at most 5 * 0.5 / 200
        assert abs(up - k / 8) <= 5 * math.sqrt(k / 8 * (1 - k / 8) / n)


@pytest.mark.parametrize("name", ["bf16", "tf32", "fp16", "fp8_e4m3", "fp8_e5m2", "e5m3"])
def test_stochastic_rounding_leaves_representable_values_alone(name):
    fmt = get_format(name)
    values = torch.tensor(table(name), dtype=torch.float32)
    values = torch.cat([values, -values, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    if not fmt.has_infinity:
        values[values.isinf()] = 1.0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        drawn = round_to_format(values, fmt, rounding="stochastic", generator=generator)
        assert_same_bits(drawn, values)


def test_stochastic_rounding_keeps_small_updates_that_nearest_loses():
    """1000 steps of an eighth of the spacing at 1: nearest stays at 1, the expectation is 1.98."""
    fmt = get_format("bf16")
    step = 2.0**-7 / 8
    nearest, drawn = torch.ones(512), torch.ones(512)
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        nearest = round_to_format(nearest + step, fmt)
        drawn = round_to_format(drawn + step, fmt, rounding="stochastic", generator=generator)
    assert (nearest == 1.0).all()
    # Each step's variance is at most (1/8)(7/8) spacings squared: 10.5 spacings after 1000 steps,
    # 0.46 for the mean of 512; 5 of these.
    assert abs(drawn.mean().item() - (1 + 1000 * step)) < 5 * 0.46 * 2.0**-7


def test_stochastic_rounding_beyond_the_largest_value_is_rounding_to_nearest():
    values = torch.tensor([65510.0, 65519.0, 65520.0, 65535.0, -65535.0])
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        drawn = round_to_format(values, FP16, rounding="stochastic", generator=generator)
        assert drawn.tolist() == [65504.0, 65504.0, torch.inf, torch.inf, -torch.inf]


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3"])
def test_the_generator_alone_decides_what_is_drawn(name):
    values, fmt = torch.randn(1000), get_format(name)

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        return round_to_format(values, fmt, rounding="stochastic", generator=generator)

    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ["fp16", "bf16", "tf32", "fp8_e4m3", "e5m3", "fp32"])
def test_no_value_is_waited_for_and_shapes_stay(name, rounding):
    """On the meta device nothing has a value: code that asks for one raises."""
    fmt = get_format(name)
    for shape in ((), (0,), (2, 0, 3), (3, 2)):
        on_meta = round_to_format(torch.empty(shape, device="meta"), fmt, rounding=rounding)
        assert on_meta.shape == round_to_format(torch.ones(shape), fmt, rounding=rounding).shape
    transposed = torch.randn(3, 4).t()
    if rounding != "stochastic":
        found = round_to_format(transposed, fmt, rounding=rounding)
        assert torch.equal(found, round_to_format(transposed.contiguous(), fmt, rounding=rounding))


def test_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match="rounding='up' is not allowed; allowed: nearest, toward"):
        round_to_format(torch.ones(1), FP16, rounding="up")


any_format = st.builds("e{}m{}".format, st.integers(2, 8), st.integers(1, 22))
any_value = st.floats(width=32, allow_nan=False)


@settings(deadline=None, max_examples=200)
@given(any_format, st.sampled_from(ROUNDINGS), st.lists(any_value, min_size=1, max_size=20))
def test_rounding_is_idempotent_and_odd(name, rounding, values):
    fmt, x = get_format(name), torch.tensor(values, dtype=torch.float32)

    def rounded(x):
        generator = torch.Generator().manual_seed(0)
        return round_to_format(x, fmt, rounding=rounding, generator=generator)

    once = rounded(x)
    assert_same_bits(rounded(once), once)
    assert_same_bits(rounded(-x), -once)
    assert torch.equal(once.signbit(), x.signbit())


@settings(deadline=None, max_examples=200)
@given(
    any_format,
    st.sampled_from(("nearest", "toward_zero")),
    st.lists(any_value, min_size=2, max_size=20),
)
def test_rounding_keeps_order_and_stays_within_a_unit(name, rounding, values):
    fmt = get_format(name)
    x = torch.tensor(sorted(values), dtype=torch.float32)
    y = round_to_format(x, fmt, rounding=rounding)
    assert (y[1:] >= y[:-1]).all()
    inside = x.abs() <= fmt.max_finite
    error = (y.double() - x.double()).abs()[inside]
    factor = 1 if rounding == "nearest" else 2
    limit = factor * fmt.unit_roundoff * x.double().abs()[inside]
    assert (error <= torch.maximum(limit, torch.tensor(factor * fmt.min_subnormal / 2))).all()
