"""What the analyzer concludes, as values that the report draws and `decision.json` stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from harness.analysis.probe_findings import LossScaleWindow, ModuleFinding, ProbeFindings

if TYPE_CHECKING:
    from harness.analysis.seed_plan import SeedPlan

Outcome = Literal["accept", "reject", "inconclusive"]
Endpoint = Literal["train", "held_out"]
Stop = Literal["accepted", "rejected", "gate", "probe", "last_look", "unfinished", "went_on"]


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
        formula_margin: The margin that the formula gives, where the user set another.
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
    formula_margin: float | None = None


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A candidate-over-reference ratio with a two-sided 95 % interval (None: not estimated)."""

    value: float
    ci_low: float | None = None
    ci_high: float | None = None


@dataclass(frozen=True, kw_only=True)
class LookSummary:
    """What one look at a candidate's runs said, and whether it was the last.

    Attributes:
        index: Number of the look, from 1.
        of: Looks of the plan.
        pairs: Seeds that the look is over; fewer runs may exist where a gate ended it.
        alpha: Level of the look.
        settled: Whether the candidate needs no further runs because its verdict is known.
        stop: Why nothing was looked at after it: `accepted`, `rejected`, `gate`, `probe` (the loss
            passed, the probe did not, and more seeds do not answer that), `last_look` (undecided
            to the end), `unfinished` (runs of this look or of the next are not there yet);
            `went_on` for an earlier look that did not settle it.
        sentence: The same for people.
        intervals: Endpoint -> (low, mean, high) in margins: the ends that rejection and acceptance
            test. NaN where there is no interval.
    """

    index: int
    of: int
    pairs: int
    alpha: float
    settled: bool
    stop: Stop
    sentence: str
    intervals: dict[Endpoint, tuple[float, float, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Savings:
    """Runs that the plan made unnecessary, against running every policy on all its seeds.

    Attributes:
        runs: Runs not needed.
        full_runs: Runs of the full plan.
        seconds: Their time, from the wall time of the runs of the same policy; None without any.
        full_seconds: Time of the full plan, counted likewise.
        by_policy: Policy -> runs not needed; policies without are left out.
        sentence: The same for people.
    """

    runs: int
    full_runs: int
    seconds: float | None
    full_seconds: float | None
    by_policy: dict[str, int]
    sentence: str


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
        look: The look that the verdict is of; None for a control.
        looks: All looks up to it.
        settle: What would settle an undecided verdict besides what is said above, a sentence each.
        accepting_margins: Per endpoint, the margin above which these very runs would have been
            accepted: the upper end of the interval, in the endpoint's unit. Only where the test
            was undecided or rejected.
        scope: What this verdict speaks for, as a phrase: steps, batch, device, seeds.
        failure_rate_note: Why there is no `failure_rate_bound`, where there is none.
        min_detectable_harm_note: Why an endpoint has no `min_detectable_harm`, where one has none.
        fallback_of: The failed candidate that this policy was tried for automatically; None for a
            policy that the grid asked for.
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
    look: LookSummary | None = None
    looks: tuple[LookSummary, ...] = ()
    settle: tuple[str, ...] = ()
    accepting_margins: dict[Endpoint, float] = field(default_factory=dict)
    scope: str = ""
    failure_rate_note: str | None = None
    min_detectable_harm_note: str | None = None
    fallback_of: str | None = None

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
        failed: A sentence when a verdict could not be given because the reference is missing or
            crashed; the exit code is then 1. Verdicts that earlier looks had settled stand.
        profiles: Policy -> where the time of its steps goes: the fields of
            `runs.timing.record.Profile`.
        plan: When candidates were judged; None in findings without verdicts of an older make.
        savings: What stopping early saved; None in a fixed plan.
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
    plan: SeedPlan | None = None
    savings: Savings | None = None

    @property
    def failed_line(self) -> str | None:
        """`failed` as a line of its own; None where nothing failed."""
        if self.failed is None:
            return None
        return f"{'Incomplete' if self.verdicts else 'No verdict'}: {self.failed}"
