"""Chooses, per policy and device, which ops run in the device's own kernels and which by emulation.

The choice follows what the device can do, never a timing, so that the same machine always computes
the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from harness.numerics.formats import TF32, Format, get_format
from harness.precision.emulation.product_rounding import ProductRounding
from harness.precision.emulation.products import MATMULS, Directions, RoundedProducts
from harness.precision.emulation.sixteen_bit import (
    ATTENTION,
    CONVOLUTIONS,
    RECURRENT,
    native_bf16_matmul,
)
from harness.precision.kernels.registry import Override, exists
from harness.precision.op_lists import Action
from harness.precision.policy import PrecisionPolicy

BACKENDS = ("auto", "native", "emulated")
LOW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NOT_MODELLED = (
    "accumulation order and width inside a product and the roundings inside fused attention and "
    "recurrent kernels are not modelled"
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a policy computes on a device.

    Attributes:
        low: The 16-bit format, None for all others.
        native_tf32: Whether a GPU's own TF32 units are switched on.
        products: How the operands of products are rounded, for formats that no tensor has.
        emulated_ops: 16-bit ops computed in FP32 and rounded once.
        library_emulation: The device's own libraries compute the format in FP32.
        native_detail: One sentence for a run in which nothing was emulated.
    """

    native_detail: str
    low: torch.dtype | None = None
    native_tf32: bool = False
    products: ProductRounding | None = None
    emulated_ops: tuple[str, ...] = ()
    library_emulation: bool = False

    def kind(self, used: Collection[str] | None) -> Literal["native", "emulated"]:
        """Return `emulated` when any op was computed by rounding in FP32 storage.

        Args:
            used: The emulated ops that were called; None before anything ran, which answers what
                the plan allows for.
        """
        planned = bool(self.emulated_ops) or self.products is not None
        emulated = planned if used is None else bool(used)
        return "emulated" if emulated or self.library_emulation else "native"

    def detail(self, used: Collection[str] | None) -> str:
        """Return one sentence: what was emulated, and what that does not model."""
        if self.kind(used) == "native" or self.library_emulation:
            return self.native_detail
        if self.products is not None:
            return _products_detail(self.products)
        kinds = _kinds_of(self.emulated_ops if used is None else used)
        label = "BF16" if self.low is torch.bfloat16 else "FP16"
        return (
            f"{label} tensors throughout; {kinds} computed in FP32 from {label} operands and "
            f"rounded once, other ops native, following CUDA autocast's lists; {_NOT_MODELLED}."
        )


def _kinds_of(ops: Collection[str]) -> str:
    kinds = {
        "matmul": MATMULS,
        "convolution": CONVOLUTIONS,
        "attention": ATTENTION,
        "recurrent layers": RECURRENT,
    }
    found = [kind for kind, members in kinds.items() if set(members) & set(ops)]
    return " and ".join([", ".join(found[:-1]), found[-1]]) if len(found) > 1 else found[0]


