"""What the probes say about one candidate, as values that the report draws."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProbeFindings:
    """The same-point probe of one candidate: its arithmetic against FP32's at equal weights.

    Numbers may be NaN or infinite where the candidate's gradients are not finite; that fails. None:
    not defined here (see the attribute).

    Attributes:
        noise_ratio: nu: energy of the rounding error over that of minibatch noise; rounding acts
            like a batch of B / (1 + nu). None if the batches' gradients do not differ.
        rounding_bias: beta: energy of the mean rounding error over that of the true gradient (over
            that of the mean's noise where `weak_signal`).
        descent: eta: descent along FP32's gradient that the candidate's gradient achieves, 1 being
            all of it. None where `weak_signal`.
        retention: Least share, over the points, of FP32's update that is stored. None if no point
            updates anything.
        retention_step: Completed steps at that point.
        retention_kind: `trajectory`, or `final_rate`: with the planned final learning rate.
        retentions: At each of `steps`, with the learning rate that the run had there; None where
            nothing was updated.
        weak_signal: The mean gradient is not resolved from minibatch noise.
        failing: Codes of the thresholds that are exceeded, e.g. `PROBE_STAGNATION`.
        relative_error: sqrt(sum |e|^2 / sum |f|^2) over all parameters; reported, not tested.
        cosine: Of the candidate's and FP32's gradient; reported, not tested.
        sign_agreement: Share of gradient elements whose signs agree; reported, not tested.
        sqnr_db: Signal to rounding noise of the gradient in dB; reported, not tested.
        flushed_share: Share of FP32's non-zero gradient elements that are zero in the candidate.
        fp64_error: Relative error of the candidate's gradient against FP64.
        fp32_fp64_error: The same of FP32's own gradient.
        tests_final_rate: Whether an update with the planned final learning rate was measured.
        unseen: Whether the batches had not been trained on.
        same_trajectory: Whether the probe's FP32 run repeated the stored one bit for bit.
        steps: Completed steps at the trajectory's points.
        num_batches: K, per point.
        seed: Of the FP32 trajectory.
        notes: Sentences on what was left out.
    """

    noise_ratio: float | None
    rounding_bias: float | None
    descent: float | None
    retention: float | None
    retention_step: int | None = None
    retention_kind: str | None = None
    retentions: tuple[float | None, ...] = ()
    weak_signal: bool = False
    failing: tuple[str, ...] = ()
    relative_error: float | None = None
    cosine: float | None = None
    sign_agreement: float | None = None
    sqnr_db: float | None = None
    flushed_share: float | None = None
    fp64_error: float | None = None
    fp32_fp64_error: float | None = None
    tests_final_rate: bool = False
    unseen: bool = True
    same_trajectory: bool | None = None
    steps: tuple[int, ...] = ()
    num_batches: int = 0
    seed: int = 0
    notes: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        """Whether no threshold is exceeded."""
        return not self.failing


@dataclass(frozen=True, kw_only=True)
class ModuleFinding:
    """What all probes say about one module of one candidate, against FP32; None: not measured.

    Means over the seeds, and over the sampled steps of a run, unless said otherwise.

    Attributes:
        module: Dotted name; `(model)` for the root.
        kind: Class name; empty if unknown.
        suspicion: The strongest evidence against the module, in multiples of its threshold and at
            most `MAX_SUSPICION`; from 1 on a module is suspicious.
        evidence: That evidence as a phrase, e.g. `local forward error 0.41`; empty below 1.
        starts_here: Whether that evidence lies in the module's own arithmetic, so that harm starts
            here; False where it only shows in gradients or updates.
        local_forward_error: Relative error of the output given FP32's own input.
        integer_input_max: Largest whole number among the inputs, or cast inside, that the format
            rounded to another.
        gradient_error: Relative error of the gradient at equal weights.
        noise_ratio: The module's own nu.
        cosine: Of the gradients at equal weights.
        flushed_share: Share of FP32's non-zero gradient elements that are zero in the candidate.
        zero_grad_share: (candidate, FP32): gradient elements that are exactly zero, in the run.
        zero_output_share: (candidate, FP32): output elements that are exactly zero.
        lost_update_share: Non-zero updates that round away in the candidate's weights (`observed`)
            or would in BF16 weights.
        update_to_weight: (candidate, FP32): |update| / |weights|, L2.
        nonfinite: Ops whose output was not finite though their inputs were, e.g.
            `output of aten::pow in FP16`.
        formats: Format -> share of the module's calls that ran in it, from the audit.
    """

    module: str
    kind: str = ""
    suspicion: float = 0.0
    evidence: str = ""
    starts_here: bool = False
    local_forward_error: float | None = None
    integer_input_max: float | None = None
    gradient_error: float | None = None
    noise_ratio: float | None = None
    cosine: float | None = None
    flushed_share: float | None = None
    zero_grad_share: tuple[float | None, float | None] | None = None
    zero_output_share: tuple[float | None, float | None] | None = None
    lost_update_share: float | None = None
    update_to_weight: tuple[float | None, float | None] | None = None
    nonfinite: tuple[str, ...] = ()
    formats: tuple[tuple[str, float], ...] = ()


MAX_SUSPICION = 1e6


@dataclass(frozen=True, kw_only=True)
class LossScaleWindow:
    """Which loss scales would have been safe for a format, over the sampled steps; log2 of them.

    Attributes:
        fmt: The format: the candidate's own.
        low: Smallest scale safe at every step: at most 0.1 % of the elements flushed.
        high: Largest scale safe at every step: nothing overflows. Below `low` no scale is safe
            throughout.
        used: (smallest, largest) scale that the runs used, log2; (0, 0) without loss scaling.
        sentence: All of it in one sentence.
    """

    fmt: str
    low: float | None
    high: float | None
    used: tuple[float, float]
    sentence: str
