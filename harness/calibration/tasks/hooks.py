"""What a fault may do around an optimizer's step."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer


@runtime_checkable
class OptimizerHook(Protocol):
    """Acts before or after each step of an optimizer; a frozen value, shared by all runs.

    What it keeps between steps belongs into the closures that `install` makes: one hook serves
    many runs.
    """

    def install(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Register itself with `register_step_pre_hook` or `register_step_post_hook`."""
        ...
