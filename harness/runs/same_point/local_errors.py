"""Rounding error module by module: each is called again, alone, under the candidate's arithmetic.

One FP32 forward pass is recorded: what went into every module and what came out. A candidate then
hands each module the same inputs, rounded to the format in which its own forward pass hands them
over, and the output is compared with FP32's on the same rounded inputs. So an error stands where it
is made and not where it arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from harness.numerics.errors import relative_error_where_finite
from harness.precision.execution import Execution
from harness.precision.module_calls import hookable_modules
from harness.precision.module_names import ROOT
from harness.precision.tensor_trees import leaves as dataclass_leaves
from harness.precision.undisturbed import undisturbed
from harness.runs.same_point.integer_casts import EXACT_INTEGERS, SIXTEEN_BIT, IntegerCasts

MEMORY_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class LocalError:
    """What one module does by itself; see `ModuleError` of its record for the meaning."""

    error: float | None
    output_max: float | None
    integer_input_max: float | None


@dataclass
class _Call:
    """The first call of one module."""

    module: nn.Module
    leaves: list[Any]
    spec: TreeSpec
    random_state: tuple[Tensor, Tensor | None]
    outputs: list[Tensor] | None = None

    def arguments(self, dtypes: Mapping[int, torch.dtype]) -> tuple[Any, Any]:
        """Return args and kwargs anew, with leaves rounded as `dtypes` says."""
        leaves = [_anew(leaf, dtypes.get(i)) for i, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


class LocalErrors:
    """The recorded calls of one FP32 forward pass.

    Attributes:
        is_partial: Whether modules were left out because their inputs take too much memory.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._calls: dict[str, _Call] = {}
        self._rounded: dict[tuple[str, tuple[tuple[int, torch.dtype], ...]], list[Tensor]] = {}
        self._num_bytes = 0
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.is_partial = False

    @classmethod
    def record(
        cls, model: nn.Module, forward: Callable[[], object], *, device: torch.device
    ) -> LocalErrors:
        """Run `forward` in FP32 and keep the first call of every module; the model undisturbed."""
        recorded = cls(model, device)
        with undisturbed(model), recorded._hooks():
            forward()
        recorded._copies.clear()  # also lets go of the activations themselves
        recorded._calls = {k: c for k, c in recorded._calls.items() if c.outputs is not None}
        return recorded

    def handed_over(self, forward: Callable[[], object]) -> dict[str, dict[int, torch.dtype]]:
        """Return by module the inputs that the candidate hands over in 16 bits.

        Args:
            forward: Runs the candidate's forward pass; its policy is in force.

        Returns:
            Module name -> position among the inputs' leaves -> dtype.
        """
        seen: dict[str, dict[int, torch.dtype]] = {}

        def look(name: str, args: Any, kwargs: Any) -> None:
            call = self._calls.get(name)
            if call is None or name in seen or not _is_plain_call():
                return
            leaves = tree_leaves((args, kwargs))
            same = len(leaves) == len(call.leaves)
            seen[name] = {
                i: leaf.dtype
                for i, leaf in enumerate(leaves if same else [])
                if isinstance(leaf, Tensor) and leaf.dtype in SIXTEEN_BIT
            }

        with undisturbed(self._model), _pre_hooks(self._model, look):
            forward()
        return {name: dtypes for name, dtypes in seen.items() if dtypes}

    def prepare(self, dtypes: Mapping[str, Mapping[int, torch.dtype]]) -> None:
        """Compute FP32's outputs on rounded inputs; FP32 is in force."""
        for name, of_module in dtypes.items():
            key = (name, tuple(sorted(of_module.items())))
            if key not in self._rounded and any(
                isinstance(leaf, Tensor) and leaf.dtype is torch.float32
                for i, leaf in enumerate(self._calls[name].leaves)
                if i in of_module
            ):
                outputs = self._call_again(name, of_module, back_to_fp32=True)
                if outputs is not None:
                    self._rounded[key] = outputs

    def compare(
        self, execution: Execution, dtypes: Mapping[str, Mapping[int, torch.dtype]]
    ) -> dict[str, LocalError]:
        """Return every module's own error under the candidate that is in force."""
        found: dict[str, LocalError] = {}
        for name, call in self._calls.items():
            of_module = dtypes.get(name, {})
            key = (name, tuple(sorted(of_module.items())))
            assert call.outputs is not None
            expected = self._rounded.get(key, call.outputs)
            casts = IntegerCasts()
            if _is_below(name, execution.fp32_module_names):
                error: float | None = 0.0 if expected else None
            else:
                with execution.forward(), casts:
                    outputs = self._call_again(name, of_module)
                error = _error(outputs, expected)
            found[name] = LocalError(
                error=error,
                output_max=_largest(call.outputs),
                integer_input_max=_rounded_integers(call, of_module, casts.largest),
            )
        return found

    def _call_again(
        self, name: str, dtypes: Mapping[int, torch.dtype], *, back_to_fp32: bool = False
    ) -> list[Tensor] | None:
        """Return the floating outputs of one module alone; None if it raises."""
        call = self._calls[name]
        args, kwargs = call.arguments(dtypes)
        if back_to_fp32:
            leaves, spec = tree_flatten((args, kwargs))
            args, kwargs = tree_unflatten([_as_fp32(leaf) for leaf in leaves], spec)
        self._set_random_state(call.random_state)
        try:
            with undisturbed(call.module):
                return [t.detach() for t in _floating(call.module(*args, **kwargs))]
        except Exception:  # noqa: BLE001 - a module may not work alone; then it has no figure
            return None

    def _random_state(self) -> tuple[Tensor, Tensor | None]:
        is_cuda = self._device.type == "cuda"
        state = torch.cuda.get_rng_state(self._device) if is_cuda else None
        return torch.default_generator.get_state(), state

    def _set_random_state(self, state: tuple[Tensor, Tensor | None]) -> None:
        torch.default_generator.set_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self._device)

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        running: Counter[str] = Counter()

        def before(name: str, args: Any, kwargs: Any) -> None:
            running[name] += 1
            if name in self._calls or self.is_partial or not _is_plain_call():
                return
            leaves, spec = tree_flatten((args, kwargs))
            self._calls[name] = _Call(
                module=self._model.get_submodule("" if name == ROOT else name),
                leaves=[self._copied(leaf) for leaf in leaves],
                spec=spec,
                random_state=self._random_state(),
            )
            self.is_partial = self._num_bytes > MEMORY_LIMIT_BYTES

        def after(name: str, output: Any) -> None:
            running[name] -= 1
            call = self._calls.get(name)
            # A module that calls itself returns from its inner call first.
            if call is not None and call.outputs is None and not running[name]:
                call.outputs = [self._copied(t) for t in _floating(output)]

        handles = []
        for name, module in hookable_modules(self._model):
            handles.append(
                module.register_forward_hook(
                    lambda _module, _args, output, name=name or ROOT: after(name, output),
                    always_call=True,
                )
            )
        try:
            with _pre_hooks(self._model, before):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _copied(self, leaf: Any) -> Any:
        """Return a copy that later in-place ops do not reach; one for all who hold the tensor."""
        if not isinstance(leaf, Tensor):
            return leaf
        key = (id(leaf), 0 if leaf.is_inference() else leaf._version)
        if key not in self._copies:
            copied = leaf.detach().clone()
            copied.requires_grad_(leaf.requires_grad)
            self._num_bytes += copied.numel() * copied.element_size()
            self._copies[key] = (leaf, copied)
        return self._copies[key][1]


