"""Python kernels at the autocast dispatch key that give an op the action a policy wants.

Each casts its arguments and calls the op again with autocast off, as torch's own autocast kernels
do (`ATen/autocast_mode.h`). Kernels are closures over everything that can be decided beforehand,
since one runs per op call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from harness.precision.kernels.registry import Kernel, Override, exists, involves, overload
from harness.precision.op_lists import (
    CPU_NATIVE_LOW,
    CPU_ONLY_FOLLOW,
    CPU_RECURRENT,
    CPU_WITHOUT_KERNEL,
    CUDA_ACTIONS,
    Action,
)

# The products that a weight used outside a layer (`h @ embedding.weight.t()`) goes through.
_WEIGHT_PRODUCTS = ("linear", "matmul", "mm", "addmm", "einsum")

_APPEND_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}


def autocast_key(device_type: str) -> str:
    """Return the dispatch key at which autocast acts for a device type."""
    return {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device_type]


def autocast_overrides(
    changes: Mapping[str, Action],
    model: nn.Module,
    *,
    device_type: str,
    low: torch.dtype,
    kept_ids: frozenset[int] = frozenset(),
    always: Collection[str] = (),
) -> list[Override]:
    """Return the kernels for all that torch's own autocast of a device does not do by itself.

    Args:
        changes: What the policy changes in CUDA's lists.
        model: Its parameters tell weights from activations.
        device_type: `cuda`, which has CUDA's lists, or `cpu`, which gets them here.
        low: The compute format.
        kept_ids: `id` of the weights whose products stay in FP32.
        always: Ops that get a kernel also where torch's own autocast does what the policy wants.
    """
    if kept_ids:
        by_weight = dict.fromkeys(_WEIGHT_PRODUCTS, Action.LOW_BUT_KEPT_WEIGHTS)
        changes = {**by_weight, **changes}
    if device_type == "cpu":
        actions = dict.fromkeys(CPU_ONLY_FOLLOW, Action.FOLLOW)
        actions |= dict.fromkeys(CPU_WITHOUT_KERNEL, Action.FP32_ROUNDED)
        actions |= dict.fromkeys(CPU_RECURRENT, Action.LOW)
        actions |= {n: a for n, a in CUDA_ACTIONS.items() if n not in CPU_NATIVE_LOW}
        actions |= changes
    else:
        actions = {n: a for n, a in changes.items() if CUDA_ACTIONS.get(n) is not a}
    actions |= {n: CUDA_ACTIONS.get(n, Action.FOLLOW) for n in always if n not in actions}
    weight_ids = frozenset(id(parameter) for parameter in model.parameters())
    key = autocast_key(device_type)
    overrides = []
    for name, action in actions.items():
        if exists(name):
            kernel = make_kernel(
                name,
                action,
                device_type=device_type,
                low=low,
                weight_ids=weight_ids,
                kept_ids=kept_ids,
            )
            overrides.append(Override(op=name, kernel=kernel, key=key))
    return overrides


def make_kernel(
    name: str,
    action: Action,
    *,
    device_type: str,
    low: torch.dtype,
    weight_ids: frozenset[int] = frozenset(),
    kept_ids: frozenset[int] = frozenset(),
) -> Kernel:
    """Return the kernel that gives op `name` an action.

    Args:
        name: Registry name of the op.
        action: What to do.
        device_type: `cpu` or `cuda`.
        low: The compute format of the policy.
        weight_ids: `id` of every parameter, which tells weights from activations.
        kept_ids: `id` of the weights whose products stay in FP32.
    """
    if action is Action.FOLLOW:
        return torch.library.fallthrough_kernel
    if action is Action.BANNED:
        return _banned(name)
    op = overload(name)
    without_autocast = _Excluded(autocast_key(device_type))
    if action is Action.FP32_SET_OPT_DTYPE:
        kernel = _set_opt_dtype(op, without_autocast)
    elif action is Action.FP32_APPEND_DTYPE:
        kernel = _append_dtype(op, overload(_APPEND_DTYPE[name]), without_autocast)
    elif action is Action.PROMOTE:
        kernel = _promoting(op, without_autocast)
    elif action is Action.FP32_BETWEEN_ACTIVATIONS:
        kernel = _by_weight(op, without_autocast, weight_ids - kept_ids, low, torch.float32)
    elif action is Action.LOW_BUT_KEPT_WEIGHTS:
        kernel = _by_weight(op, without_autocast, kept_ids, torch.float32, low)
    elif action in _CASTING_ONE:
        kernel = _casting_one(op, without_autocast, low, action)
    else:
        kernel = _casting(op, without_autocast, low if action is Action.LOW else torch.float32)
    return _above_autograd(kernel, op, without_autocast)


_CASTING_ONE = (Action.LOW_INPUT, Action.LOW_OUTPUT, Action.FP32_ROUNDED)


def _above_autograd(kernel: Kernel, op: OpOverload, without_autocast: _Excluded) -> Kernel:
    """Leave alone what a backend kernel calls inside: batch_norm's backward sums its gradient.

    There autograd's keys are excluded. The CPU's kernels are not made for another format coming
    back, as CUDA's never meet CPU autocast. In inference mode (a frozen teacher's) they are
    excluded everywhere, and nothing tells what is inside: autocast acts there all the same.
    """
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    autograd = torch._C.DispatchKey.AutogradFunctionality
    in_inference_mode = torch.is_inference_mode_enabled

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if is_excluded(autograd) and not in_inference_mode():
            with without_autocast():
                return op(*args, **kwargs)
        return kernel(*args, **kwargs)

    return guarded


class _Excluded:
    """Makes guards that take one dispatch key out of the thread's set."""

    def __init__(self, key: str) -> None:
        self._keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def __call__(self) -> Any:
        return torch._C._ExcludeDispatchKeyGuard(self._keys)


