"""Whether each policy means something on a model: its patterns match and it changes something."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.precision.audit import audited_step
from harness.precision.execution import applied
from harness.precision.policy import PrecisionPolicy
from harness.runs.notes import Note
from harness.runs.workload_code import code_of
from harness.workloads.base import Workload
from harness.workloads.batches import to_device

Audit = dict[str, dict[str, int]]
# (module, direction, op, format) -> calls
_Rows = Counter[tuple[str | None, str, str, str]]


@dataclass(frozen=True, kw_only=True)
class PolicyCheck:
    """What the check saw.

    Attributes:
        audits: Policy name -> formats its forward ops ran in; absent where the forward pass raised.
        skipped: Policy name -> why it is left out of the sweep.
        notes: Entries of policies that change nothing on this model.
    """

    audits: dict[str, Audit] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)


def check_policies(
    workload: Workload,
    policies: Sequence[PrecisionPolicy],
    *,
    reference: str,
    seed: int,
    steps: int,
    device: torch.device,
    backend: str,
) -> PolicyCheck:
    """Trace one forward and backward pass under each policy.

    One that raises is not an error here: the run will record it.

    Args:
        workload: Any workload.
        policies: The policies of the grid.
        reference: Name of the reference policy.
        seed: The first seed of the grid.
        steps: Steps of a run; what `batches` yields may depend on it.
        device: Where the runs will be trained.
        backend: As for `applied`.

    Raises:
        ValueError: A pattern or op name of a policy matches nothing, a policy changes nothing, or
            `batches` raised.
    """
    with code_of(workload, "batches (step 0)"):
        batch = next(iter(workload.batches(seed, steps)))
    result = PolicyCheck()
    rows: dict[str, _Rows] = {}

    def trace(policy: PrecisionPolicy) -> tuple[Audit, _Rows] | None:
        return _trace(workload, policy, batch, seed=seed, device=device, backend=backend)

    for policy in policies:
        traced = trace(policy)
        if traced is not None:
            result.audits[policy.name], rows[policy.name] = traced
    for policy in policies:
        audit, own = result.audits.get(policy.name), rows.get(policy.name)
        if audit is None or policy.computes_in_fp32:
            continue
        if policy.param_format == "fp32" and own == rows.get(reference):
            raise ValueError(
                f"policy {policy.name!r} changes nothing on this model: every op runs in the same "
                f"format as under {reference!r}{_known_cause(audit)}"
            )
        if policy.fp32_selectors and (audit, own) == trace(_without_selectors(policy)):
            result.skipped[policy.name] = (
                f"{policy.name} skipped: on this model it keeps nothing in FP32 that "
                f"{policy.compute_format} does not keep there already"
            )
        result.notes.extend(
            Note(
                code="ENTRY_WITHOUT_EFFECT",
                message=f"policy {policy.name!r}: {entry} changes nothing on this model: nothing "
                "that it names is called, or it runs in that format already",
            )
            for entry, without in _without_one_entry(policy)
            if (audit, own) == trace(without)
        )
    return result


def _known_cause(audit: Audit) -> str:
    formats = {name for counts in audit.values() for name in counts}
    if own := sorted(formats & {"bf16", "fp16"}):
        return f"; its own code computes in {' and '.join(own)} already (a cast, an autocast)"
    if "fp64" in formats:
        return "; it computes in FP64, which autocast and TF32 leave alone"
    return ""


def _without_selectors(policy: PrecisionPolicy) -> PrecisionPolicy:
    return dataclasses.replace(policy, fp32_selectors=())


def _without_one_entry(policy: PrecisionPolicy) -> Iterator[tuple[str, PrecisionPolicy]]:
    """Yield each entry that names ops or modules, and the policy without it."""
    for key in ("fp32_ops", "fp32_modules", "low_precision_ops"):
        entries = getattr(policy, key)
        for entry in entries:
            if entry != "all":
                rest: dict[str, Any] = {key: tuple(e for e in entries if e != entry)}
                yield f"{key}=[{entry}]", dataclasses.replace(policy, **rest)


def _trace(
    workload: Workload,
    policy: PrecisionPolicy,
    batch: Any,
    *,
    seed: int,
    device: torch.device,
    backend: str,
) -> tuple[Audit, _Rows] | None:
    model = workload.build_model(seed).to(device)

    def forward() -> Any:
        return workload.loss_fn(model, to_device(batch, device))

    with applied(policy, model, device=device, backend=backend, trace_forward=forward) as execution:
        try:
            # With gradients: a loss may contain derivatives of the model.
            with audited_step(execution, model) as audit:
                with execution.forward():
                    loss = forward()
                # A policy may concern the backward pass alone.
                with contextlib.suppress(Exception):
                    loss.backward()
        except Exception:  # noqa: BLE001 - any error of user code here is the run's to record
            return None
    rows: _Rows = Counter()
    for row in audit.result()["rows"]:
        rows[row["module"], row["direction"], row["op"], row["format"]] += row["calls"]
    return audit.forward_formats, rows
