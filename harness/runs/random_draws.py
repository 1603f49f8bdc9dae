"""Random draws that depend on the seed and the place in the step, never on dtypes or values.

Three kinds need help: draws into 16-bit tensors (kernels draw other numbers there), draws compared
with a computed probability (its rounding must not count as another draw), and samplers that take
from the generator as much as the data ask for, which would shift every later draw of the step.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
_DRAWS = (
    "normal_",
    "uniform_",
    "exponential_",
    "bernoulli_.float",
    "log_normal_",
    "cauchy_",
    "geometric_",
)
# With a tensor of means or deviations ATen draws inside, past `normal_`.
_NORMALS = ("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor")
# By rejection, so that the number of draws follows the parameters of the distribution.
_SAMPLERS = ("_standard_gamma", "_sample_dirichlet", "poisson", "binomial")

# NumPy needs 25 us to copy its state, so it is looked at in one step of eight. Once two runs draw
# differently, they stay apart: a later look finds it too.
_LOOK_EVERY = 8

Record = Callable[[Tensor], None]


def register_draws(library: torch.library.Library, backend: str, record: Record) -> None:
    """Register the kernels of all random draws but dropout.

    Args:
        library: Where to; its end undoes it.
        backend: `CPU` or `CUDA`.
        record: Takes the FP32 numbers drawn, before anything is computed with them.
    """
    library.impl("rrelu", _rrelu, f"Autograd{backend}")  # type: ignore[no-untyped-call]
    library.impl("rrelu_", _rrelu_, f"Autograd{backend}")  # type: ignore[no-untyped-call]
    if not hasattr(torch.library, "get_kernel"):
        return
    kernels = {name: _draw_kernel(name, backend, record) for name in _DRAWS}
    kernels |= {name: _sampler_kernel(name, backend) for name in _SAMPLERS}
    kernels |= dict.fromkeys(_NORMALS, _normal_kernel)
    kernels["bernoulli_.Tensor"] = _bernoulli_kernel
    for name, kernel in kernels.items():
        library.impl(name, kernel, backend, with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the format in which numbers for a tensor of `dtype` are drawn."""
    if dtype in LOW_PRECISION:
        return torch.float32
    return torch.complex64 if dtype is torch.complex32 else dtype


def _draw_kernel(name: str, key: str, record: Record) -> Callable[..., Tensor]:
    native = torch.library.get_kernel(f"aten::{name}", key)

    def kernel(keyset: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wide_dtype = _wide_dtype(x.dtype)
        # ATen takes other numbers for a tensor that is not contiguous, and whether one is may
        # depend on what made it.
        if x.dtype is wide_dtype and x.is_contiguous():
            native.call_boxed(keyset, x, *args, **kwargs)
            record(x)
            return x
        wide = torch.empty(x.shape, dtype=wide_dtype, device=x.device)
        native.call_boxed(keyset, wide, *args, **kwargs)
        record(wide)
        return x.copy_(wide)

    return kernel


def _normal_kernel(
    keyset: Any, mean: Any, std: Any = 1.0, *, generator: Generator | None = None
) -> Tensor:
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    dtype = tensors[0].dtype
    if isinstance(std, Tensor) and std.is_complex():
        raise RuntimeError("normal expects standard deviation to be non-complex")
    if (std < 0).any() if isinstance(std, Tensor) else std < 0:
        raise RuntimeError("normal expects all elements of std >= 0.0")
    shape = torch.broadcast_tensors(*tensors)[0].shape  # type: ignore[no-untyped-call]
    # `normal_` records the draw; in ATen's order of operations, so that FP32 results are its own.
    draw = torch.empty(shape, dtype=_wide_dtype(dtype), device=tensors[0].device)
    result: Tensor = (draw.normal_(generator=generator) * std + mean).to(dtype)
    return result


def _bernoulli_kernel(
    keyset: Any, x: Tensor, p: Tensor, *, generator: Generator | None = None
) -> Tensor:
    # `uniform_` records the draw itself: p was computed, and its rounding may flip a result.
    draw = torch.empty(x.shape, dtype=torch.float32, device=x.device).uniform_(generator=generator)
    return x.copy_(draw < p)


def _sampler_kernel(name: str, key: str) -> Callable[..., Tensor]:
    native = torch.library.get_kernel(f"aten::{name}", key)

    def kernel(keyset: Any, *args: Any) -> Tensor:
        tensors = [value for value in args if isinstance(value, Tensor)]
        # One draw of the generator, however many the sampler needs.
        given = args[-1] if isinstance(args[-1], Generator) else None
        generator = _child(given, tensors[0])
        dtype = tensors[0].dtype
        wide = [value.float() if value.dtype in LOW_PRECISION else value for value in tensors]
        result: Tensor = native.call_boxed(keyset, *wide, generator)
        return result.to(dtype)

    return kernel


def _child(parent: Generator | None, like: Tensor) -> Generator:
    """Return a generator seeded by one draw of a CPU generator, by default the global one.

    A GPU's generator is returned itself: its draw would have to be waited for.
    """
    if parent is not None and parent.device.type != "cpu":
        return parent
    key = int(torch.empty((), dtype=torch.int64).random_(generator=parent))
    return Generator(like.device).manual_seed(key)


def _rrelu(
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Randomized leaky ReLU; ATen's kernel draws a slope for the negative elements only."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    slope = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    slope = slope.uniform_(lower, upper, generator=generator)
    return torch.where(x > 0, x, (x * slope).to(x.dtype))


def _rrelu_(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.copy_(_rrelu(x, *args, **kwargs))


class HostGenerators:
    """Notices what a model draws from NumPy's and Python's global generators.

    They are seeded once per run and go on from step to step, shared with the batch iterator.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._at_start = _host_state()

    def drawn(self) -> int:
        """Return a number for where the generators are after a step.

        0 where nothing was drawn since the run's start, and in most steps, where nobody looks.
        """
        self._steps += 1
        if self._steps % _LOOK_EVERY != 1:
            return 0
        state = _host_state()
        return 0 if state == self._at_start else state


def _host_state() -> int:
    state = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one is meant
    inner = dict(state.pop("state"))
    key = np.asarray(inner.pop("key", 0))
    numpy_sum = zlib.crc32(f"{state} {inner}".encode(), zlib.crc32(key.tobytes()))
    _, words, gauss = random.getstate()
    python_sum = zlib.crc32(str(gauss).encode(), zlib.crc32(np.array(words).tobytes()))
    return (numpy_sum << 32) | python_sum
