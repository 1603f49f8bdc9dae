"""What all probes say of each module of one candidate, drawn together from records and probe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.pairing import Pair
from harness.analysis.probe_findings import ModuleFinding
from harness.analysis.probe_values import entries, module_names, pooled_share, typical
from harness.precision.module_names import ROOT
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.same_point.record import ModuleError, SamePointRecord

_BY_MODULE = ("norms", "lost_updates")


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The runs of one comparison: the candidate's, and FP32's of the same seeds."""

    ours: tuple[RunRecord, ...]
    theirs: tuple[RunRecord, ...]


def sides(pairs: Sequence[Pair]) -> Sides:
    """Return both sides of the pairs whose fingerprints agree."""
    sound = [pair for pair in pairs if pair.fault is None]
    return Sides(
        ours=tuple(pair.candidate for pair in sound), theirs=tuple(pair.reference for pair in sound)
    )


def module_findings(
    runs: Sides,
    same_point: SamePointRecord | None,
    policy: PrecisionPolicy,
    *,
    also: Sequence[str] = (),
) -> tuple[ModuleFinding, ...]:
    """Return one finding per module that any probe saw, in the model's order, without suspicion.

    Args:
        runs: Candidate and FP32 runs of the same seeds.
        same_point: The same-point probe of this candidate, if it was made.
        policy: The candidate.
        also: Modules to list even if no probe has figures of them.
    """
    errors = {m.module: m for m in same_point.modules} if same_point is not None else {}
    names = dict.fromkeys([*errors, *module_names(runs.ours, _BY_MODULE)])
    nonfinite = _nonfinite_ops(runs)
    formats = _formats(runs.ours)
    names.update(dict.fromkeys([*nonfinite, *formats, *also]))
    return tuple(
        dataclasses.replace(
            _from_probe(name, errors.get(name)),
            zero_grad_share=_both(runs, name, "grad_zero_share"),
            zero_output_share=_both(runs, name, "output_zero_share"),
            update_to_weight=_both(runs, name, "update_to_weight"),
            lost_update_share=_lost_updates(runs, name, policy),
            nonfinite=tuple(nonfinite.get(name, ())),
            formats=formats.get(name, ()),
        )
        for name in names
    )


def _from_probe(name: str, error: ModuleError | None) -> ModuleFinding:
    if error is None:
        return ModuleFinding(module=name)
    return ModuleFinding(
        module=name,
        kind=error.kind,
        local_forward_error=error.local_forward_error,
        integer_input_max=error.integer_input_max,
        gradient_error=error.gradient_error,
        noise_ratio=error.noise_ratio,
        cosine=error.cosine,
        flushed_share=error.flushed_share,
    )


def _both(runs: Sides, module: str, metric: str) -> tuple[float | None, float | None] | None:
    ours, theirs = typical(runs.ours, module, metric), typical(runs.theirs, module, metric)
    return None if ours is None and theirs is None else (ours, theirs)


def _lost_updates(runs: Sides, module: str, policy: PrecisionPolicy) -> float | None:
    """Return what rounds away in the candidate's own 16-bit weights, or would in BF16 ones."""
    stored = "fp16" if policy.param_format == "fp16" else "bf16"
    return pooled_share(runs.ours, "lost_updates", module, f"lost_{stored}", "updates")


def _nonfinite_ops(runs: Sides) -> dict[str, list[str]]:
    """Return module -> ops that made something non-finite of finite inputs, unless FP32's do too.

    Forward first: what a backward pass under a loss scaler overflows while it calibrates is no
    fault, and `suspects` leaves it out.
    """
    known = {_op(row) for record in runs.theirs for row in entries(record, "audit", "nonfinite")}
    found: dict[str, dict[str, None]] = {}
    rows = [row for record in runs.ours for row in entries(record, "audit", "nonfinite")]
    for row in sorted(rows, key=lambda row: str(row.get("direction")) != "forward"):
        if _op(row) in known:
            continue
        kind = "output" if row.get("direction") == "forward" else "gradient"
        fmt = str(row.get("format", "")).upper()
        text = f"{kind} of {_plain(row.get('op'))}" + (f" in {fmt}" if fmt else "")
        found.setdefault(str(row.get("module") or ROOT), {})[text] = None
    return {module: list(texts) for module, texts in found.items()}


def _op(row: Mapping[str, object]) -> tuple[str, str, str]:
    return str(row.get("module")), str(row.get("op")), str(row.get("direction"))


def _plain(op: object) -> str:
    """Return an op's name without its namespace and overload: `pow` of `aten::pow.Tensor`."""
    name = str(op)
    return name.rsplit("::", 1)[-1].split(".")[0]


def _formats(records: Sequence[RunRecord]) -> dict[str, tuple[tuple[str, float], ...]]:
    """Return module -> format -> share of its calls, from the first audited run."""
    audited = next((r for r in records if entries(r, "audit", "rows")), None)
    if audited is None:
        return {}
    calls: dict[str, dict[str, float]] = {}
    for row in entries(audited, "audit", "rows"):
        own = calls.setdefault(str(row.get("module") or ROOT), {})
        fmt = str(row.get("format"))
        own[fmt] = own.get(fmt, 0.0) + float(row.get("calls") or 0)
    return {
        module: tuple((fmt, count / total) for fmt, count in own.items())
        for module, own in calls.items()
        if (total := sum(own.values())) > 0
    }
