"""What a step probe is: it looks at sampled training steps and never changes one.

A probe is one file: a class that names itself, declares its metrics and says what it wants to see.
`step_probes.StepProbes` shows it only the steps that are due and installs module hooks only on
those, so that a step without a due probe costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One declared metric of a probe.

    Attributes:
        unit: `share`, `count`, `bytes`, `log2`, or `1` for a pure number.
        description: One sentence, with the formula.
        source: Where the definition comes from; empty for a plain count.
    """

    unit: str
    description: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class NamedTensor:
    """A tensor of a module.

    Attributes:
        module: Dotted name of the module that owns it; `(model)` for the root.
        name: Name within the module: a parameter's name.
        value: Real, strided, detached, on the device; an FP16 or BF16 tensor stays one. Complex
            values are seen as pairs of reals, sparse ones as their stored values.
        source: Of a weight: the parameter itself, for reading its gradient. None for others.
    """

    module: str
    name: str
    value: Tensor
    source: Tensor | None = None


class StepProbe:
    """Base of all step probes; every method does nothing by default.

    Nothing here may wait for the device (`.item()`, `.cpu()`, `bool(tensor)`): values stay on it
    until `flush`, which the loop calls every few steps and once at the end.

    Attributes:
        name: Key in `RunRecord.probes` and in `conf/probes/`.
        metrics: Metric name -> what it means; all that `result` returns per module or per step.
        wants_activations: Whether `forward` and `output_gradient` are to be called; costs module
            hooks on due steps.
        wants_weights: Whether `before_update` is to be called and `after_update` to be given the
            weights.
    """

    name: ClassVar[str]
    metrics: ClassVar[Mapping[str, Metric]]
    wants_activations: bool = False
    wants_weights: bool = True

    def __init__(self, *, every: int, num_steps: int) -> None:
        self.every, self.num_steps = every, num_steps

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """See both once, before the first step; only to read them later."""

    def due(self, step: int) -> bool:
        """Return whether the probe looks at a step: every n-th one, and the last."""
        return step % self.every == 0 or step + 1 == self.num_steps

    def start(self, step: int, *, loss_scale: float) -> None:
        """See a due step begin; gradients of module outputs carry `loss_scale`.

        What the step is to show may be decided here: `wants_activations`, `wants_weights`.
        """

    def around_forward(self) -> AbstractContextManager[None]:
        """Return what the forward pass of a due step runs inside (loss included, backward not).

        Entered after `start`; whatever it installs, it takes away, also after an exception.
        """
        return nullcontext()

    def forward(self, module: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """See the floating-point tensors that go in and out of a module call."""

    def output_gradient(self, module: str, gradient: Tensor) -> None:
        """See the gradient of a module's output, still multiplied by the loss scale."""

    def gradients(self, gradients: Sequence[NamedTensor]) -> None:
        """See the weight gradients, unscaled and unclipped."""

    def before_update(self, parameters: Sequence[NamedTensor]) -> None:
        """See the weights just before the optimizer's step."""

    def after_update(self, parameters: Sequence[NamedTensor], *, skipped: bool) -> None:
        """See the weights after it, in the same order, or none; the step ends here."""

    def flush(self) -> None:
        """Fetch what has gathered on the device; may wait for it."""

    def result(self) -> dict[str, Any]:
        """Return what was found, as plain JSON values; called after the last `flush`."""
        return {}