def choose(policy: PrecisionPolicy, device: torch.device, backend: str) -> Plan:
    """Return how `policy` computes on `device`.

    Raises:
        ValueError: The backend is unknown, or cannot run this policy on this device.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not allowed; allowed: {', '.join(BACKENDS)}")
    if policy.compute_format == "fp32":
        return Plan(native_detail="FP32 with IEEE arithmetic in every backend.")
    if policy.compute_format == "tf32":
        return _choose_tf32(device, backend)
    if policy.compute_format not in LOW_DTYPES:
        return _choose_emulated(policy, backend)
    if device.type == "cpu":
        return _choose_on_cpu(policy, backend)
    return _choose_on_cuda(policy, device, backend)


def _choose_tf32(device: torch.device, backend: str) -> Plan:
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if backend == "native" and not has_tf32:
        raise ValueError(
            f"backend='native' is not allowed for tf32: this {device.type} device has no TF32; "
            "allowed: auto, emulated"
        )
    if has_tf32 and backend != "emulated":
        return Plan(native_detail="TF32 in the GPU's own kernels.", native_tf32=True)
    return Plan(native_detail=_NO_PRODUCT, products=ProductRounding(forward=TF32, backward=TF32))


def _choose_emulated(policy: PrecisionPolicy, backend: str) -> Plan:
    if backend == "native":
        raise ValueError(
            f"backend='native' is not allowed for {policy.compute_format}: the format is emulated "
            "on every device; allowed: auto, emulated"
        )
    rounding = ProductRounding(
        forward=get_format(policy.compute_format),
        backward=get_format(policy.gradient_format or policy.compute_format),
        rounding=policy.rounding,
        per_tensor=policy.operand_scaling == "per_tensor",
        results=policy.round_results,
    )
    return Plan(native_detail=_NO_PRODUCT, products=rounding)


_NO_PRODUCT = "FP32: no product was run."
_ROUNDING_WORDS = {"nearest": "to nearest", "toward_zero": "toward zero", "stochastic": "at random"}


def _products_detail(products: ProductRounding) -> str:
    if products == ProductRounding(forward=TF32, backward=TF32):
        return (
            "TF32 emulated: the operands of every product are rounded to 10 mantissa bits, "
            "forward and backward, and multiplied in FP32; accumulation order and width are "
            "not modelled."
        )
    forward, backward = products.forward, products.backward
    gradients = "" if backward == forward else f", gradients to {_label(backward)}"
    scaled = "scaled by the tensor's own maximum and " if products.per_tensor else ""
    results = " results are rounded likewise;" if products.results else ""
    return (
        f"{_label(forward, bits=False)} emulated: the operands of every product are {scaled}"
        f"rounded {_ROUNDING_WORDS[products.rounding]} to {_label(forward)}{gradients}, and "
        f"multiplied in FP32;{results} everything else is FP32. Accumulation order and width, "
        "delayed scaling and copies of weights in the format are not modelled."
    )


def _label(fmt: Format, *, bits: bool = True) -> str:
    name = fmt.name.upper().replace("_", " ") if fmt.name.startswith("fp8") else fmt.name
    if not bits:
        return name
    return f"{name} ({fmt.exponent_bits} exponent and {fmt.mantissa_bits} mantissa bits)"


def _choose_on_cpu(policy: PrecisionPolicy, backend: str) -> Plan:
    low, label = LOW_DTYPES[policy.compute_format], policy.compute_format.upper()
    emulated: tuple[str, ...] = (*MATMULS, *CONVOLUTIONS, *ATTENTION, *RECURRENT)
    if backend == "native":
        emulated = ()
    elif backend == "auto" and low is torch.bfloat16 and native_bf16_matmul():
        # Measured on a CPU with avx512_bf16: native BF16 matmul and convolution are about as fast
        # as FP32, native attention makes a small transformer's step twice as long.
        emulated = ATTENTION
    return Plan(
        native_detail=f"{label} in the CPU's own kernels, following CUDA autocast's lists.",
        low=low,
        emulated_ops=emulated,
    )


def _choose_on_cuda(policy: PrecisionPolicy, device: torch.device, backend: str) -> Plan:
    low, label = LOW_DTYPES[policy.compute_format], policy.compute_format.upper()
    if backend == "emulated":
        raise ValueError(
            f"backend='emulated' is not allowed for {policy.compute_format} on CUDA; "
            "allowed: auto, native"
        )
    # BF16 came with compute capability 8.0; before that CUDA's libraries convert to FP32 inside.
    if low is torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        return Plan(
            native_detail="BF16 on a GPU without BF16 units: CUDA's libraries compute it in FP32.",
            low=low,
            library_emulation=True,
        )
    return Plan(native_detail=f"{label} in the GPU's own kernels.", low=low)


def product_kernels(
    products: RoundedProducts | None,
    *,
    forward: Mapping[str, Action],
    backward: Mapping[str, Action],
    kept_ids: Collection[int] = frozenset(),
) -> list[Override]:
    """Return the kernels of TF32 and emulated formats, less the products kept in FP32.

    Args:
        products: What rounds; None where a GPU's own TF32 units compute.
        forward: What the policy changes in the op lists for the forward pass.
        backward: The same for the backward pass.
        kept_ids: `id` of the weights whose products stay in FP32.

    Raises:
        ValueError: Single ops are to stay in FP32 on a GPU's own TF32 units, whose switch knows
            no ops.
    """
    kept_forward, kept_backward = _kept(forward), _kept(backward)
    if products is not None:
        return products.overrides(
            {
                op: Directions(forward=op in kept_forward, backward=op in kept_backward)
                for op in (*kept_forward, *kept_backward)
            },
            kept_ids=kept_ids,
        )
    if kept_forward or kept_backward or kept_ids:
        raise ValueError(
            "policy.fp32_ops and policy.fp32_selectors cannot single out ops for a GPU's TF32 "
            "units; use policy.fp32_modules, or backend=emulated"
        )
    return []


def _kept(changes: Mapping[str, Action]) -> dict[str, None]:
    kept = [name for name, action in changes.items() if action is Action.FP32 and exists(name)]
    if any(action is Action.FP32_BETWEEN_ACTIVATIONS for action in changes.values()):
        kept += ["bmm", "baddbmm"]  # products with a weight go through mm and addmm
    return dict.fromkeys(kept)
