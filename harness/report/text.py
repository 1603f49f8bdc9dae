"""How numbers, verdicts and names read: one spelling for terminal, Markdown and HTML."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.analysis.codes import CODES
from harness.analysis.findings import Endpoint, Estimate, ModelFindings, Ratio, Reason, Verdict
from harness.analysis.wording import multiple
from harness.runs.notes import NOTE_CODES

ENDPOINTS: tuple[Endpoint, ...] = ("train", "held_out")
ENDPOINT_LABELS: dict[Endpoint, str] = {"train": "training loss", "held_out": "held-out loss"}
NOT_AVAILABLE = "n/a"
_LONGEST_NAME = 80


def safe_name(name: str) -> str:
    """Return `name` as one file-name component that cannot leave its folder.

    Letters, digits, `.`, `_` and `-` stay; anything else becomes `_`. A name that had to change
    gets 8 hex digits of its hash, so that two different names never share a folder.
    """
    cleaned = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".")[:_LONGEST_NAME]
    if cleaned == name and cleaned:
        return cleaned
    return f"{cleaned or 'model'}-{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:8]}"


def is_number(value: float | None) -> bool:
    """Return whether `value` is there and finite."""
    return value is not None and math.isfinite(value)


def significant(value: float | None, digits: int = 4) -> str:
    """Return `value` with `digits` significant digits; `n/a` for None, a word for NaN and Inf."""
    if value is None:
        return NOT_AVAILABLE
    if not math.isfinite(value):
        return "non-finite"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if -4 <= exponent < 6:
        return f"{value:.{max(0, digits - 1 - exponent)}f}"
    return f"{value:.{digits - 1}e}"


def signed(value: float | None, digits: int = 3) -> str:
    """Return `value` with its sign always shown; words as in `significant`."""
    text = significant(value, digits)
    return f"+{text}" if value is not None and math.isfinite(value) and value >= 0 else text


def in_margins(value: float | None, margin: float) -> float | None:
    """Return `value / margin`, or None where the margin is not a positive number."""
    if value is None or not (math.isfinite(margin) and margin > 0):
        return None
    return value / margin


def margins_text(value: float | None) -> str:
    """Return a multiple of the margin, spelled as in the analyzer's sentences."""
    if value is None:
        return NOT_AVAILABLE
    return multiple(value) if math.isfinite(value) else "non-finite"


def difference_text(estimate: Estimate | None) -> str:
    """Return `mean [low, high]` in units of the margin; `n/a` without an estimate."""
    if estimate is None:
        return NOT_AVAILABLE
    mean = margins_text(in_margins(estimate.mean_difference, estimate.margin))
    if estimate.ci_low is None or estimate.ci_high is None or mean == NOT_AVAILABLE:
        return mean
    low = in_margins(estimate.ci_low, estimate.margin)
    high = in_margins(estimate.ci_high, estimate.margin)
    return interval_text(in_margins(estimate.mean_difference, estimate.margin), low, high)


def interval_text(mean: float | None, low: float | None, high: float | None) -> str:
    """Return `mean [low, high]`, all in margins; the mean alone where an end is None or NaN.

    An end may be infinite: few pairs at a small level bound nothing on that side.
    """
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return margins_text(mean)
    return f"{margins_text(mean)} [{multiple(low)}, {multiple(high)}]"


def worst_endpoint(verdict: Verdict) -> Endpoint | None:
    """Return the endpoint whose interval reaches furthest up in margins; None without estimates.

    A difference that is not finite is the worst there is.
    """
    if not verdict.estimates:
        return None

    def reach(endpoint: Endpoint) -> float:
        estimate = verdict.estimates[endpoint]
        end = estimate.mean_difference if estimate.ci_high is None else estimate.ci_high
        scaled = in_margins(end, estimate.margin)
        return scaled if scaled is not None and math.isfinite(scaled) else math.inf

    return max(verdict.estimates, key=reach)


def ratio_text(ratio: Ratio | None, *, interval: bool = False) -> str:
    """Return a ratio as `0.81x`, with its interval on request; `n/a` when not measured."""
    if ratio is None or not math.isfinite(ratio.value):
        return NOT_AVAILABLE
    text = f"{ratio.value:.2f}x"
    if interval and ratio.ci_low is not None and ratio.ci_high is not None:
        text += f" [{ratio.ci_low:.2f}, {ratio.ci_high:.2f}]"
    return text


def bytes_text(value: float | None) -> str:
    """Return a number of bytes in binary units; `n/a` when not measured."""
    if value is None or not math.isfinite(value):
        return NOT_AVAILABLE
    size = float(value)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{significant(size, 3)} {unit}"
        size /= 1024
    return f"{significant(size, 3)} GiB"


def percent_text(value: float | None) -> str:
    """Return a share as a percentage with three significant digits."""
    if value is None or not math.isfinite(value):
        return significant(value)
    return f"{significant(100 * value, 3)} %"


def main_reason(verdict: Verdict) -> Reason | None:
    """Return the reason that decided, or None if the verdict carries none."""
    return verdict.reasons[0] if verdict.reasons else None


def candidates(findings: ModelFindings) -> tuple[Verdict, ...]:
    """Return the verdicts that count, in grid order."""
    return tuple(v for v in findings.verdicts if not v.is_control)


def controls(findings: ModelFindings) -> tuple[Verdict, ...]:
    """Return the noise-matched controls, in grid order."""
    return tuple(v for v in findings.verdicts if v.is_control)


def outcome_label(verdict: Verdict) -> str:
    """Return the verdict's word; a control has none."""
    return "control" if verdict.is_control else verdict.outcome


def shown_endpoints(findings: ModelFindings) -> tuple[Endpoint, ...]:
    """Return the endpoints that any verdict has an estimate of; all of them if none has."""
    found = tuple(e for e in ENDPOINTS if any(e in v.estimates for v in findings.verdicts))
    return found or ENDPOINTS


def endpoints_in_words(verdict: Verdict) -> str:
    """Return `training and held-out loss`, or the one of them that the verdict rests on."""
    both = len(verdict.estimates) != 1
    return "training and held-out loss" if both else ENDPOINT_LABELS[next(iter(verdict.estimates))]


def used_codes(findings: ModelFindings) -> tuple[str, ...]:
    """Return every reason code of the findings once, in order of appearance."""
    reasons = [r for v in findings.verdicts for r in v.reasons] + list(findings.caveats)
    return tuple(dict.fromkeys(reason.code for reason in reasons))


def code_explanations(codes: tuple[str, ...]) -> dict[str, str]:
    """Return code -> paragraph: those of the analysis and those of the checks before it."""
    explained = {**NOTE_CODES, **CODES}
    return {code: explained[code] for code in codes if code in explained}


def flattened(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for nested plain data, in its own order."""
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            yield name, ", ".join(map(str, value)) or "none"
        else:
            yield name, "n/a" if value is None else str(value)