@contextmanager
def _pre_hooks(model: nn.Module, look: Callable[[str, Any, Any], None]) -> Iterator[None]:
    handles = []
    for name, module in hookable_modules(model):

        def hook(_module: nn.Module, args: Any, kwargs: Any, name: str = name or ROOT) -> None:
            look(name, args, kwargs)

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_plain_call() -> bool:
    """Return whether a call's tensors live on after it: those of torch.func transforms do not."""
    return not torch._C._are_functorch_transforms_active()


def _floating(value: Any) -> list[Tensor]:
    """Return the real strided tensors; nested and sparse ones cannot be compared."""
    parts = (part for leaf in tree_leaves(value) for part in dataclass_leaves(leaf))
    return [t for t in parts if isinstance(t, Tensor) and t.is_floating_point() and _is_dense(t)]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _anew(leaf: Any, dtype: torch.dtype | None) -> Any:
    """Return a tensor's values in a new tensor, rounded if `dtype` says so; others as they are."""
    if not isinstance(leaf, Tensor):
        return leaf
    copied = leaf.detach().clone() if dtype is None else leaf.detach().to(dtype, copy=True)
    # Where gradients are taken it must not be a leaf of the graph: modules may change it in place.
    return copied.requires_grad_().clone() if leaf.requires_grad else copied


def _as_fp32(leaf: Any) -> Any:
    is_low = isinstance(leaf, Tensor) and leaf.dtype in SIXTEEN_BIT
    return _anew(leaf, torch.float32) if is_low else leaf


def _is_below(name: str, kept: tuple[str, ...]) -> bool:
    """Return whether a module lies inside one that runs in FP32; alone it would not know."""
    return any(name.startswith(f"{outer}.") for outer in kept)


def _error(outputs: list[Tensor] | None, expected: list[Tensor]) -> float | None:
    if outputs is None or not expected:
        return None
    if [t.shape for t in outputs] != [t.shape for t in expected]:
        return None
    return relative_error_where_finite(_joined(outputs), _joined(expected))


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])


def _largest(tensors: list[Tensor]) -> float | None:
    largest = [float(t.detach().double().abs().max()) for t in tensors if t.numel()]
    return max(largest, default=None)


def _rounded_integers(
    call: _Call, dtypes: Mapping[int, torch.dtype], inside: float | None
) -> float | None:
    """Return the largest of whole numbers that a 16-bit format turned into other ones.

    Either before they were handed over, or in the module (`inside`).
    """
    largest: list[float] = [] if inside is None else [inside]
    for index, dtype in dtypes.items():
        leaf = call.leaves[index]
        if not isinstance(leaf, Tensor) or leaf.dtype is not torch.float32 or not leaf.numel():
            continue
        if not _is_dense(leaf):
            continue
        values = leaf.detach()
        top = float(values.abs().max())
        is_whole = EXACT_INTEGERS < top < float("inf") and bool((values == values.round()).all())
        if is_whole and bool((values.to(dtype).float() != values).any()):
            largest.append(top)
    return max(largest, default=None)
