"""All step probes of a run behind one face: what a due step shows them, and what they say.

A probe is shown the steps it is due at and nothing else; module hooks exist only while a due step
that wants them runs its forward and backward pass. To add a probe, write its file and name its
class in `STEP_PROBES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from harness.precision.module_names import ROOT
from harness.probes.activations import ActivationHooks
from harness.probes.base import StepProbe
from harness.probes.exponents import ExponentsProbe
from harness.probes.lost_updates import LostUpdatesProbe
from harness.probes.memory import MemoryProbe
from harness.probes.named_tensors import NamedTensors
from harness.probes.norms import NormsProbe
from harness.probes.tensors import real_view, unseen

STEP_PROBES: Mapping[str, type[StepProbe]] = {
    probe.name: probe for probe in (ExponentsProbe, NormsProbe, LostUpdatesProbe, MemoryProbe)
}
# Owner of a parameter that the optimizer updates and no module holds.
NO_MODULE = "(no module)"
# Modules of all parameters, and their names in those.
Owners = tuple[tuple[str, ...], tuple[str, ...]]


class StepProbes:
    """Watches due steps; reads gradients, weights and activations and never writes them.

    Args:
        chosen: Probe name -> keyword arguments of its class beside `num_steps`.
        num_steps: Planned steps of the run.

    Raises:
        ValueError: A probe is unknown; the message lists the known ones.
    """

    def __init__(self, chosen: Mapping[str, Mapping[str, Any]], *, num_steps: int) -> None:
        for name in chosen:
            if name not in STEP_PROBES:
                raise ValueError(f"probe {name!r} is unknown; known: {', '.join(STEP_PROBES)}")
        self._probes = {
            name: STEP_PROBES[name](num_steps=num_steps, **values)
            for name, values in chosen.items()
        }
        self._hooks: ActivationHooks | None = None
        self._parameters: list[Tensor] = []
        self._owners: Owners = ((), ())
        self._due: list[StepProbe] = []
        self._not_applicable: set[str] = set()

    def attach(self, model: nn.Module, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Learn names before the first step.

        Args:
            model: Module names are its own; the root is called `(model)`.
            optimizer: Whose steps are watched.
            parameters: What it updates, each once. A tied weight belongs to the first module that
                holds it.
        """
        self._parameters = list(parameters)
        self._owners = _owners(model, parameters)
        self._hooks = ActivationHooks(model)
        for probe in self._probes.values():
            probe.attach(model, optimizer)

    def due(self, step: int) -> bool:
        """Return whether any probe looks at a step."""
        return any(probe.due(step) for probe in self._probes.values())

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        """Surround the forward pass of the step being watched."""
        with ExitStack() as stack:
            for probe in self._due:
                stack.enter_context(probe.around_forward())
            yield

    @contextmanager
    def watching(self, step: int, *, loss_scale: float) -> Iterator[None]:
        """Show one step to the probes that are due; hooks are gone on every exit."""
        self._due = [probe for probe in self._probes.values() if probe.due(step)]
        for probe in self._due:
            probe.start(step, loss_scale=loss_scale)
        with ExitStack() as stack:
            wanting = [probe for probe in self._due if probe.wants_activations]
            if wanting and self._hooks is not None:
                stack.enter_context(self._hooks.shown_to(wanting))
            try:
                yield
            finally:
                self._due = []

    def gradients(self, gradients: Sequence[Tensor]) -> None:
        """See the unscaled, unclipped gradients of a step, those of missing ones left out.

        Args:
            gradients: Real strided views in the order of the parameters.
        """
        if self._hooks is not None:
            # What runs after the first backward pass (a closure's further ones) is not shown.
            self._hooks.end()
        listening = [probe for probe in self._due if _overrides(probe, "gradients")]
        if not listening:
            return
        owners = self._owners
        if len(gradients) != len(self._parameters):
            present = [k for k, p in enumerate(self._parameters) if p.grad is not None]
            owners = _chosen(owners, present)
        named = NamedTensors(owners, gradients)
        with unseen():
            for probe in listening:
                probe.gradients(named)

    def before_update(self, parameters: Sequence[Tensor]) -> None:
        """See the weights before the optimizer's step."""
        listening = [probe for probe in self._due if probe.wants_weights]
        if listening:
            with unseen():
                named = self._named(parameters)
                for probe in listening:
                    probe.before_update(named)

    def after_update(self, parameters: Sequence[Tensor], *, skipped: bool) -> None:
        """See the weights after it, or that it was left out."""
        with unseen():
            wanted = any(probe.wants_weights for probe in self._due)
            named = self._named(parameters) if wanted else NamedTensors(((), ()), ())
            for probe in self._due:
                probe.after_update(named, skipped=skipped)

    def flush(self) -> None:
        """Fetch what has gathered on the device; waits for it."""
        for probe in self._probes.values():
            probe.flush()

    def results(self) -> dict[str, dict[str, Any]]:
        """Return probe name -> what it found, plain JSON values; after the last `flush`.

        `not_applicable`, where present, says which tensors the probe could not look at, and why.
        """
        activations = set() if self._hooks is None else self._hooks.skipped
        results = {}
        for name, probe in self._probes.items():
            sees_calls = _overrides(probe, "forward") or _overrides(probe, "output_gradient")
            reasons = sorted(self._not_applicable | (activations if sees_calls else set()))
            results[name] = probe.result() | ({"not_applicable": reasons} if reasons else {})
        return results

    def sampled(self) -> tuple[tuple[int, ...], dict[str, tuple[float, ...]]]:
        """Return whole-model counts: sampled batch indices, and one number per index for each.

        Gradients and updates may have cadences of their own: where one was not looked at, its
        counts and their denominators are 0. A step that an exception ended is left out.
        """
        series = []
        exponents, updates = self._probes.get("exponents"), self._probes.get("lost_updates")
        if isinstance(exponents, ExponentsProbe):
            series.append(exponents.sampled())
        if isinstance(updates, LostUpdatesProbe):
            series.append(updates.sampled())
        steps = tuple(sorted({step for its_steps, _ in series for step in its_steps}))
        columns: dict[str, tuple[float, ...]] = {}
        for its_steps, its_columns in series:
            for name, values in its_columns.items():
                by_step = dict(zip(its_steps, values, strict=True))
                columns[name] = tuple(by_step.get(step, 0.0) for step in steps)
        return steps, columns

    def histograms(self) -> dict[str, tuple[int, ...]]:
        """Return the whole model's exponent histograms `grad/all` and `grad/tail`, if counted."""
        exponents = self._probes.get("exponents")
        return exponents.histograms() if isinstance(exponents, ExponentsProbe) else {}

    def zero_share(self) -> float | None:
        """Return the mean share of gradient elements that are exactly zero; None without any."""
        exponents = self._probes.get("exponents")
        return exponents.zero_share() if isinstance(exponents, ExponentsProbe) else None

    def _named(self, parameters: Sequence[Tensor]) -> NamedTensors:
        views: list[Tensor] = []
        kept: list[int] = []
        for index, parameter in enumerate(parameters):
            view, reason = real_view(parameter)
            if view is None:
                module, name = (column[index] for column in self._owners)
                self._not_applicable.add(f"weight `{name}` of `{module}`: {reason}")
            else:
                views.append(view)
                kept.append(index)
        if len(kept) == len(parameters):
            return NamedTensors(self._owners, views, parameters)
        return NamedTensors(_chosen(self._owners, kept), views, [parameters[k] for k in kept])


def _overrides(probe: StepProbe, method: str) -> bool:
    return getattr(type(probe), method) is not getattr(StepProbe, method)


def _owners(model: nn.Module, parameters: Sequence[Tensor]) -> Owners:
    known: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        known.setdefault(id(parameter), (module or ROOT, own))
    found = [known.get(id(p), (NO_MODULE, str(index))) for index, p in enumerate(parameters)]
    return tuple(module for module, _ in found), tuple(name for _, name in found)


def _chosen(owners: Owners, indices: Sequence[int]) -> Owners:
    modules, names = owners
    return tuple(modules[k] for k in indices), tuple(names[k] for k in indices)
