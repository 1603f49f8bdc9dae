"""Plain words, a few each, for codes, diagnostics, margins and emulation."""

from __future__ import annotations

import re

from harness.analysis.findings import Estimate, ModelFindings, Reason
from harness.analysis.wording import counted, margin_basis, number
from harness.report.text import ENDPOINT_LABELS, ENDPOINTS, candidates, is_number

# What decided, for a narrow column; the codes are in the pages and in `decision.json`.
_REASONS = {
    "NONINFERIOR": "inside the margin",
    "INFERIOR_TRAIN": "training loss worse",
    "INFERIOR_HELDOUT": "held-out loss worse",
    "CI_SPANS_MARGIN": "seeds do not tell yet",
    "TOO_FEW_SEEDS": "too few seeds",
    "HOLM_NOT_MET": "not after Holm's correction",
    "RIVAL_RULE": "the rule asked for says so",
    "PAIRING_BROKEN": "runs are not pairs",
    "REFERENCE_UNSTABLE": "FP32 itself unstable",
    "REFERENCE_NOT_LEARNING": "FP32 learned too little",
    "LOSS_LOGGED_LOW_PRECISION": "loss rounded to 16 bits",
    "RUN_MISSING": "a run is missing",
    "CRASHED": "crashed",
    "NOT_EXPRESSIBLE": "torch cannot do it here",
    "NONFINITE": "NaN or infinity",
    "LOSS_SCALE_COLLAPSE": "loss scale collapsed",
    "DIVERGED": "diverged",
    "GROSS_DEGRADATION": "far worse in every seed",
    "PROBE_STAGNATION": "weight updates are lost",
    "PROBE_ROUNDING_BIAS": "rounding biases gradients",
    "PROBE_ROUNDING_NOISE": "rounding noise too large",
    "PROBE_DESCENT_LOSS": "gradients descend unlike FP32",
}
# Cautions on the whole model; with its code each fits one line of 80 columns.
_CAUTIONS = {
    "METHOD_NOT_CALIBRATED": "verdicts by another rule, as asked for",
    "HELDOUT_MISSING": "no held-out set, the training loss decides alone",
    "HELDOUT_SMALL": "small held-out set, so a noisy endpoint",
    "LOSS_NEAR_ZERO": "FP32's loss ends near zero, so the margin is tiny",
    "TAIL_SHORT": "short run, so noisy endpoints",
    "REFERENCE_NOT_FP32": "some ops of the FP32 runs compute in 16 bits",
    "LR_FLOOR_NOT_TESTED": "the learning rate hardly decayed in this run",
    "CHAOTIC_MODEL": "FP32 alone wanders by margins at this length",
    "SEEDS_DROPPED": "FP32 failed in some seeds, they are left out",
}
_DIAGNOSTICS = {
    "zero_grad_share": "gradient elements exactly zero",
    "moved_weight_share": "weights that differ from their start",
    "nonfinite_weights": "non-finite weights at the end",
    "nonfinite_buffers": "non-finite buffer elements at the end",
    "lost_update_share": "updates that BF16 weights would lose",
    "flushed_share_fp16": "gradient elements FP16 would flush to zero without loss scaling",
    "flushed_share_bf16": "gradient elements BF16 would flush to zero without loss scaling",
    "skipped_steps": "steps the loss scaler skipped, per run",
    "min_loss_scale": "smallest loss scale",
    "final_loss_scale": "loss scale at the end",
    "grad_norm_ratio": "gradient norm over the reference's, at the end",
    "first_nonfinite_step": "first step with a non-finite loss",
}


def reason_phrase(reason: Reason) -> str:
    """Return the reason in a few words; a code without such words as it is."""
    return _REASONS.get(reason.code, reason.code)


def caution_lines(findings: ModelFindings) -> tuple[str, ...]:
    """Return one short line, with its code, for each caution on the whole model."""
    first = {reason.code: reason for reason in reversed(findings.caveats)}
    codes = dict.fromkeys(reason.code for reason in findings.caveats)
    return tuple(f"{_CAUTIONS.get(c, first[c].message.rstrip('.'))} ({c})" for c in codes)


def diagnostic_label(name: str, *, param_format: str) -> str:
    """Return what a diagnostic counts.

    "Would" marks what is worked out for a format that did not run; where the weights are stored
    in BF16 the lost updates are observed.
    """
    if name == "lost_update_share" and param_format == "bf16":
        return "updates that its BF16 weights lost (an FP32 weight: would lose)"
    return _DIAGNOSTICS.get(name, name.replace("_", " "))


def emulation_sentence(detail: str) -> str:
    """Return what was emulated and what that leaves out, without the format's name in front."""
    return re.sub(r"^\w+ emulated: ", "", detail).rstrip(".")


def emulation_clause(detail: str) -> str:
    """Return only what was emulated: the parts of the sentence that say what was computed how."""
    parts = emulation_sentence(detail).split("; ")
    told = [p for p in parts if "not modelled" not in p and not p.endswith("tensors throughout")]
    return (told or parts)[0].removesuffix(", following CUDA autocast's lists")


def emulated_policies(findings: ModelFindings) -> tuple[tuple[str, str], ...]:
    """Return (policies, what was emulated) for the emulated candidates, equal ones together."""
    clauses: dict[str, list[str]] = {}
    for verdict in findings.verdicts:
        for reason in verdict.reasons:
            if reason.code == "EMULATED":
                clauses.setdefault(emulation_clause(reason.message), []).append(verdict.policy)
    return tuple((", ".join(policies), clause) for clause, policies in clauses.items())


def margin_lines(findings: ModelFindings) -> tuple[str, ...]:
    """Return the size of one margin and the term that set it; one line if the losses share it.

    A margin rests on the FP32 runs of a verdict's own seeds, so it may differ between candidates
    that stopped at different looks; then each line says how many seeds it is over.
    """
    texts: dict[int, dict[str, list[str]]] = {}
    for endpoint in ENDPOINTS:
        for verdict in candidates(findings) or findings.verdicts:
            estimate = verdict.estimates.get(endpoint)
            if estimate is None or not (is_number(estimate.margin) and estimate.margin > 0):
                continue
            pairs = verdict.look.pairs if verdict.look is not None else len(findings.seeds)
            own = texts.setdefault(pairs, {}).setdefault(_margin_text(estimate, findings), [])
            if ENDPOINT_LABELS[endpoint] not in own:
                own.append(ENDPOINT_LABELS[endpoint])
    lines = []
    for pairs, of_pairs in sorted(texts.items()):
        over = f" at {counted(pairs, 'seed')}" if len(texts) > 1 else ""
        for text, endpoints in of_pairs.items():
            of = f" of {' and '.join(endpoints)}" if len(of_pairs) > 1 else ""
            lines.append(f"1 margin{of}{over} = {text}.")
    return tuple(lines)


def own_margin_hint(findings: ModelFindings) -> str:
    """Return how to set a margin of one's own; empty without estimates, or where it is set."""
    if not any(v.estimates for v in findings.verdicts) or findings.rule.get("margin") is not None:
        return ""
    return (
        "Your own margin: decision.margin=0.02 (in the loss's unit) or decision.margin='2 %' (of "
        "what FP32 learned) on the command line."
    )


def _margin_text(estimate: Estimate, findings: ModelFindings) -> str:
    size = f"{number(estimate.margin)} {estimate.unit}"
    return f"{size}: {margin_basis(estimate, findings.rule)}"
