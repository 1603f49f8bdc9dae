"""What the memory of each policy holds, and where a step's time goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.analysis.findings import ModelFindings
from harness.report.evidence import Evidence
from harness.report.stored_probes import as_count, first_result
from harness.runs.record import RunRecord

_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations kept for backward",
    "low_precision_copies": "copies in fewer bits",
    "loss_scaler": "loss scaler",
}


def memory_parts(evidence: Evidence) -> dict[str, dict[str, float]]:
    """Return policy -> part -> bytes in one step, without parts that are empty everywhere.

    Policies emulated in FP32 storage are left out: their bytes are the emulation's.
    """
    found = {}
    for policy, runs in evidence.runs.items():
        if _stored_wider(runs):
            continue
        stored = first_result(runs, "memory")
        parts = {label: as_count(stored.get(key)) for key, label in _PARTS.items()}
        if sum(parts.values()) > 0:
            found[policy] = {label: value for label, value in parts.items() if value > 0}
    return found


def memory_sentences(evidence: Evidence) -> tuple[str, ...]:
    """Return each policy's sentence on its largest part; policies with the same one together."""
    policies: dict[str, list[str]] = {}
    for policy, runs in evidence.runs.items():
        if _stored_wider(runs):
            continue
        if sentence := str(first_result(runs, "memory").get("largest") or "").rstrip("."):
            policies.setdefault(sentence, []).append(policy)
    return tuple(f"{', '.join(names)}: {sentence}." for sentence, names in policies.items())


def _stored_wider(runs: Sequence[RunRecord]) -> bool:
    """Return whether a format exists by rounding FP32 tensors only: TF32 on a CPU, FP8."""
    return any(
        run.execution == "emulated"
        and run.policy_content.get("compute_format") not in ("fp32", "bf16", "fp16")
        for run in runs
    )


def time_parts(findings: ModelFindings) -> dict[str, dict[str, float]]:
    """Return policy -> op family -> share of the step's time; empty when nothing was profiled."""
    found = {}
    for policy, profile in findings.profiles.items():
        families = {str(n): as_count(v) for n, v in (profile.get("families") or {}).items()}
        shares = {name: share for name, share in families.items() if share > 0}
        if shares and math.isfinite(sum(shares.values())):
            found[policy] = shares
    return found


def profile_sentences(findings: ModelFindings) -> tuple[str, ...]:
    """Return each profiled policy's sentence, and the ops that make most of its time."""
    lines = []
    for policy, profile in findings.profiles.items():
        sentence = str(profile.get("sentence") or "").rstrip(".")
        ops = [str(op[0]) for op in profile.get("ops") or () if len(op) == 2]
        # The sentence names its policy.
        parts = [f"{sentence}." if sentence else f"{policy}:"]
        if ops:
            parts.append(f"Most of the time: {', '.join(ops[:6])}.")
        if sentence or ops:
            lines.append(" ".join(parts))
    return tuple(lines)
