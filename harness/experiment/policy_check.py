"""Whether each policy means something on a model: its patterns match and it changes something."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.precision.execution import applied
from harness.precision.policy import PrecisionPolicy
from harness.workloads.base import Workload
from harness.workloads.batches import to_device

Audit = dict[str, dict[str, int]]


@dataclass(frozen=True, kw_only=True)
class PolicyCheck:
    """What the check saw.

    Attributes:
        audits: Policy name -> formats its ops ran in; absent where the forward pass raised.
        skipped: Policy name -> why it is left out of the sweep.
    """

    audits: dict[str, Audit] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def check_policies(
    workload: Workload,
    policies: Sequence[PrecisionPolicy],
    *,
    reference: str,
    seed: int,
    device: torch.device,
    backend: str,
) -> PolicyCheck:
    """Trace one forward pass under each policy.

    A forward pass that raises is not an error here: the run will record it.

    Raises:
        ValueError: A pattern or op name of a policy matches nothing, or a policy changes nothing.
    """
    batch = next(iter(workload.batches(seed, 1)))
    result = PolicyCheck()

    def trace(policy: PrecisionPolicy) -> Audit | None:
        return _trace(workload, policy, batch, seed=seed, device=device, backend=backend)

    for policy in policies:
        audit = trace(policy)
        if audit is not None:
            result.audits[policy.name] = audit
    for policy in policies:
        audit = result.audits.get(policy.name)
        if audit is None or policy.computes_in_fp32:
            continue
        if policy.param_format == "fp32" and audit == result.audits.get(reference):
            raise ValueError(
                f"policy {policy.name!r} changes nothing on this model: "
                f"every op runs in the same format as under {reference!r}"
            )
        if policy.fp32_selectors and audit == trace(_without_selectors(policy)):
            result.skipped[policy.name] = (
                f"{policy.name} skipped: on this model it keeps nothing in FP32 that "
                f"{policy.compute_format} does not keep there already"
            )
    return result


def _without_selectors(policy: PrecisionPolicy) -> PrecisionPolicy:
    return dataclasses.replace(policy, fp32_selectors=())


def _trace(
    workload: Workload,
    policy: PrecisionPolicy,
    batch: Any,
    *,
    seed: int,
    device: torch.device,
    backend: str,
) -> Audit | None:
    model = workload.build_model(seed).to(device)
    batch = to_device(batch, device)
    with applied(
        policy,
        model,
        device=device,
        backend=backend,
        trace_forward=lambda: workload.loss_fn(model, batch),
    ) as execution:
        try:
            with execution.audit() as audit, execution.forward(), torch.no_grad():
                workload.loss_fn(model, batch)
        except Exception:  # noqa: BLE001 - any error of user code here is the run's to record
            return None
        return {op: dict(formats) for op, formats in audit.items()}
