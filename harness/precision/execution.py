"""Makes a policy true for a model on a device, and undoes all of it.

The only place that sets global precision switches and enters autocast. What each op does is
decided in `op_lists`, how it computes where the device is slow or lacks a format in `emulation`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from harness.precision.audit import AuditMode
from harness.precision.autocast_kernels import autocast_overrides
from harness.precision.backend import LOW_DTYPES, Plan, choose, tf32_kernels
from harness.precision.emulation import TF32_KEY, TF32_PRODUCTS, sixteen_bit_overrides
from harness.precision.kernels import (
    Override,
    fall_through,
    functional_overloads,
    registered,
)
from harness.precision.modules import OutputHead, output_head, select
from harness.precision.op_lists import policy_actions
from harness.precision.policy import PrecisionPolicy
from harness.precision.regions import Region, fp32_region, ieee_region, in_region
from harness.precision.storage import fp32_weights, sixteen_bit_tensors, stored_in

__all__ = ["Execution", "applied", "fp32_weights", "sixteen_bit_tensors"]

# The leaves of the fp32_precision switches (torch 2.9 and later). The new API only: after a new
# switch was set, reading an old one (allow_tf32) raises.
SWITCHES: dict[str, Any] = {
    name: operator.attrgetter(name)(torch.backends)
    for name in (
        "cuda.matmul",
        "cudnn.conv",
        "cudnn.rnn",
        "mkldnn.matmul",
        "mkldnn.conv",
        "mkldnn.rnn",
    )
}
_TF32_SWITCHES = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")


class Execution:
    """A policy in force on one model.

    Attributes:
        policy: The policy.
        device: Where the model is.
        switches: Every backend switch as read back after setting, name -> value.
        fp32_module_names: The modules kept in FP32, resolved.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        device: torch.device,
        *,
        plan: Plan,
        switches: dict[str, str],
        fp32_module_names: tuple[str, ...],
    ) -> None:
        self.policy = policy
        self.device = device
        self._plan = plan
        self._emulated_ops_used: set[str] = set()
        self._has_run = False
        self.switches = switches
        self.fp32_module_names = fp32_module_names
        self._low = LOW_DTYPES.get(policy.compute_format)
        self._forward_depth = 0
        self._fp32_depth = 0
        self._in_tf32_product = False

    @property
    def kind(self) -> Literal["native", "emulated"]:
        """`emulated` when any op was computed by rounding in FP32 storage.

        Before the first forward pass: when any op may be.
        """
        return self._plan.kind(self._used())

    @property
    def detail(self) -> str:
        """One sentence: what was emulated and what that does not model."""
        return self._plan.detail(self._used())

    def _used(self) -> set[str] | None:
        return self._emulated_ops_used if self._has_run else None

    def changed_switches(self) -> dict[str, str]:
        """Return the switches that no longer have the value they were given, with what they are.

        A workload's own code may set them (`torch.set_float32_matmul_precision`); then the run was
        not what the policy says.
        """
        now = {name: str(SWITCHES[name].fp32_precision) for name in self.switches}
        return {name: value for name, value in now.items() if value != self.switches[name]}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Be the context around the loss of a training step; backward runs outside it."""
        self._forward_depth += 1
        self._has_run = True
        try:
            if self._low is None:
                yield
            else:
                with torch.autocast(self.device.type, dtype=self._low):
                    yield
        finally:
            self._forward_depth -= 1

    @contextmanager
    def audit(self) -> Iterator[dict[str, dict[str, int]]]:
        """Record the formats of the ops of a forward pass, values unaffected.

        Only what runs inside `forward` counts: backward and the optimizer may be in the context.

        Yields:
            A dict, filled as {op name: {format name: calls}}: the wider format of an op's first
            floating-point argument and result, `tf32` where a product rounds FP32 operands.
        """
        counts: dict[str, dict[str, int]] = {}
        with AuditMode(
            counts,
            recording=lambda: self._forward_depth > 0,
            rounds_to_tf32=self._rounds_to_tf32,
        ):
            yield counts

    def _rounds_to_tf32(self, op: str) -> bool:
        if self._in_tf32_product:
            return True
        if self._plan.tf32 != "native" or op not in TF32_PRODUCTS:
            return False
        switch = "cudnn.conv" if "conv" in op else "cuda.matmul"
        return bool(SWITCHES[switch].fp32_precision == "tf32")

    def _tf32_active(self) -> bool:
        if self._fp32_depth:
            return False
        # Activation checkpointing runs parts of the forward again inside backward, with gradients
        # enabled; backward's own products have rounded operands already.
        recomputing = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
        return self._forward_depth > 0 or recomputing

    def _mark_tf32_product(self, inside: bool) -> None:
        self._in_tf32_product = inside

    @contextmanager
    def _keeping_fp32(self) -> Iterator[None]:
        self._fp32_depth += 1
        try:
            yield
        finally:
            self._fp32_depth -= 1


@contextmanager
def applied(
    policy: PrecisionPolicy,
    model: nn.Module,
    *,
    device: torch.device,
    backend: str = "auto",
    trace_forward: Callable[[], object] | None = None,
) -> Iterator[Execution]:
    """Put `policy` in force on `model` until the context ends, then undo all of it.

    Sets and reads back every backend switch, casts weights and floating buffers in place if
    `param_format` says so (create the optimizer afterwards, inside), runs the chosen modules in
    FP32 and registers op kernels. Contexts nest; they must end in the reverse order, and an inner
    policy must not leave to autocast what an outer one has overridden.

    Args:
        policy: The policy.
        model: On `device`, FP32; changed in place and restored, also after an exception. Weights
            keep the values that training gave them.
        device: Where the model is.
        backend: `auto` takes native kernels where this device has fast ones and computes the rest
            in FP32, rounding operands and results; `native` and `emulated` ask for one of them.
        trace_forward: Runs one forward pass of the model; only called, without gradients, to find
            the last linear layer for the selector `output_head`.

    Raises:
        ValueError: A module pattern or an op name matches nothing, the backend is unknown or
            cannot run the policy on this device, or the policy's formats do not go together.
    """
    _check(policy)
    plan = choose(policy, device, backend)
    head = OutputHead()
    if "output_head" in policy.fp32_selectors:
        head = output_head(model, trace_forward)
    fp32_names = select(policy, model, head)
    with ExitStack() as stack:
        tf32_switches = plan.tf32 == "native"
        switches = stack.enter_context(_backend_switches(tf32_switches))
        execution = Execution(
            policy,
            device,
            plan=plan,
            switches=switches,
            fp32_module_names=fp32_names,
        )
        dtype = LOW_DTYPES.get(policy.param_format, torch.float32)
        stack.enter_context(stored_in(model, dtype, except_modules=fp32_names))
        if policy.compute_format != "fp32":
            region = _region(execution, tf32_switches)
            stack.enter_context(in_region(model, fp32_names, region))
        stack.enter_context(registered(_overrides(execution, model, plan, head)))
        stack.enter_context(_key_included(TF32_KEY, plan.tf32 == "emulated"))
        yield execution


def _check(policy: PrecisionPolicy) -> None:
    if policy.param_format not in ("fp32", policy.compute_format):
        raise ValueError(
            f"policy.param_format={policy.param_format!r} is not allowed with "
            f"policy.compute_format={policy.compute_format!r}; allowed: fp32, or the same format"
        )
    for field in ("fp32_ops", "fp32_modules", "fp32_selectors", "low_precision_ops"):
        if policy.compute_format == "fp32" and getattr(policy, field):
            raise ValueError(
                f"policy.{field}={list(getattr(policy, field))!r} has no effect with "
                "policy.compute_format='fp32'; allowed: an empty list"
            )


def _region(execution: Execution, tf32_switches: bool) -> Region:
    if tf32_switches:
        return ieee_region(
            lambda: str(SWITCHES[_TF32_SWITCHES[0]].fp32_precision),
            lambda value: _set_switches(value, _TF32_SWITCHES),
        )
    return fp32_region(execution.device.type, execution._keeping_fp32)


def _overrides(
    execution: Execution, model: nn.Module, plan: Plan, head: OutputHead
) -> list[Override]:
    policy = execution.policy
    if policy.compute_format == "fp32":
        return []
    changes = policy_actions(policy, functional_overloads)
    used = execution._emulated_ops_used
    kept_ids = frozenset() if head.weight is None else frozenset({id(head.weight)})
    if policy.compute_format == "tf32":
        return tf32_kernels(
            changes,
            plan,
            active=execution._tf32_active,
            mark=execution._mark_tf32_product,
            used=used,
            kept_ids=kept_ids,
        )
    low = LOW_DTYPES[policy.compute_format]
    return [
        *autocast_overrides(
            changes, model, device_type=execution.device.type, low=low, kept_ids=kept_ids
        ),
        *sixteen_bit_overrides(low, plan.emulated_ops, used),
    ]


def _set_switches(value: str, names: tuple[str, ...]) -> None:
    for name in names:
        SWITCHES[name].fp32_precision = value


@contextmanager
def _backend_switches(tf32: bool) -> Iterator[dict[str, str]]:
    """Set every switch and yield the values read back."""
    before = {name: switch.fp32_precision for name, switch in SWITCHES.items()}
    try:
        _set_switches("ieee", tuple(SWITCHES))
        if tf32:
            _set_switches("tf32", _TF32_SWITCHES)
        yield {name: switch.fp32_precision for name, switch in SWITCHES.items()}
    finally:
        for name, value in before.items():
            SWITCHES[name].fp32_precision = value


@contextmanager
def _key_included(name: str, included: bool) -> Iterator[None]:
    """Add a dispatch key to this thread's set, or take an outer policy's away, for a while."""
    key = getattr(torch._C.DispatchKey, name)
    before = torch._C._dispatch_tls_is_dispatch_key_included(key)
    if included:
        fall_through(name)
    _include(key, included)
    try:
        yield
    finally:
        _include(key, before)


def _include(key: torch._C.DispatchKey, included: bool) -> None:
    # Autocast keys are excluded by default, which wins over being included.
    torch._C._dispatch_tls_set_dispatch_key_included(key, included)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, not included)
