"""Warnings that name a module, and what the probes say of the run as a whole; none decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from harness.analysis.findings import Reason, warning
from harness.analysis.module_evidence import Sides
from harness.analysis.probe_findings import LossScaleWindow, ModuleFinding
from harness.analysis.probe_values import largest
from harness.analysis.rule import DecisionRule
from harness.analysis.suspects import (
    contains,
    dead_excess,
    error_outliers,
    largest_exact_integer,
    nonfinite_inside,
)
from harness.analysis.wording import listing, module_text, number, percent
from harness.numerics.formats import get_format
from harness.precision.module_names import ROOT
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord

_SHOWN = 3


def module_warnings(
    modules: Sequence[ModuleFinding], policy: PrecisionPolicy, rule: DecisionRule
) -> tuple[Reason, ...]:
    """Return the warnings that the evidence by module gives; thresholds are constants."""
    found = (
        _nonfinite_inside(modules, policy),
        _zero_outputs(modules, rule),
        _dead_gradients(modules, rule),
        _integers_rounded(modules, policy),
        _module_error(modules, policy, rule),
        _update_ratio(modules, rule),
    )
    return tuple(reason for reason in found if reason is not None)


def triage_of(runs: Sides) -> dict[str, Any] | None:
    """Return where trouble began in the first seed whose cause was found, else in any seed."""
    found = [record.probes["triage"] for record in runs.ours if record.probes.get("triage")]
    known = [x for x in found if x.get("cause") not in (None, "unknown")]
    return next(iter(known or found), None)


def triage_warning(triage: dict[str, Any] | None) -> Reason | None:
    """Return the triage's sentence as a warning; it stands under the gate's reason."""
    if triage is None or not triage.get("sentence"):
        return None
    sentence = str(triage["sentence"]).rstrip(".")
    return warning("TRIAGE", f"{sentence[:1].upper()}{sentence[1:]}.")


def memory_note(records: Sequence[RunRecord]) -> str | None:
    """Return the sentence on what most of the memory goes to, from the first run that has it."""
    notes = (record.probes.get("memory", {}).get("largest") for record in records)
    return next((str(note) for note in notes if note), None)


def attention_growth(
    runs: Sides, modules: Sequence[ModuleFinding], policy: PrecisionPolicy, rule: DecisionRule
) -> Reason | None:
    """Return a warning if attention logits are far larger than FP32's, or near the format's end.

    Large logits precede divergence in training of transformers (Wortsman et al. 2023,
    arXiv 2309.14322).
    """
    end = get_format(policy.compute_format).max_finite
    for module in modules:
        ours = largest(runs.ours, module.module, "attention_logit_max")
        theirs = largest(runs.theirs, module.module, "attention_logit_max")
        if ours is None or theirs is None or not theirs > 0:
            continue
        if ours > rule.attention_logit_factor * theirs or ours > end / 2 >= theirs:
            message = (
                f"Attention logits of `{module.module}` reach {number(ours)}; {number(theirs)} "
                "under FP32."
            )
            return warning("ATTENTION_LOGITS", message, ours, rule.attention_logit_factor * theirs)
    return None


def scale_outside_window(
    window: LossScaleWindow | None, share: float | None, rule: DecisionRule
) -> Reason | None:
    """Return a warning if the loss scale lay outside the safe window at most steps."""
    if window is None or share is None or not share > rule.scale_outside_share:
        return None
    message = f"{window.sentence[:-1]}: outside it at {percent(share)} of the sampled steps."
    return warning("LOSS_SCALE_OUTSIDE_WINDOW", message, share, rule.scale_outside_share)


def _nonfinite_inside(modules: Sequence[ModuleFinding], policy: PrecisionPolicy) -> Reason | None:
    found = [(m.module, ops) for m in modules if (ops := nonfinite_inside(m, policy))]
    if not found:
        return None
    name, ops = found[0]
    more = "" if len(found) == 1 else f"; likewise in {_names([n for n, _ in found[1:]])}"
    message = (
        f"Inside {module_text(name)} the {ops[0]} is not finite though its inputs are (FP32: "
        f"finite){more}."
    )
    return warning("NONFINITE_INSIDE", message, float(len(found)), 0.0)


def _zero_outputs(modules: Sequence[ModuleFinding], rule: DecisionRule) -> Reason | None:
    dead = [m for m in modules if dead_excess(m.zero_output_share, rule) is not None]
    if not dead:
        return None
    verb = "puts" if len(dead) == 1 else "put"
    message = f"{_names([m.module for m in dead])} {verb} out only zeros; under FP32 not so."
    return warning("ZERO_OUTPUTS", message, float(len(dead)), 0.0)


def _dead_gradients(modules: Sequence[ModuleFinding], rule: DecisionRule) -> Reason | None:
    dead = [
        m for m in modules if m.module != ROOT and dead_excess(m.zero_grad_share, rule) is not None
    ]
    if not dead:
        return None
    theirs = max((m.zero_grad_share or (None, None))[1] or 0.0 for m in dead)
    rest = "none" if theirs == 0 else f"at most {percent(theirs)} of them"
    message = f"Gradients of {_names([m.module for m in dead])} are all zero; FP32: {rest}."
    return warning("DEAD_GRADIENTS", message, float(len(dead)), 0.0)


def _integers_rounded(modules: Sequence[ModuleFinding], policy: PrecisionPolicy) -> Reason | None:
    exact = largest_exact_integer(policy.compute_format)
    found = [m for m in modules if (m.integer_input_max or 0.0) > exact]
    # A module inside another one sees the same numbers: the innermost is named.
    inner = [m for m in found if not any(contains(m.module, o.module) for o in found)]
    if not inner:
        return None
    named = inner[0]
    fmt = policy.compute_format.upper()
    message = (
        f"Whole numbers up to {named.integer_input_max:.0f} (positions, timesteps) reach "
        f"{module_text(named.module)}: those above {exact:.0f} are not exact in {fmt}, so "
        "neighbours become one."
    )
    return warning("INTEGERS_ROUNDED", message, named.integer_input_max, exact)


def _module_error(
    modules: Sequence[ModuleFinding], policy: PrecisionPolicy, rule: DecisionRule
) -> Reason | None:
    outliers = error_outliers(modules, policy, rule)
    if not outliers:
        return None
    worst = outliers[0]
    error = worst.local_forward_error
    assert error is not None
    others = [
        m.local_forward_error
        for m in modules
        if m.local_forward_error is not None
        and not any(m is o or contains(m.module, o.module) for o in outliers)
    ]
    rest = f"; the other modules' by at most {percent(max(others))}" if others else ""
    what = f"off by {percent(error)}{rest}" if math.isfinite(error) else "not finite"
    message = f"Given FP32's own input, the output of {module_text(worst.module)} is {what}."
    return warning("MODULE_ERROR", message, error, rule.module_error)


def _update_ratio(modules: Sequence[ModuleFinding], rule: DecisionRule) -> Reason | None:
    ratios = [
        ours / theirs
        for m in modules
        if (pair := m.update_to_weight) is not None
        and (ours := pair[0]) is not None
        and (theirs := pair[1])
    ]
    if not ratios:
        return None
    middle = sorted(ratios)[len(ratios) // 2]
    if 1 / rule.update_ratio_factor <= middle <= rule.update_ratio_factor:
        return None
    message = f"Updates, relative to the weights, are {number(middle)} times FP32's."
    return warning("UPDATE_RATIO", message, middle, rule.update_ratio_factor)


def _names(modules: Sequence[str]) -> str:
    shown = [module_text(name) for name in modules[:_SHOWN]]
    if len(modules) > _SHOWN:
        shown.append(f"{len(modules) - _SHOWN} more")
    return listing(shown)
