"""A gradient in FP64, as the truth beside which FP32 and a candidate are measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.precision.storage import stored_in
from harness.precision.undisturbed import undisturbed
from harness.runs.determinism import seed_torch, stream_seed
from harness.runs.same_point.state_now import StateNow, clear_gradients, flat_gradient
from harness.workloads.base import Workload
from harness.workloads.batches import iter_tensors, to_device


class NotInFP64Error(ValueError):
    """The model cannot be computed in FP64 throughout; the message says why."""


def fp64_gradient(
    workload: Workload, state: StateNow, batch: Any, *, seed: int, device: torch.device
) -> list[Tensor]:
    """Return the unclipped gradient of the first batch of `StepsAside` in FP64.

    Args:
        workload: The run's.
        state: Where the run is; its model is undisturbed on return.
        batch: The batch.
        seed: As given to `StepsAside`; dropout masks are those of its first step.
        device: Where the model is; FP32 is in force.

    Returns:
        One flat FP64 tensor per parameter.

    Raises:
        NotInFP64Error: Code of the model casts to a format below FP32, draws random numbers in
            its own, or mixes formats.
    """
    widened = _Widened()
    moved = to_device(batch, device)
    for tensor in iter_tensors(moved):
        if tensor.dtype is torch.float32:
            tensor.data = tensor.data.double()
    try:
        with undisturbed(state.model), stored_in(state.model, torch.float64), widened:
            seed_torch(stream_seed(seed, stream="step", index=0), device)
            loss = workload.loss_fn(state.model, moved)
            loss.backward()  # type: ignore[no-untyped-call]
            # Read inside: on leaving the gradients go.
            gradients = [flat_gradient(p) for p in state.parameters]
    except RuntimeError as error:
        raise NotInFP64Error(f"it raised {str(error).splitlines()[0]!r}") from error
    finally:
        clear_gradients(state)
    if widened.failed is not None:
        raise NotInFP64Error(widened.failed)
    return gradients


class _Widened(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads casts to FP32, and constants in it, as FP64; notices where FP64 is left."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failed: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_cast = func is torch.ops.aten._to_copy.default
        if is_cast and kwargs.get("dtype") is torch.float32 and args[0].dtype in _EXACT_IN_FP64:
            kwargs["dtype"] = torch.float64
        elif not is_cast and not func._schema.is_mutable:
            args, kwargs = _all_wide(args, kwargs)
        result = func(*args, **kwargs)
        if self.failed is None:
            self.failed = _why(func, (args, kwargs), result)
        return result


# Of these FP32 itself holds a rounded value at most, so FP64 is what is meant.
_EXACT_IN_FP64 = (torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


def _all_wide(args: Any, kwargs: Any) -> Any:
    """Return inputs with FP32 ones in FP64 where both occur: by promotion a scalar gives way."""
    dtypes = {t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
    if not {torch.float64, torch.float32} <= dtypes:
        return args, kwargs
    return tree_map_only(Tensor, _widened_fp32, (args, kwargs))


def _widened_fp32(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype is torch.float32 else tensor


def _why(func: Any, inputs: Any, result: Any) -> str | None:
    outputs = {t.dtype for t in tree_leaves(result) if isinstance(t, Tensor)}
    name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
    # Attention is tagged for its dropout, which `paired_dropout` draws outside of it.
    is_random = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name
    if is_random and torch.float64 in outputs:
        return f"its random numbers ({name}) differ by format"
    reads = {t.dtype for t in tree_leaves(inputs) if isinstance(t, Tensor)}
    narrow = {d for d in outputs if d.is_floating_point} - {torch.float64}
    if torch.float64 in reads and narrow:
        return f"its own code leaves FP64 ({name})"
    return None
