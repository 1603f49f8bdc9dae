"""What the analyzer concludes, as values that the report draws and `decision.json` stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from harness.analysis.probe_findings import LossScaleWindow, ModuleFinding, ProbeFindings

Outcome = Literal["accept", "reject", "inconclusive"]
Endpoint = Literal["train", "held_out"]


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One reason code with its evidence.

    Attributes:
        code: Upper-case code, e.g. `NONINFERIOR` (list: `analysis.codes`).
        message: One plain sentence with the numbers in it.
        value: The measured number, if there is one.
        threshold: What it was compared with.
        kind: `gate` and `test` decide the outcome; `warning` and `caveat` never do.
    """

    code: str
    message: str
    value: float | None = None
    threshold: float | None = None
    kind: Literal["gate", "test", "warning", "caveat"] = "test"


def warning(
    code: str, message: str, value: float | None = None, threshold: float | None = None
) -> Reason:
    """Return a reason of kind `warning`."""
    return Reason(code=code, message=message, value=value, threshold=threshold, kind="warning")


def caveat(
    code: str, message: str, value: float | None = None, threshold: float | None = None
) -> Reason:
    """Return a reason of kind `caveat`."""
    return Reason(code=code, message=message, value=value, threshold=threshold, kind="caveat")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The paired loss difference (candidate minus reference) of one endpoint.

    All of `mean_difference`, `sd`, `ci_low`, `ci_high`, `margin`, `progress`, `reference_loss` are
    in `unit`. Fields that need two pairs are None with one.

    Attributes:
        differences: One per seed, in the order of `Verdict.seeds_used`.
        sd: Sample standard deviation (n-1) of `differences`.
        ci_low: Rejection end: one-sided `1 - alpha_reject`.
        ci_high: Acceptance end: one-sided `1 - alpha_accept`.
        confidence: `1 - alpha_accept - alpha_reject`: coverage of the drawn interval.
        margin: The non-inferiority margin delta.
        margin_term: Which term set it: `progress`, `loss`, `seed_sd`, `cap` or `user`.
        progress: D, what FP32 learned over the run.
        reference_loss: L, FP32's tail loss on this endpoint.
    """

    unit: str
    mean_difference: float
    sd: float | None
    ci_low: float | None
    ci_high: float | None
    confidence: float | None
    alpha_accept: float
    alpha_reject: float
    num_pairs: int
    margin: float
    margin_term: str
    progress: float
    reference_loss: float
    differences: tuple[float, ...]
    p_accept: float | None = None
    p_reject: float | None = None


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A candidate-over-reference ratio with a two-sided 95 % interval (None: not estimated)."""

    value: float
    ci_low: float | None = None
    ci_high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one candidate of one model.

    Attributes:
        step_time_ratio: Candidate over reference; None when not measured (see `speed_note`).
        peak_memory_ratio: Candidate over reference; None when not measured.
        extra_seeds: Further seeds that should settle an inconclusive verdict; None when it is
            settled or no number of seeds up to the limit would.
        extra_seeds_reason: `UNRESOLVABLE_AT_NMAX`, or the code of a failing probe (more seeds of
            loss do not answer it), when `extra_seeds` is None for that reason.
        settle_command: The exact command that adds the seeds and reuses the rest; None otherwise.
        lean: `acceptable`, `unacceptable` or `unclear`: where the mean points.
        failure_rate_bound: Largest failure rate that zero failures in n seeds leaves open at 95 %.
        min_detectable_harm: Per endpoint, the harm this run could have rejected with 80 % power,
            in the endpoint's unit.
        lag_steps: Training-loss difference over FP32's tail slope; display only.
        p_accept_holm: Holm-adjusted over the model's candidates.
        is_control: The noise-matched FP32 control: drawn and used for CHAOS statements, never
            given an outcome that counts and never chosen.
        diagnostics: Name -> (candidate, reference) of the numbers that explain a verdict, e.g.
            `zero_grad_share`, `moved_weight_share`, `nonfinite_buffers`, `skipped_steps`,
            `grad_norm_ratio`.
        probe: The same-point probe; None where there is no measurement (PROBE_MISSING says why).
        modules: What the probes say by module, the most suspicious first; empty without probes.
        guilty_module: The module that the evidence names where the candidate is not accepted.
        guilty_sentence: Why, in one sentence: "look at `dist`: ...".
        triage: `RunRecord.probes["triage"]` of the first seed in trouble: where it began.
        loss_scale_window: Which loss scales would have been safe in the candidate's format.
        memory_note: What most of the memory goes to, in one sentence.
    """

    policy: str
    policy_content: dict[str, Any]
    description: str
    outcome: Outcome
    execution: Literal["native", "emulated"]
    reasons: tuple[Reason, ...]
    estimates: dict[Endpoint, Estimate]
    seeds_used: tuple[int, ...]
    seeds_dropped: tuple[int, ...] = ()
    step_time_ratio: Ratio | None = None
    speed_note: str = "not measured"
    peak_memory_ratio: Ratio | None = None
    extra_seeds: int | None = None
    extra_seeds_reason: str | None = None
    settle_command: str | None = None
    lean: Literal["acceptable", "unacceptable", "unclear"] = "unclear"
    failure_rate_bound: float | None = None
    min_detectable_harm: dict[Endpoint, float] = field(default_factory=dict)
    lag_steps: float | None = None
    p_accept: float | None = None
    p_accept_holm: float | None = None
    p_reject: float | None = None
    is_control: bool = False
    diagnostics: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    probe: ProbeFindings | None = None
    modules: tuple[ModuleFinding, ...] = ()
    guilty_module: str | None = None
    guilty_sentence: str | None = None
    triage: dict[str, Any] | None = None
    loss_scale_window: LossScaleWindow | None = None
    memory_note: str | None = None

    @property
    def main_reason(self) -> Reason:
        """The first reason: the one that decided."""
        return self.reasons[0]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which policy to train in, and why.

    Attributes:
        policy: None only when the reference cannot judge or too few seeds leave every candidate
            inconclusive; else a policy name, the reference if nothing else is accepted.
        sentence: The recommendation in one sentence.
        speed_basis: `measured` or `assumed, not measured`.
        reasons: Further sentences: runner-up, faster undecided candidates, the fallback that a
            rejection points to.
    """

    policy: str | None
    sentence: str
    speed_basis: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelFindings:
    """Everything concluded about one model in one sweep.

    Attributes:
        verdicts: One per candidate and control of the grid, in grid order.
        scope: What was tested, as a phrase: "the first 300 steps of this schedule, batch 64, on
            cpu; tf32 emulated".
        not_tested: Sentences on what this says nothing about.
        caveats: Reasons of kind `caveat` and `warning` that concern the whole model.
        failed: A sentence when no verdict could be given (reference missing or crashed); the
            exit code is then 1.
        profiles: Policy -> where the time of its steps goes: the fields of
            `runs.timing.record.Profile`.
    """

    sweep_id: str
    workload: str
    device: str
    reference_policy: str
    seeds: tuple[int, ...]
    num_steps: int
    tail_start: int
    verdicts: tuple[Verdict, ...]
    choice: Choice
    scope: str
    not_tested: tuple[str, ...] = ()
    caveats: tuple[Reason, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    rule: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
