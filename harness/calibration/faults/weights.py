"""Faults of what is kept between steps: weights, gradients, and the optimizer's state."""

from __future__ import annotations

from harness.calibration.faults.fault import Fault, Plant
from harness.calibration.faults.hooks import (
    AdamEps,
    EvenlyQuantizedState,
    RoundedDecay,
    RoundedGradients,
    RoundedState,
    RoundedWeights,
)

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def _pure(dose: str) -> Plant:
    fields = {"compute_format": dose, "param_format": dose, "low_precision_ops": ("all",)}
    return Plant(policy=fields)


def _state(dose: str) -> Plant:
    entries, _, name = dose.partition("_")
    chosen = {"both": _MOMENTS, "second": ("exp_avg_sq",), "first": ("exp_avg", "momentum_buffer")}
    return Plant(hooks=(RoundedState(entries=chosen[entries], name=name),))


def _weights_late(dose: str) -> Plant:
    share, _, name = dose.partition("_")
    return Plant(hooks=(RoundedWeights(name=name, below=float(share)),))


def _gradients(dose: str) -> Plant:
    name, _, power = dose.rpartition("_")
    return Plant(hooks=(RoundedGradients(name=name, gain=2.0 ** int(power)),))


FAULTS = (
    Fault(
        name="pure",
        sentence="The whole model is cast to 16 bits: weights, gradients and the optimizer's "
        "state, without an FP32 copy of the weights.",
        source="meta-pytorch/torchtune#2254",
        dose="the format",
        plant=_pure,
    ),
    Fault(
        name="rounded_weights",
        sentence="Weights are stored in a low format after each update while everything is "
        "computed in FP32: updates below half a spacing are lost.",
        source="vllm-project/speculators#765",
        dose="the format of the weights",
        plant=lambda dose: Plant(hooks=(RoundedWeights(name=dose),)),
    ),
    Fault(
        name="rounded_weights_late",
        sentence="Weights have no FP32 copy in the cooldown: once the learning rate is small, "
        "updates are lost.",
        source="marin-community/marin#6486",
        dose="share of the peak learning rate below which it acts, and the format",
        plant=_weights_late,
    ),
    Fault(
        name="optimizer_state",
        sentence="Adam's moments are stored in a low format beside FP32 weights: 0.999 v rounds "
        "back to v, so that the second moment does not fall.",
        dose="which moments, and their format",
        plant=_state,
    ),
    Fault(
        name="quantized_second_moment",
        sentence="Adam's second moment is quantized in even steps of its tensor's maximum: small "
        "ones become zero and their updates explode.",
        dose="number of levels",
        plant=lambda dose: Plant(hooks=(EvenlyQuantizedState(levels=int(dose)),)),
    ),
    Fault(
        name="fp16_adam_eps",
        sentence="Adam's eps is raised so that it survives in FP16, as is often advised against "
        "NaN: updates of weights with small gradients shrink.",
        source="afiaka87/glide-finetune#6",
        dose="eps",
        plant=lambda dose: Plant(hooks=(AdamEps(eps=float(dose)),)),
    ),
    Fault(
        name="step_counter",
        sentence="Adam's step counter is cast with the model: in BF16 it stops at 256, in a lower "
        "format earlier, and the bias correction with it.",
        dose="the format of the counter",
        plant=lambda dose: Plant(hooks=(RoundedState(entries=("step",), name=dose),)),
    ),
    Fault(
        name="weight_decay_lost",
        sentence="The factor 1 - lr * decay is computed in BF16, where it is 1: there is no weight "
        "decay.",
        dose="the format of the factor",
        plant=lambda dose: Plant(hooks=(RoundedDecay(name=dose),)),
    ),
    Fault(
        name="gradients_stored",
        sentence="Gradients are stored in a low format between backward and the step, without a "
        "scale: small ones become zero.",
        source="deepspeedai/DeepSpeed#1800",
        dose="the format, and k: gradients are 2^k smaller than here",
        plant=_gradients,
    ),
)
