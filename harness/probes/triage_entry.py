"""The entry of `RunRecord.probes["triage"]`, and those that need no traced step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.precision.module_names import owner
from harness.probes.triage import Cause, Trouble
from harness.probes.triage_places import listed, upper

# Weights that move under FP32 and this share of them at most under a policy stand still.
_STILL = 0.1


def triage_entry(
    trouble: Trouble, step: int | None, cause: Cause, sentence: str, findings: Iterable[str]
) -> dict[str, Any]:
    """Return an entry that names no place yet; `findings` without those that are empty."""
    empty = ("module", "op", "direction", "kind", "format", "value", "limit", "fp32_max")
    return {
        "trigger": trouble.trigger,
        "step": step,
        "cause": cause,
        **dict.fromkeys(empty),
        "sentence": sentence,
        "findings": [{"sentence": text} for text in findings if text],
    }


def not_replayed(trouble: Trouble, reason: str, *, step: int | None = None) -> dict[str, Any]:
    """Return the entry of a trouble whose origin could not be looked for."""
    return triage_entry(trouble, step if step is not None else trouble.step, "unknown", reason, [])


def diagnose_unmoved(
    trouble: Trouble,
    shares: Mapping[str, tuple[float, float]],
    *,
    steps: int,
    count: int,
    format_name: str,
) -> dict[str, Any] | None:
    """Return the entry for weights that move under FP32 and not under the policy; None without.

    Args:
        trouble: With the trigger `unmoved_weights`.
        shares: Parameter -> share of its elements that changed within `steps` steps, under the
            policy and of FP32.
        steps: Steps that both were given.
        count: Parameters that never changed in the whole run.
        format_name: Format the policy stores weights in.
    """
    still = {name: both for name, both in shares.items() if both[0] < _STILL * both[1]}
    if not still:
        return None
    modules = list(dict.fromkeys(owner(name) for name in still))
    lost = (
        "their gradients are lost on the way"
        if format_name == "fp32"
        else f"their updates are lost in {upper(format_name)} weights"
    )
    many = f"{count} parameter{'s' * (count > 1)} never moved; " if count else ""
    most = max(share for share, _ in still.values())
    ours = f"at most {100 * most:.2g} % of the elements" if most else "no element"
    least = 100 * min(share for _, share in still.values())
    theirs = "all of them" if least == 100 else f"at least {least:.3g} % of them"
    sentence = (
        f"{many}after {steps} steps {ours} of {listed(list(still))} moved, while {theirs} moved "
        f"under FP32: {lost}"
    )
    entry = triage_entry(trouble, trouble.step, "silent", sentence, [])
    return entry | {"module": modules[0], "format": format_name, "kind": "weights of"}
