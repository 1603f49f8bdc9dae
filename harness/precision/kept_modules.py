"""Keeps chosen modules of a model in FP32, whatever makes the rest of it lower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext

from torch import nn

from harness.precision.directions import DIRECTIONS, Direction
from harness.precision.emulation.products import Directions, RoundedProducts
from harness.precision.passes import Passes
from harness.precision.regions import Region, directed_region, fp32_region, ieee_region, in_region


@contextmanager
def kept_in_fp32(
    model: nn.Module,
    names: Mapping[str, tuple[Direction, ...]],
    *,
    device_type: str,
    passes: Passes,
    products: RoundedProducts | None = None,
    switch: tuple[Callable[[], str], Callable[[str], None]] | None = None,
) -> Iterator[None]:
    """Run modules in FP32 until the context ends.

    Args:
        model: Their `forward` is replaced for the time.
        names: The modules, and in which directions they are kept. One direction means the
            outermost module of those named for it: its gradients are those of all of it in low
            precision.
        device_type: `cpu` or `cuda`.
        passes: Is told which of two runs of a module is which.
        products: What rounds the operands of products, for formats that no tensor has. One
            direction then means each product's own.
        switch: Reads and writes a GPU's TF32 switch, where that makes the format.
    """
    with ExitStack() as stack:
        for name, directions in names.items():
            inside: tuple[str, ...] = (name,)
            if switch is not None:
                region = ieee_region(*switch, directions=directions)
            elif products is not None:
                region = _unrounded(products, directions, device_type)
                inside = _with_inner(model, name)
            elif directions == DIRECTIONS:
                region = fp32_region(device_type, nullcontext)
            elif any(names.get(outer) == directions for outer in _around(name)):
                continue
            else:
                region = directed_region(
                    model.get_submodule(name),
                    directions[0],
                    kept=fp32_region(device_type, nullcontext),
                    passes=passes,
                )
            stack.enter_context(in_region(model, inside, region))
        yield


def _unrounded(
    products: RoundedProducts, directions: tuple[Direction, ...], device_type: str
) -> Region:
    kept = Directions(forward="forward" in directions, backward="backward" in directions)
    return fp32_region(device_type, lambda: products.keeping_fp32(kept))


def _around(name: str) -> list[str]:
    """Return the names of the modules that a module is in, but for the root.

    >>> _around("blocks.0.norm")
    ['blocks', 'blocks.0']
    """
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _with_inner(model: nn.Module, name: str) -> tuple[str, ...]:
    """Return a module's name and those of all modules in it.

    Checkpointing calls them once more in backward, when nothing says that the outer one is kept.
    """
    inner = model.get_submodule(name).named_modules(prefix=name)
    return tuple(inner_name for inner_name, _ in inner)
