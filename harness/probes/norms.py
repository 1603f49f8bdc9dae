"""Sizes by module: weights, gradients, updates, what goes in and out, and attention logits.

Result layout: `{"steps": [...], "modules": {module: {metric: [one per step]}}}`. A value is None
where there is nothing to measure (no elements, no gradient, activations not looked at on that
step), and where squares leave FP32's range though the values do not; a metric that never had a
value is left out of its module. NaN and infinity mean that the tensors held them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from harness.probes.attention_logits import AttentionLogits
from harness.probes.base import Metric, NamedTensor, StepProbe
from harness.probes.norm_columns import NormColumns, SeenStep
from harness.probes.tensor_sizes import CallSizes, Gathered, gather

# Module hooks cost several times what weights, gradients and updates do together.
ACTIVATIONS_EVERY = 50
# Combined one by one, steps would cost several times as much; of large models they are large.
_STEPS_AT_ONCE = 25
_SOURCE = "root mean square: sqrt(sum x^2 / n) over all elements of the module's own tensors"


def _rms(what: str) -> Metric:
    return Metric(unit="1", description=f"Root mean square of {what}.", source=_SOURCE)


def _largest(what: str) -> Metric:
    return Metric(unit="1", description=f"Largest magnitude of {what}.")


class NormsProbe(StepProbe):
    """Measures sizes on due steps; activations and logits on fewer of them."""

    name = "norms"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "weight_rms": _rms("the weights before the update"),
        "weight_max": _largest("the weights before the update"),
        "grad_rms": _rms("the unscaled, unclipped weight gradients"),
        "grad_max": _largest("the unscaled, unclipped weight gradients"),
        "grad_zero_share": Metric(
            unit="share", description="Elements of the weight gradients that are exactly zero."
        ),
        "update_rms": _rms("what the optimizer's step added to the weights; 0 if it was skipped"),
        "update_max": _largest("what the optimizer's step added to the weights"),
        "update_to_weight": Metric(
            unit="1",
            description="L2 norm of the update over that of the weights; none for zero weights.",
            source="You et al. 2017 (LARS), section 4: the ratio of norms by layer",
        ),
        "input_rms": _rms("the floating-point inputs of the module's calls"),
        "input_max": _largest("the floating-point inputs of the module's calls"),
        "output_rms": _rms("the floating-point outputs of the module's calls"),
        "output_max": _largest("the floating-point outputs of the module's calls"),
        "output_zero_share": Metric(
            unit="share", description="Elements of the module's outputs that are exactly zero."
        ),
        "attention_logit_max": Metric(
            unit="1",
            description="Largest input of the module's softmax, or scaled query-key product.",
            source="Dehghani et al. 2023 (ViT-22B), section 2: growing logits precede divergence",
        ),
    }
    wants_activations = True

    def __init__(self, *, every: int, num_steps: int) -> None:
        super().__init__(every=every, num_steps=num_steps)
        self._model: nn.Module | None = None
        self._seen: list[SeenStep] = []
        self._before: Gathered | None = None
        self._inputs, self._outputs = CallSizes(zeros=False), CallSizes(zeros=True)
        self._logits: AttentionLogits | None = None
        self._fetched: list[SeenStep] = []
        self._columns = NormColumns()

    def sees_activations(self, step: int) -> bool:
        """Return whether the module calls of a due step are looked at."""
        return step % max(self.every, ACTIVATIONS_EVERY) == 0 or step + 1 == self.num_steps

    def start(self, step: int, *, loss_scale: float) -> None:
        """Begin a step."""
        del loss_scale
        self._seen = [seen for seen in self._seen if seen.complete]
        self._seen.append(SeenStep(step=step))
        self._inputs, self._outputs = CallSizes(zeros=False), CallSizes(zeros=True)
        self.wants_activations = self.sees_activations(step)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Remember the model, whose modules attention logits are told by."""
        del optimizer
        self._model = model

    def around_forward(self) -> AbstractContextManager[None]:
        """Return the context that watches attention logits, on steps that see activations."""
        if not self.wants_activations or self._model is None:
            return nullcontext()
        self._logits = AttentionLogits()
        return self._logits.watching(self._model)

    def forward(self, module: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Measure what went in and came out of a call."""
        if self.wants_activations:
            self._inputs.add(module, inputs)
            self._outputs.add(module, outputs)

    def gradients(self, gradients: Sequence[NamedTensor]) -> None:
        """Measure the weight gradients."""
        found = gather(gradients)
        if found is not None:
            self._current.sizes["grad"] = found.measured(zeros=True)

    def before_update(self, parameters: Sequence[NamedTensor]) -> None:
        """Measure the weights and keep a copy."""
        found = gather(parameters)
        if found is not None:
            self._current.sizes["weight"] = found.measured()
            self._before = found.copied()

    def after_update(self, parameters: Sequence[NamedTensor], *, skipped: bool) -> None:
        """Measure what the optimizer changed."""
        seen = self._current
        seen.skipped = skipped
        before, self._before = self._before, None
        after = gather(parameters) if before is not None and not skipped else None
        if before is not None and after is not None:
            seen.sizes["update"] = after.minus(before).measured()
        seen.sizes["input"] = self._inputs.measured()
        seen.sizes["output"] = self._outputs.measured()
        self._inputs, self._outputs = CallSizes(zeros=False), CallSizes(zeros=True)
        if self._logits is not None:
            seen.logits, self._logits = self._logits.largest, None
        seen.complete = True

    def flush(self) -> None:
        """Fetch the numbers of all completed steps; combine them by module once they are many."""
        done = [seen for seen in self._seen if seen.complete]
        self._seen = [seen for seen in self._seen if not seen.complete]
        self._fetched += [seen.on_cpu() for seen in done]
        if len(self._fetched) >= _STEPS_AT_ONCE:
            self._combine()

    def result(self) -> dict[str, Any]:
        """Return the steps and a column for every metric of every module."""
        self._combine()
        return {"steps": list(self._columns.steps), "modules": self._columns.result()}

    def _combine(self) -> None:
        if self._fetched:
            self._columns.add(self._fetched)
            self._fetched = []

    @property
    def _current(self) -> SeenStep:
        return self._seen[-1]
