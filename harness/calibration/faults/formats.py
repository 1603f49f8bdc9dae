"""Faults that are a format: too few bits, truncation, ranges that do not fit, no FP32 list."""

from __future__ import annotations

from harness.calibration.faults.fault import Fault, Plant


def _mantissa(dose: str) -> Plant:
    return Plant(policy={"compute_format": f"e8m{dose}"})


def _truncation(dose: str) -> Plant:
    fields = {
        "compute_format": f"e8m{dose}",
        "rounding": "toward_zero",
        "round_results": True,
    }
    return Plant(policy=fields)


def _fp8_unscaled(dose: str) -> Plant:
    forward, _, backward = dose.partition("_")
    fields = {"compute_format": f"fp8_{forward}", "gradient_format": f"fp8_{backward}"}
    return Plant(policy=fields)


def _low_gradients(dose: str) -> Plant:
    return Plant(policy={"compute_format": "e8m7", "gradient_format": dose})


def _all_ops(dose: str) -> Plant:
    return Plant(policy={"compute_format": dose, "low_precision_ops": ("all",)})


FAULTS = (
    Fault(
        name="few_mantissa_bits",
        sentence="Products read operands with one to four mantissa bits, as in a format narrower "
        "than BF16 without further care.",
        dose="mantissa bits",
        plant=_mantissa,
    ),
    Fault(
        name="truncation",
        sentence="FP32 is cut to fewer bits by dropping the low ones instead of rounding, as in a "
        "cast that shifts the bit pattern: every value shrinks.",
        source="tenstorrent/tt-metal#55935",
        dose="mantissa bits",
        plant=_truncation,
    ),
    Fault(
        name="fp8_unscaled",
        sentence="Products in FP8 without a scale per tensor: what is small underflows.",
        dose="forward format and gradient format",
        plant=_fp8_unscaled,
    ),
    Fault(
        name="low_format_gradients",
        sentence="The forward pass is in BF16, but backward's products read gradients in a format "
        "too small for them.",
        dose="the format that products read gradients in",
        plant=_low_gradients,
    ),
    Fault(
        name="all_ops",
        sentence="Every op but the loss in 16 bits: the model's code casts by hand and passes "
        "autocast's FP32 list by; FP16 has no loss scaling.",
        source="NVIDIA/apex#240",
        dose="the format",
        plant=_all_ops,
    ),
)
