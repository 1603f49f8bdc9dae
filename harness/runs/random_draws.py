"""Random draws that depend on the seed and the place in the step, never on dtypes or values.

Three kinds need help: draws into 16-bit tensors (kernels draw other numbers there), draws compared
with a computed probability (its rounding must not count as another draw), and samplers that take
from the generator as much as the data ask for, which would shift every later draw of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
_DRAWS = ("normal_", "uniform_", "exponential_", "bernoulli_.float")
# By rejection, so that the number of draws follows the parameters of the distribution.
_SAMPLERS = ("_standard_gamma", "_sample_dirichlet", "poisson", "binomial")

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
    kernels["bernoulli_.Tensor"] = _bernoulli_kernel
    for name, kernel in kernels.items():
        library.impl(name, kernel, backend, with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]


def _draw_kernel(name: str, key: str, record: Record) -> Callable[..., Tensor]:
    native = torch.library.get_kernel(f"aten::{name}", key)

    def kernel(keyset: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.dtype not in LOW_PRECISION:
            native.call_boxed(keyset, x, *args, **kwargs)
            record(x)
            return x
        wide = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        native.call_boxed(keyset, wide, *args, **kwargs)
        record(wide)
        return x.copy_(wide)

    return kernel


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
        # One draw of the step's generator, however many the sampler needs.
        generator = args[-1] if isinstance(args[-1], Generator) else _child_of_default(tensors[0])
        dtype = tensors[0].dtype
        wide = [value.float() if value.dtype in LOW_PRECISION else value for value in tensors]
        result: Tensor = native.call_boxed(keyset, *wide, generator)
        return result.to(dtype)

    return kernel


def _child_of_default(like: Tensor) -> Generator:
    key = int(torch.empty((), dtype=torch.int64).random_())
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
