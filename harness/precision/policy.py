"""What "train in BF16 with softmax in FP32" means, as a value; how it is made true is `execution`.

Torch-free, so that records, analysis and reports can carry policies without importing torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.numerics.formats import ROUNDINGS, Rounding, is_format

OperandScaling = Literal["none", "per_tensor"]
ParamFormat = Literal["fp32", "bf16", "fp16"]
WeightRounding = Literal["nearest", "stochastic"]
LossScaleKind = Literal["none", "static", "dynamic", "deepspeed"]
Selector = Literal["normalization", "attention_scores", "output_head", "loss"]

# Formats that policies can ask a device for; any other one (`fp8_e4m3`, `e5m3`) is emulated in FP32
# storage by rounding what products read.
DEVICE_FORMATS = ("fp32", "tf32", "bf16", "fp16")
FP8_FORMATS = ("fp8_e4m3", "fp8_e5m2")
OPERAND_SCALINGS: tuple[OperandScaling, ...] = ("none", "per_tensor")
WEIGHT_ROUNDINGS: tuple[WeightRounding, ...] = ("nearest", "stochastic")
PARAM_FORMATS: tuple[ParamFormat, ...] = ("fp32", "bf16", "fp16")
LOSS_SCALE_KINDS: tuple[LossScaleKind, ...] = ("none", "static", "dynamic", "deepspeed")
SELECTORS: tuple[Selector, ...] = ("normalization", "attention_scores", "output_head", "loss")

_DYNAMIC = ("kind", "init_scale", "growth_factor", "backoff_factor", "growth_interval")
_USED_BY_KIND: Mapping[LossScaleKind, tuple[str, ...]] = {
    "none": ("kind",),
    "static": ("kind", "init_scale"),
    "dynamic": _DYNAMIC,
    "deepspeed": (*_DYNAMIC, "hysteresis", "min_scale", "consecutive_hysteresis"),
}


@dataclass(frozen=True, kw_only=True)
class LossScaleSettings:
    """How the loss is scaled before backward.

    `dynamic` follows `torch.amp.GradScaler`: halve and skip the step on overflow, double after
    `growth_interval` clean steps. `deepspeed` adds `hysteresis` (that many overflows before the
    scale falls; with `consecutive_hysteresis` a clean step refills them) and `min_scale`, as
    DeepSpeed's dynamic scaler does. A field that the kind does not use must keep its default.
    """

    kind: LossScaleKind = "none"
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 0.0
    consecutive_hysteresis: bool = False

    def __post_init__(self) -> None:
        _require(self.kind in LOSS_SCALE_KINDS, "loss_scale.kind", self.kind, LOSS_SCALE_KINDS)
        _require(self.init_scale > 0, "loss_scale.init_scale", self.init_scale, "> 0")
        _require(self.growth_factor > 1, "loss_scale.growth_factor", self.growth_factor, "> 1")
        _require(
            0 < self.backoff_factor < 1,
            "loss_scale.backoff_factor",
            self.backoff_factor,
            "in (0, 1)",
        )
        _require(
            self.growth_interval >= 1, "loss_scale.growth_interval", self.growth_interval, ">= 1"
        )
        _require(self.hysteresis >= 1, "loss_scale.hysteresis", self.hysteresis, ">= 1")
        _require(self.min_scale >= 0, "loss_scale.min_scale", self.min_scale, ">= 0")
        for unused in dataclasses.fields(self):
            value = getattr(self, unused.name)
            if unused.name not in _USED_BY_KIND[self.kind] and value != unused.default:
                raise ValueError(
                    f"loss_scale.{unused.name}={value!r} has no effect with loss_scale.kind="
                    f"{self.kind!r}; allowed: {unused.default!r}"
                )


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """A precision policy: which formats a training run uses, and where it stays in FP32.

    Attributes:
        name: Label in tables and reports; not part of the policy's identity.
        description: One sentence for the report.
        compute_format: Format of the ops that CUDA autocast lowers (matmul, linear, convolution,
            ...). `fp32` means no autocast at all; `tf32` keeps FP32 storage and rounds operands.
            Any other format (`fp8_e4m3`, `fp8_e5m2`, or `e<exponent bits>m<mantissa bits>`) is
            emulated: FP32 storage, what products read is rounded, everything else stays FP32.
        gradient_format: Format that an emulated compute format's products read gradients in;
            empty: the compute format itself.
        rounding: How an emulated compute format rounds.
        operand_scaling: `per_tensor` multiplies an operand of an emulated format before rounding
            so that its largest magnitude becomes the format's largest finite value, and divides
            afterwards.
        round_results: Whether an emulated format also rounds what products return.
        weight_rounding: How an update is rounded into 16-bit weights: `nearest` lets the optimizer
            work in that format; `stochastic` computes the update (and keeps optimizer state) in
            FP32 and rounds the new weight up or down at random, without bias.
        param_format: Storage of weights, floating buffers, gradients and so of optimizer state.
        fp32_ops: Op or op-family names forced to FP32. A name that is unknown is an error. Like
            `fp32_modules` and `low_precision_ops`, an entry may start with `forward:` or
            `backward:` and then concerns that direction only.
        fp32_modules: Module patterns forced to FP32 (see `precision.modules`). A pattern that
            matches no module is an error.
        fp32_selectors: Structural selectors that mean something on any model and may match
            nothing: `normalization`, `attention_scores`, `output_head`, `loss`.
        low_precision_ops: Op or op-family names that run in `compute_format` although CUDA
            autocast keeps them in FP32; `("all",)` drops autocast's FP32 lists but for the losses,
            as in a hand-cast model.
        loss_scale: See `LossScaleSettings`.
        perturbation: Initial FP32 weights are multiplied by `1 + perturbation * U(-1, 1)` before
            training: the noise-matched control uses 2^-8.
        clip_before_unscale: The planted fault of clipping scaled gradients; for tests and cases.
    """

    name: str
    description: str = ""
    compute_format: str = "fp32"
    gradient_format: str = ""
    rounding: Rounding = "nearest"
    operand_scaling: OperandScaling = "none"
    round_results: bool = False
    param_format: ParamFormat = "fp32"
    weight_rounding: WeightRounding = "nearest"
    fp32_ops: tuple[str, ...] = ()
    fp32_modules: tuple[str, ...] = ()
    fp32_selectors: tuple[Selector, ...] = ()
    low_precision_ops: tuple[str, ...] = ()
    loss_scale: LossScaleSettings = field(default_factory=LossScaleSettings)
    perturbation: float = 0.0
    clip_before_unscale: bool = False

    def __post_init__(self) -> None:
        _require(bool(self.name), "policy.name", self.name, "a non-empty name")
        _require(
            self.compute_format in DEVICE_FORMATS or is_emulated_format(self.compute_format),
            "policy.compute_format",
            self.compute_format,
            _FORMATS_IN_WORDS,
        )
        _require(
            self.param_format in PARAM_FORMATS,
            "policy.param_format",
            self.param_format,
            PARAM_FORMATS,
        )
        self._check_rounding()
        for selector in self.fp32_selectors:
            _require(selector in SELECTORS, "policy.fp32_selectors", selector, SELECTORS)
        _require(self.perturbation >= 0, "policy.perturbation", self.perturbation, ">= 0")

    def _check_rounding(self) -> None:
        """Refuse values that are not allowed, and fields without an effect."""
        gradient_format_known = not self.gradient_format or is_format(self.gradient_format)
        for name, holds, allowed in (
            ("gradient_format", gradient_format_known, ("an empty string", *_FORMATS_IN_WORDS)),
            ("rounding", self.rounding in ROUNDINGS, ROUNDINGS),
            ("operand_scaling", self.operand_scaling in OPERAND_SCALINGS, OPERAND_SCALINGS),
            ("weight_rounding", self.weight_rounding in WEIGHT_ROUNDINGS, WEIGHT_ROUNDINGS),
        ):
            _require(holds, f"policy.{name}", getattr(self, name), allowed)
        if not is_emulated_format(self.compute_format):
            other = f"policy.compute_format={self.compute_format!r}"
            for name in ("gradient_format", "rounding", "operand_scaling", "round_results"):
                self._require_default(name, other)
        if self.param_format == "fp32":
            self._require_default("weight_rounding", "policy.param_format='fp32'")
        if self.compute_format == "tf32" or is_emulated_format(self.compute_format):
            self._require_default(
                "low_precision_ops", f"policy.compute_format={self.compute_format!r}"
            )

    def _require_default(self, name: str, other: str) -> None:
        value = getattr(self, name)
        default = next(f.default for f in dataclasses.fields(self) if f.name == name)
        if value != default:
            raise ValueError(
                f"policy.{name}={value!r} has no effect with {other}; allowed: {default!r}"
            )

    @property
    def is_control(self) -> bool:
        """Whether this is FP32 with perturbed initial weights: drawn, never judged or chosen."""
        return self.perturbation > 0 and self.computes_in_fp32

    @property
    def is_reference(self) -> bool:
        """Whether this is plain FP32, what every candidate is compared with."""
        plain = self.loss_scale.kind == "none" and not self.clip_before_unscale
        return self.perturbation == 0 and plain and self.computes_in_fp32

    @property
    def computes_in_fp32(self) -> bool:
        """Whether nothing in this policy is below FP32."""
        return self.compute_format == "fp32" and self.param_format == "fp32"

    def content(self) -> dict[str, Any]:
        """Return everything that can change numbers: all fields but `name` and `description`."""
        data = dataclasses.asdict(self)
        del data["name"], data["description"]
        return json.loads(json.dumps(data))  # type: ignore[no-any-return]

    def content_hash(self) -> str:
        """Return 16 hex digits that agree exactly when two policies have the same content."""
        text = json.dumps(self.content(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> PrecisionPolicy:
        """Build a policy from plain data (YAML or a stored record).

        Raises:
            ValueError: A key is unknown or a value is not allowed; the message names the key.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(
                f"policy has no field {unknown[0]!r}; it has {', '.join(sorted(known))}"
            )
        values: dict[str, Any] = dict(data)
        for key in ("fp32_ops", "fp32_modules", "fp32_selectors", "low_precision_ops"):
            values[key] = _names(key, values.get(key, ()))
        scale = values.get("loss_scale", {})
        if not isinstance(scale, LossScaleSettings):
            values["loss_scale"] = LossScaleSettings(**dict(scale))
        return cls(**values)


_FORMATS_IN_WORDS = (*DEVICE_FORMATS, *FP8_FORMATS, "e<exponent bits 2-8>m<mantissa bits 1-22>")


def is_emulated_format(name: str) -> bool:
    """Return whether a compute format exists in FP32 storage only: FP8, or any `e<E>m<M>`."""
    return name not in DEVICE_FORMATS and is_format(name)


def _names(key: str, value: Any) -> tuple[str, ...]:
    """Return one name or several as a tuple of names."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) and n for n in names):
        raise ValueError(f"policy.{key}={value!r} is not allowed; allowed: a list of names")
    return tuple(names)


def _require(holds: bool, key: str, value: object, allowed: object) -> None:
    if not holds:
        wanted = ", ".join(map(str, allowed)) if isinstance(allowed, tuple) else allowed
        raise ValueError(f"{key}={value!r} is not allowed; allowed: {wanted}")
