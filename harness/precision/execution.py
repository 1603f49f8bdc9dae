"""Makes a policy true for a model on a device, and undoes all of it.

The only place that sets global precision switches and enters autocast. What each op does is
decided in `op_lists`, how it computes where the device is slow or lacks a format in `emulation`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from harness.precision.audit import FormatCounter
from harness.precision.backend import LOW_DTYPES, Plan, choose
from harness.precision.directions import DIRECTIONS, Direction, split_direction
from harness.precision.eager import compiled_modules, eager
from harness.precision.emulation.products import PRODUCTS, ROUNDING_KEY, RoundedProducts
from harness.precision.kept_modules import kept_in_fp32
from harness.precision.kernels.of_policy import policy_kernels
from harness.precision.kernels.registry import key_included, registered
from harness.precision.modules import OutputHead, output_head, select
from harness.precision.passes import Passes
from harness.precision.policy import PrecisionPolicy
from harness.precision.rounding_noise import RoundingNoise
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
        directed_module_names: The modules kept in FP32 in one direction only, and in which.
        passes: Says whether a forward pass runs whose values are thrown away.
        noise: Random bits of stochastic rounding; `noise.start` seeds a step's.
        products: What rounds the operands of products in a format that no tensor has, or None.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        device: torch.device,
        *,
        plan: Plan,
        switches: dict[str, str],
        fp32_module_names: tuple[str, ...],
        directed_module_names: dict[str, Direction],
        passes: Passes,
        compiled: tuple[str, ...],
    ) -> None:
        self.policy = policy
        self.device = device
        self._plan = plan
        self._emulated_ops_used: set[str] = set()
        self._has_run = False
        self.switches = switches
        self.fp32_module_names = fp32_module_names
        self.directed_module_names = directed_module_names
        self.passes = passes
        self._compiled = compiled
        self._low = LOW_DTYPES.get(policy.compute_format)
        self._forward_depth = 0
        self.noise = RoundingNoise()
        self.products = None
        if plan.products is not None:
            self.products = RoundedProducts(
                plan.products,
                in_step=self._in_step,
                noise=self.noise,
                used=self._emulated_ops_used,
                passes=passes,
            )

    @property
    def kind(self) -> Literal["native", "emulated"]:
        """`emulated` when any op was computed by rounding in FP32 storage.

        Before the first forward pass: when any op may be.
        """
        return self._plan.kind(self._used())

    @property
    def detail(self) -> str:
        """A sentence: what was emulated and what that does not model; another if need be."""
        sentence = self._plan.detail(self._used())
        if self._compiled:
            sentence += f" Compiled modules ran without torch.compile: {', '.join(self._compiled)}."
        return sentence

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
        with FormatCounter(counts, audited=self):
            yield counts

    def in_forward(self) -> bool:
        """Return whether a forward pass of a training step is running."""
        return self._forward_depth > 0

    def beside_the_model(self) -> bool:
        """Return whether ops that run now are the policy's own, or their values thrown away."""
        is_rounding = self.products is not None and self.products.is_rounding
        return is_rounding or self.passes.gives_no_values

    def rounded_format(self, op: str) -> str | None:
        """Return the format that a product of FP32 tensors rounds its operands to now, if any."""
        if self.products is not None:
            return self.products.running
        if not self._plan.native_tf32 or op.removesuffix("_backward") not in PRODUCTS:
            return None
        switch = "cudnn.conv" if "conv" in op else "cuda.matmul"
        return "tf32" if SWITCHES[switch].fp32_precision == "tf32" else None

    def _in_step(self) -> bool:
        # Activation checkpointing runs parts of the forward again inside backward, with gradients
        # enabled; backward's own products have rounded operands already.
        recomputing = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
        return self._forward_depth > 0 or recomputing


