"""All op kernels that a policy needs on a device, each direction as the policy has it."""

from __future__ import annotations

from torch import nn

from harness.precision.backend import LOW_DTYPES, Plan, product_kernels
from harness.precision.directions import DIRECTIONS
from harness.precision.emulation.products import RoundedProducts
from harness.precision.emulation.sixteen_bit import sixteen_bit_overrides
from harness.precision.kernels.autocast import autocast_overrides
from harness.precision.kernels.directed import merged
from harness.precision.kernels.registry import Override, functional_overloads
from harness.precision.modules import OutputHead
from harness.precision.op_lists import Action, policy_actions
from harness.precision.passes import Passes
from harness.precision.policy import PrecisionPolicy


def policy_kernels(
    policy: PrecisionPolicy,
    model: nn.Module,
    *,
    plan: Plan,
    device_type: str,
    head: OutputHead,
    passes: Passes,
    products: RoundedProducts | None,
    used: set[str],
) -> list[Override]:
    """Return the kernels to register while a policy is in force.

    Args:
        policy: The policy.
        model: Its parameters tell weights from activations.
        plan: From `backend.choose`.
        device_type: `cpu` or `cuda`.
        head: A weight in it keeps its products in FP32.
        passes: Is told which of two runs of an op is which.
        products: What rounds the operands of products, for formats that no tensor has.
        used: Receives the name of every op that was emulated.

    Raises:
        ValueError: An op name is unknown, or an op cannot be singled out on this device.
    """
    if policy.compute_format == "fp32":
        return []
    kept_ids = frozenset() if head.weight is None else frozenset({id(head.weight)})
    forward, backward = (
        policy_actions(policy, functional_overloads, direction=direction)
        for direction in DIRECTIONS
    )
    low = LOW_DTYPES.get(policy.compute_format)
    if low is None:
        return product_kernels(products, forward=forward, backward=backward, kept_ids=kept_ids)

    names = forward.keys() | backward.keys()
    differing = frozenset(n for n in names if forward.get(n) is not backward.get(n))

    def kernels(changes: dict[str, Action]) -> list[Override]:
        return autocast_overrides(
            changes,
            model,
            device_type=device_type,
            low=low,
            kept_ids=kept_ids,
            always=differing,
        )

    result = kernels(forward)
    if differing:
        result = merged(result, kernels(backward), differing=differing, passes=passes)
    return [*result, *sixteen_bit_overrides(low, plan.emulated_ops, used)]
