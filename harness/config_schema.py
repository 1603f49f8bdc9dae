"""The schema of the configuration: which keys exist, their types and their defaults.

Hydra checks names and types against it; what a value may be is checked where it is used
(`config.RunConfig`, `PrecisionPolicy`, `DecisionRule`). Needs neither Hydra nor OmegaConf.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# OmegaConf's mark of a value that must be given.
MISSING: Any = "???"


@dataclass
class LossScaleConf:
    """Schema of `policy.loss_scale`; ranges are checked by `LossScaleSettings`."""

    kind: str = "none"
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 0.0
    consecutive_hysteresis: bool = False


@dataclass
class PolicyConf:
    """Schema of `policy`; meaning and ranges are those of `PrecisionPolicy`."""

    name: str = MISSING
    description: str = ""
    compute_format: str = "fp32"
    gradient_format: str = ""
    rounding: str = "nearest"
    operand_scaling: str = "none"
    round_results: bool = False
    param_format: str = "fp32"
    weight_rounding: str = "nearest"
    # A list of names or a single one (`low_precision_ops: all`), which no schema can say.
    fp32_ops: Any = field(default_factory=list)
    fp32_modules: Any = field(default_factory=list)
    fp32_selectors: Any = field(default_factory=list)
    low_precision_ops: Any = field(default_factory=list)
    loss_scale: LossScaleConf = field(default_factory=LossScaleConf)
    perturbation: float = 0.0
    clip_before_unscale: bool = False


@dataclass
class TrainConf:
    """Schema of `train`: what every run of the sweep shares."""

    steps: int | None = None
    backend: str = "auto"
    tail_evaluations: int = 5


@dataclass
class EveryConf:
    """Schema of a probe that looks at every n-th step (and the last one); null switches it off."""

    every: int | None = None


@dataclass
class ExponentsConf:
    """Schema of `probes.exponents`: histograms by module and kind of tensor.

    `weight_gradients_every` concerns the weight gradients, which cost least; `every` all kinds.
    """

    every: int | None = None
    weight_gradients_every: int | None = None


@dataclass
class GradientErrorConf:
    """Schema of `probes.gradient_error`: the same-point probe, a stage after the runs."""

    enabled: bool = True
    points: list[float] = field(default_factory=lambda: [0.10, 0.33, 0.67, 0.97])
    batches: int = 16
    fp64_max_parameters: int = 300_000


@dataclass
class EnabledConf:
    """Schema of a probe that is on or off."""

    enabled: bool = True


@dataclass
class ProfileConf:
    """Schema of `probes.profile`: steps under torch's profiler after the timing stage; 0: off.

    `nvtx` names the steps and phases of whole runs, for tools that watch from outside.
    """

    steps: int = 3
    nvtx: bool = False


@dataclass
class ProbesConf:
    """Schema of `probes`; the choices are `conf/probes/*.yaml`."""

    exponents: ExponentsConf = field(default_factory=ExponentsConf)
    norms: EveryConf = field(default_factory=EveryConf)
    lost_updates: EveryConf = field(default_factory=EveryConf)
    memory: EnabledConf = field(default_factory=EnabledConf)
    triage: EnabledConf = field(default_factory=EnabledConf)
    gradient_error: GradientErrorConf = field(default_factory=GradientErrorConf)
    profile: ProfileConf = field(default_factory=ProfileConf)


@dataclass
class ThroughputConf:
    """Schema of `throughput`: the timing stage after the runs."""

    phase: bool = True
    blocks: int = 8
    steps_per_block: int = 5
    warmup_steps: int = 3


@dataclass
class TrackingConf:
    """Schema of `tracking`."""

    enabled: bool = True
    uri: str | None = None


@dataclass
class LaunchConf:
    """Schema of `launch`."""

    threads: int | None = None


@dataclass
class HarnessConf:
    """Schema of the whole configuration."""

    action: str = "run"
    device: str = "auto"
    output_dir: str = "."
    sweep_id: str | None = None
    reference: str = "fp32"
    seed: int = 0
    dry_run: bool = False
    workload: Any = MISSING
    policy: PolicyConf = MISSING
    train: TrainConf = field(default_factory=TrainConf)
    probes: ProbesConf = field(default_factory=ProbesConf)
    decision: Any = MISSING
    throughput: ThroughputConf = field(default_factory=ThroughputConf)
    tracking: TrackingConf = field(default_factory=TrackingConf)
    launch: LaunchConf = field(default_factory=LaunchConf)
