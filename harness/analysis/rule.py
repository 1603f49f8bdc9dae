"""The constants of the decision rule, read strictly from plain data."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.analysis.methods import METHODS
from harness.analysis.user_margin import parse_margin
from harness.analysis.wording import number_below

_Range = tuple[str, Callable[[float], bool]]

_SHARE: _Range = ("in (0, 1)", lambda x: 0 < x < 1)
_POSITIVE: _Range = ("> 0", lambda x: x > 0)
_NOT_NEGATIVE: _Range = (">= 0", lambda x: x >= 0)
_ABOVE_ONE: _Range = ("> 1", lambda x: x > 1)
_AT_LEAST_ONE: _Range = (">= 1", lambda x: x >= 1)
_SPECIAL_RANGES: dict[str, _Range] = {
    "alpha": ("in (0, 0.5)", lambda x: 0 < x < 0.5),
    "power": ("in [0.5, 1)", lambda x: 0.5 <= x < 1),
    "min_pairs": (">= 2", lambda x: x >= 2),
    "tail_divisor": _AT_LEAST_ONE,
    "min_tail_steps": _AT_LEAST_ONE,
    "head_fraction": _SHARE,
    "head_min_steps": _AT_LEAST_ONE,
    "ema_decay": _SHARE,
    "divergence_window": _SHARE,
    "relapse_share": _SHARE,
    "trend_level": _SHARE,
    "trend_fraction": ("in (0, 1]", lambda x: 0 < x <= 1),
    "skips_warmup": _SHARE,
    "spike_window": (">= 3", lambda x: x >= 3),
    "unstable_seed_divisor": _AT_LEAST_ONE,
    "max_consecutive_skips": _AT_LEAST_ONE,
    "grad_norm_factor": _ABOVE_ONE,
    "lr_floor_factor": _ABOVE_ONE,
    "margin_seed_sd": _NOT_NEGATIVE,
    "margin_loss": _POSITIVE,
    "speed_tie": _NOT_NEGATIVE,
    "spike_excess": _NOT_NEGATIVE,
    "min_held_out_items": _NOT_NEGATIVE,
    "probe_retention": _SHARE,
    "module_zero_share": _SHARE,
    "scale_outside_share": _SHARE,
    "update_ratio_factor": _ABOVE_ONE,
    "module_error_factor": _ABOVE_ONE,
    "module_error_roundoffs": _ABOVE_ONE,
    "attention_logit_factor": _ABOVE_ONE,
    "concentration": _ABOVE_ONE,
    "seeds": _AT_LEAST_ONE,
    "looks": _AT_LEAST_ONE,
    "look_alphas": ("in (0, 0.5)", lambda x: 0 < x < 0.5),
}
# Nobody trains more pairs than this, and a slip of the keyboard would expand into as many runs.
_MOST_PAIRS = 1000
_SEQUENCES: dict[str, str] = {"looks": "[3,5,8]", "look_alphas": "[0.02,0.015,0.015]"}


@dataclass(frozen=True, kw_only=True)
class DecisionRule:
    """Every constant of the rule; meanings are the comments of `conf/decision/default.yaml`.

    The defaults were calibrated on paired CPU trainings of small models. A margin term, a gate
    threshold and a warning threshold are all relative to what the reference learned, its loss or
    its seed spread: losses near 1e-7 are judged like losses near 1.
    """

    alpha: float = 0.05
    power: float = 0.8
    familywise: bool = False
    min_pairs: int = 3
    max_pairs: int = 8
    forecast_limit: int = 50

    seeds: int | None = None
    looks: tuple[int, ...] = (3, 5, 8)
    look_alphas: tuple[float, ...] = (0.02, 0.015, 0.015)
    always_valid: bool = False
    method: str = "non_inferiority"
    try_fallback: bool = False

    tail_divisor: int = 3
    min_tail_steps: int = 30
    head_fraction: float = 0.02
    head_min_steps: int = 5

    margin_progress: float = 0.01
    margin_loss: float = 0.02
    margin_seed_sd: float = 0.5
    margin_cap: float = 0.05
    margin: float | str | None = None
    near_zero_loss: float = 0.05

    unstable_seed_divisor: int = 3
    relapse_share: float = 0.75
    relapse_min_gain: float = 0.1
    not_learning_se: float = 3.0
    not_learning_share: float = 0.02

    min_loss_scale: float = 1.0
    max_consecutive_skips: int = 20
    ema_decay: float = 0.9
    divergence_window: float = 0.1
    divergence_margins: float = 10.0
    divergence_progress: float = 0.25
    gross_margins: float = 3.0
    gross_margins_single: float = 10.0
    end_early: bool = True
    hopeless_progress: float = 2.0

    step0_tolerance_16bit: float = 2.0**-5
    step0_tolerance_tf32: float = 2.0**-9
    trend_level: float = 0.05
    trend_fraction: float = 0.5
    spike_window: int = 31
    spike_mads: float = 6.0
    spike_excess: int = 3
    spike_factor: float = 3.0
    skips_warmup: float = 0.1
    max_skip_share: float = 0.02
    disagree_margins: float = 0.5
    chaos_factor: float = 0.7
    control_margins: float = 3.0
    lr_floor_factor: float = 2.0
    min_held_out_items: int = 2048
    zero_grad_excess: float = 0.25
    unmoved_weight_excess: float = 0.25
    lost_update_share: float = 0.25
    grad_norm_factor: float = 2.0
    flushed_share: float = 0.1

    probe_noise_ratio: float = 0.10
    probe_rounding_bias: float = 0.05
    probe_descent: float = 0.10
    probe_retention: float = 0.90
    probe_weak_signal: float = 0.5

    module_zero_share: float = 0.99
    update_ratio_factor: float = 10.0
    module_error: float = 0.05
    module_error_roundoffs: float = 6.0
    module_error_factor: float = 10.0
    attention_logit_factor: float = 2.0
    scale_outside_share: float = 0.5
    concentration: float = 3.0

    min_speedup: float = 1.02
    speed_tie: float = 0.03

    def __post_init__(self) -> None:
        for rule_field in dataclasses.fields(self):
            _check(rule_field.name, getattr(self, rule_field.name), str(rule_field.type))
        parse_margin(self.margin)
        _check_looks(self)
        if self.method not in METHODS:
            raise ValueError(
                f"decision.method={self.method!r} is not allowed; allowed: {', '.join(METHODS)}"
            )
        if self.max_pairs < self.min_pairs:
            raise ValueError(
                f"decision.max_pairs={self.max_pairs} is not allowed; "
                f"allowed: >= decision.min_pairs={self.min_pairs}"
            )

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> DecisionRule:
        """Build the rule from plain data; keys that are absent keep their defaults.

        Raises:
            ValueError: A key is unknown, or a value has the wrong type or range; the message
                names `decision.<key>`, the value and what is allowed.
        """
        known = [rule_field.name for rule_field in dataclasses.fields(cls)]
        for key in data:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f"; did you mean decision.{close[0]}?" if close else ""
                raise ValueError(f"decision.{key} does not exist{hint}")
        values: dict[str, Any] = {
            key: tuple(value) if key in _SEQUENCES and isinstance(value, list) else value
            for key, value in data.items()
        }
        return cls(**values)

    def as_mapping(self) -> dict[str, Any]:
        """Return every constant by name, as plain data (sequences as lists)."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }


