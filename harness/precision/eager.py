"""Keeps a model's code eager while a policy is in force, and one path for all policies.

Compiled graphs never reach the op kernels of a policy and keep the precision that they were traced
in; the fused inference path of torch's transformer layers does several products in one op.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from harness.precision.module_names import ROOT

_DISABLE = "TORCHDYNAMO_DISABLE"


def compiled_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that `torch.compile` or `Module.compile` has wrapped.

    The root is called `(model)`.
    """
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    wrapper = () if compiler is None else (compiler.OptimizedModule,)
    return tuple(
        name or ROOT
        for name, module in model.named_modules()
        if isinstance(module, wrapper) or getattr(module, "_compiled_call_impl", None) is not None
    )


@contextmanager
def eager() -> Iterator[None]:
    """Run what `torch.compile` has wrapped, or wraps inside, as plain Python until the end.

    TorchScript is interpreted op by op: its optimizer differentiates by formulas of its own that do
    not know in which format an op has run, and what it does depends on what ran before. The
    compiler is not imported for it: that takes seconds.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        else:
            stack.enter_context(_compiler_disabled())
        yield


@contextmanager
def _compiler_disabled() -> Iterator[None]:
    # Read by `torch.compile` at each call; what was wrapped meanwhile stays plain Python.
    before = os.environ.get(_DISABLE)
    os.environ[_DISABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DISABLE]
        else:
            os.environ[_DISABLE] = before
