"""Warnings and caveats on the whole model: its reference, its control, the shape of its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from harness.analysis.endpoints import Level, tail_start
from harness.analysis.findings import Endpoint, Estimate, Reason, Verdict, caveat, warning
from harness.analysis.module_warnings import triage_warning
from harness.analysis.probe_findings import ProbeFindings
from harness.analysis.rule import DecisionRule
from harness.analysis.user_margin import parse_margin
from harness.analysis.wording import (
    ENDPOINT_NAMES,
    in_margins,
    in_words,
    listing,
    number,
    percent,
)
from harness.runs.record import RunRecord


def model_cautions(
    references: Sequence[RunRecord], levels: Mapping[Endpoint, Level], rule: DecisionRule
) -> tuple[Reason, ...]:
    """Return warnings and caveats that concern the whole model, from its stable FP32 runs."""
    if not references:
        return ()
    found = [_near_zero(endpoint, level, rule) for endpoint, level in levels.items()]
    found += [_held_out(references, levels, rule), _tail_short(references[0], rule)]
    found += [_lr_floor(references[0], rule), _not_fp32(references[0])]
    found += [_user_margin(levels, rule)]
    return tuple(reason for reason in found if reason is not None)


def control_caution(
    estimates: Mapping[Endpoint, Estimate], *, control: str, rule: DecisionRule
) -> Reason | None:
    """Return CHAOTIC_MODEL if the noise-matched FP32 control is itself far off FP32."""
    for endpoint, e in estimates.items():
        size = abs(in_margins(e.mean_difference, e.margin))
        if size > rule.control_margins:
            message = (
                f"FP32 from slightly moved weights ({control}) differs from FP32 in "
                f"{ENDPOINT_NAMES[endpoint]} by {in_words(e.mean_difference, e.margin)}: this "
                "model is too chaotic for so few steps and seeds; trust no verdict near the margin."
            )
            return warning("CHAOTIC_MODEL", message, size, rule.control_margins)
    return None


def all_probed(verdicts: Sequence[Verdict], holds: Callable[[ProbeFindings], bool]) -> bool:
    """Return whether a condition holds of the probe of every candidate that may be trained in.

    A rejected candidate needs no probe; with rejected ones alone, one that was probed is enough.
    """
    candidates = [v for v in verdicts if not v.is_control]
    wanted = [v for v in candidates if v.outcome != "reject"]
    if wanted:
        return all(v.probe is not None and holds(v.probe) for v in wanted)
    return any(v.probe is not None and holds(v.probe) for v in candidates)


def reference_triage(unstable: Sequence[RunRecord]) -> tuple[Reason, ...]:
    """Return where the trouble of an unstable FP32 run began, from the first one that knows."""
    found = (triage_warning(record.probes.get("triage")) for record in unstable)
    reason = next((reason for reason in found if reason is not None), None)
    if reason is None:
        return ()
    return (warning("TRIAGE", f"In the FP32 reference itself: {reason.message}"),)


def _user_margin(levels: Mapping[Endpoint, Level], rule: DecisionRule) -> Reason | None:
    """Say that the margin is the user's, beside what the formula gives, and where it is not used.

    A size in one unit leaves an endpoint in another to the formula, as does a share of nothing.
    """
    user = parse_margin(rule.margin)
    if user is None:
        return None
    texts: dict[str, list[str]] = {}
    for endpoint, level in levels.items():
        own = level.margin_term == "user"
        formula = f"{number(level.formula_margin)} {level.unit}"
        text = f"{number(level.margin)} {level.unit} (formula: {formula})"
        texts.setdefault(text if own else f"the formula's {formula}", []).append(
            ENDPOINT_NAMES[endpoint]
        )
    if all(level.margin_term == "user" for level in levels.values()) and len(texts) == 1:
        return caveat("USER_MARGIN", f"The margin is yours: {next(iter(texts))}.")
    lines = "; ".join(f"{listing(names)}: {text}" for text, names in texts.items())
    return caveat("USER_MARGIN", f"decision.margin={user.text} is yours. {_capital(lines)}.")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _near_zero(endpoint: Endpoint, level: Level, rule: DecisionRule) -> Reason | None:
    # A margin of one's own, or of what was learned alone, does not shrink with the loss.
    if level.margin_term in ("user", "progress"):
        return None
    limit = rule.near_zero_loss * level.progress
    if not (level.progress > 0 and 0 <= level.tail < limit):
        return None
    message = (
        f"FP32's {ENDPOINT_NAMES[endpoint]} ends near zero ({number(level.tail)} after a drop of "
        f"{number(level.progress)}), so the margin rests on seed luck: use label smoothing or "
        "harder data."
    )
    return warning("LOSS_NEAR_ZERO", message, level.tail, limit)


def _held_out(
    references: Sequence[RunRecord], levels: Mapping[Endpoint, Level], rule: DecisionRule
) -> Reason | None:
    if "held_out" not in levels:
        message = "There is no held-out set: the verdicts rest on the training loss alone."
        return caveat("HELDOUT_MISSING", message)
    counts = [r.held_out.num_items for r in references if r.held_out is not None]
    items = [count for count in counts if count is not None]
    if not items or min(items) >= rule.min_held_out_items:
        return None
    message = (
        f"The held-out set has {min(items)} predicted items; below {rule.min_held_out_items} its "
        "loss is a noisy endpoint."
    )
    return warning("HELDOUT_SMALL", message, float(min(items)), float(rule.min_held_out_items))


def _tail_short(record: RunRecord, rule: DecisionRule) -> Reason | None:
    steps = record.num_steps - tail_start(record.num_steps, rule)
    if steps >= rule.min_tail_steps:
        return None
    message = f"The endpoints average only {steps} steps; {rule.min_tail_steps} or more are wanted."
    return warning("TAIL_SHORT", message, float(steps), float(rule.min_tail_steps))


def _lr_floor(record: RunRecord, rule: DecisionRule) -> Reason | None:
    rates = [x for x in record.series.get("learning_rate", ()) if math.isfinite(x)]
    if not rates or not max(rates) > 0 or rates[-1] <= max(rates) / rule.lr_floor_factor:
        return None
    share = rates[-1] / max(rates)
    message = (
        f"The learning rate ends at {percent(share)} of its peak: harm that only small updates "
        "show (weights that stop moving) was not tested."
    )
    return caveat("LR_FLOOR_NOT_TESTED", message, share, 1 / rule.lr_floor_factor)


def _not_fp32(record: RunRecord) -> Reason | None:
    lowered = sorted(op for op, formats in record.audit.items() if {"bf16", "fp16"} & set(formats))
    if not lowered:
        return None
    shown = ", ".join(lowered[:4]) + (", ..." if len(lowered) > 4 else "")
    message = (
        f"The model's own code computes in 16 bits even in the FP32 runs ({shown}): what that "
        "costs is in the reference too and stays unseen."
    )
    return warning("REFERENCE_NOT_FP32", message, float(len(lowered)), 0.0)