# The dtypes that autocast casts; FP64 is left alone, as torch does.
_CASTABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        if value.dtype is not dtype and value.dtype in _CASTABLE:
            return value.to(dtype)
        return value
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return [_cast(item, dtype) for item in value]
    return value


def _casting(op: OpOverload, without_autocast: _Excluded, dtype: torch.dtype) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            if kwargs:
                kwargs = {key: _cast(value, dtype) for key, value in kwargs.items()}
            return op(*[_cast(value, dtype) for value in args], **kwargs)

    return kernel


def _casting_one(
    op: OpOverload, without_autocast: _Excluded, low: torch.dtype, action: Action
) -> Kernel:
    def cast_input(first: Any, *args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            return op(_cast(first, low), *args, **kwargs)

    def cast_output(first: Any, *args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            return _cast(op(first, *args, **kwargs), low)

    def compute_in_fp32(first: Any, *args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            return _cast(op(_cast(first, torch.float32), *args, **kwargs), first.dtype)

    return {
        Action.LOW_INPUT: cast_input,
        Action.LOW_OUTPUT: cast_output,
        Action.FP32_ROUNDED: compute_in_fp32,
    }[action]


def _set_opt_dtype(op: OpOverload, without_autocast: _Excluded) -> Kernel:
    arguments = [argument.name for argument in op._schema.arguments]
    position = arguments.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            chosen = kwargs.get("dtype") is not None or (
                len(args) > position and args[position] is not None
            )
            if chosen or args[0].dtype not in _CASTABLE:
                return op(*args, **kwargs)
            kwargs["dtype"] = torch.float32
            return op(*args[:position], **kwargs)

    return kernel


def _append_dtype(op: OpOverload, with_dtype: OpOverload, without_autocast: _Excluded) -> Kernel:
    # norm.Scalar and norm.ScalarOpt_dim let the caller leave out arguments that their dtype
    # overloads require; the schema's defaults stand in.
    defaults = [argument.default_value for argument in op._schema.arguments]

    def kernel(*args: Any) -> Any:
        with without_autocast():
            if args[0].dtype not in _CASTABLE:
                return op(*args)
            return with_dtype(*args, *defaults[len(args) :], dtype=torch.float32)

    return kernel


def _promoting(op: OpOverload, without_autocast: _Excluded) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            dtypes = {
                item.dtype
                for value in args
                for item in (value if isinstance(value, (list, tuple)) else (value,))
                if isinstance(item, Tensor) and item.dtype in _CASTABLE
            }
            if len(dtypes) > 1:
                # 16-bit formats do not contain one another: FP16 with BF16 meet in FP32 too.
                return op(*[_cast(value, torch.float32) for value in args], **kwargs)
            return op(*args, **kwargs)

    return kernel


def _by_weight(
    op: OpOverload,
    without_autocast: _Excluded,
    ids: Collection[int],
    with_one: torch.dtype,
    without: torch.dtype,
) -> Kernel:
    """Cast to one format where a tensor among `ids` takes part, to another elsewhere."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = with_one if involves(args, ids) else without
        with without_autocast():
            return op(*[_cast(value, dtype) for value in args], **kwargs)

    return kernel


def _banned(name: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name} is unsafe under autocast and CUDA autocast refuses it: a sigmoid rounded to "
            "16 bits reaches exactly 0 or 1. Use binary_cross_entropy_with_logits on the logits, "
            "or keep the loss in FP32 (policy.fp32_selectors=[loss])."
        )

    return kernel