@contextmanager
def applied(
    policy: PrecisionPolicy,
    model: nn.Module,
    *,
    device: torch.device,
    backend: str = "auto",
    trace_forward: Callable[[], object] | None = None,
    paused: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Execution]:
    """Put `policy` in force on `model` until the context ends, then undo all of it.

    Sets and reads back every backend switch, casts weights and floating buffers in place if
    `param_format` says so (create the optimizer afterwards, inside), runs the chosen modules in
    FP32, registers op kernels and keeps compiled code eager. Contexts nest; they must end in the
    reverse order, and an inner policy must not leave to autocast what an outer one has overridden.

    Args:
        policy: The policy.
        model: On `device`, FP32; changed in place and restored, also after an exception. Weights
            keep the values that training gave them.
        device: Where the model is.
        backend: `auto` takes native kernels where this device has fast ones and computes the rest
            in FP32, rounding operands and results; `native` and `emulated` ask for one of them.
        trace_forward: Runs one forward pass of the model; only called, without gradients, to find
            the last linear layer for the selector `output_head`.
        paused: Context in which random draws are not counted: the policy runs a piece of the model
            twice, and they come again.

    Raises:
        ValueError: A module pattern or an op name matches nothing, the backend is unknown or
            cannot run the policy on this device, or the policy's formats do not go together.
    """
    _check(policy)
    plan = choose(policy, device, backend)
    head = OutputHead()
    if "output_head" in policy.fp32_selectors:
        head = output_head(model, trace_forward)
    per_direction = {d: select(policy, model, head, direction=d) for d in DIRECTIONS}
    fp32_names = tuple(n for n in per_direction["forward"] if n in per_direction["backward"])
    directed = {n: d for d, ns in per_direction.items() for n in ns if n not in fp32_names}
    with ExitStack() as stack:
        stack.enter_context(eager())
        switches = stack.enter_context(_backend_switches(plan.native_tf32))
        execution = Execution(
            policy,
            device,
            plan=plan,
            switches=switches,
            fp32_module_names=fp32_names,
            directed_module_names=directed,
            passes=Passes(device, paused=paused),
            compiled=compiled_modules(model),
        )
        dtype = LOW_DTYPES.get(policy.param_format, torch.float32)
        stack.enter_context(stored_in(model, dtype, except_modules=fp32_names))
        if policy.compute_format != "fp32":
            kept = kept_in_fp32(
                model,
                {**dict.fromkeys(fp32_names, DIRECTIONS), **{n: (d,) for n, d in directed.items()}},
                device_type=device.type,
                passes=execution.passes,
                products=execution.products,
                switch=_TF32_SWITCH if plan.native_tf32 else None,
            )
            stack.enter_context(kept)
        kernels = policy_kernels(
            policy,
            model,
            plan=plan,
            device_type=device.type,
            head=head,
            passes=execution.passes,
            products=execution.products,
            used=execution._emulated_ops_used,
        )
        stack.enter_context(registered(kernels))
        stack.enter_context(key_included(ROUNDING_KEY, plan.products is not None))
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
    directed = [entry for entry in policy.fp32_modules if split_direction(entry)[0]]
    if directed and policy.param_format != "fp32":
        raise ValueError(
            f"policy.fp32_modules={directed[0]!r} has a direction, which makes no sense with "
            f"policy.param_format={policy.param_format!r}: a module has its weights in one format; "
            "allowed: the pattern alone"
        )


def _set_switches(value: str, names: tuple[str, ...]) -> None:
    for name in names:
        SWITCHES[name].fp32_precision = value


_TF32_SWITCH = (
    lambda: str(SWITCHES[_TF32_SWITCHES[0]].fp32_precision),
    lambda value: _set_switches(value, _TF32_SWITCHES),
)


@contextmanager
def _backend_switches(tf32: bool) -> Iterator[dict[str, str]]:
    """Set every switch and yield the values read back."""
    before = {name: switch.fp32_precision for name, switch in SWITCHES.items()}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        # Torch leaves it by itself under CUDA's autocast, but not under the CPU's.
        torch.backends.mha.set_fastpath_enabled(False)
        _set_switches("ieee", tuple(SWITCHES))
        if tf32:
            _set_switches("tf32", _TF32_SWITCHES)
        yield {name: switch.fp32_precision for name, switch in SWITCHES.items()}
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for name, value in before.items():
            SWITCHES[name].fp32_precision = value