def _check_looks(rule: DecisionRule) -> None:
    looks = list(rule.looks)
    increasing = all(a < b for a, b in itertools.pairwise(looks))
    if not looks or not increasing or looks[0] < rule.min_pairs or looks[-1] > _MOST_PAIRS:
        raise ValueError(
            f"decision.looks={looks} is not allowed; allowed: increasing numbers of pairs, "
            f"the first >= decision.min_pairs={rule.min_pairs}, the last <= {_MOST_PAIRS}"
        )
    if len(rule.look_alphas) != len(looks):
        each = number_below(rule.alpha / len(looks))
        raise ValueError(
            f"decision.look_alphas={list(rule.look_alphas)} is not allowed; allowed: one level "
            f"for each of decision.looks={looks}, e.g. "
            f"decision.look_alphas=[{','.join([each] * len(looks))}]"
        )


def _check(name: str, value: Any, annotation: str) -> None:
    if (value is None and "None" in annotation) or name == "margin":
        return
    if name in _SEQUENCES:
        if not isinstance(value, tuple):
            raise ValueError(
                f"decision.{name}={value!r} is not allowed; allowed: a list like {_SEQUENCES[name]}"
            )
        for item in value:
            _check_item(name, item, annotation.removeprefix("tuple[").split(",")[0])
        return
    _check_item(name, value, annotation)


def _check_item(name: str, value: Any, annotation: str) -> None:
    wanted, types = _expected(annotation)
    if not isinstance(value, types) or isinstance(value, bool) != (annotation == "bool"):
        raise ValueError(f"decision.{name}={value!r} is not allowed; allowed: {wanted}")
    if isinstance(value, (bool, str)):
        return
    text, holds = _SPECIAL_RANGES.get(name, _POSITIVE)
    if not (math.isfinite(value) and holds(value)):
        raise ValueError(f"decision.{name}={value!r} is not allowed; allowed: {wanted} {text}")


def _expected(annotation: str) -> tuple[str, Any]:
    if annotation == "bool":
        return "true or false", (bool,)
    if annotation == "str":
        return "a name", (str,)
    if annotation.startswith("int"):
        return "a whole number", (int,)
    return "a number", (int, float)
