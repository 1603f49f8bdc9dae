"""Faults of range: softmax, attention, exp, norms and masks computed in FP16 or narrower."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from harness.calibration.faults.fault import Fault, Plant
from harness.calibration.faults.rounded import rounded

_HALF = torch.float16


def softmax_without_maximum(scores: Tensor, *, shift: float) -> Tensor:
    """Return softmax over the last dimension in FP16, the largest score not subtracted first.

    Args:
        scores: FP32; -inf where masked.
        shift: Added to every score, which softmax in exact arithmetic does not see: scores that
            have drifted. Above 11 FP16's exp overflows, below -10 it loses bits.
    """
    powers = (scores.to(_HALF) + shift).exp()
    return (powers / powers.sum(-1, keepdim=True)).to(scores.dtype)


def low_attention_scores(q: Tensor, k: Tensor, scale: float, *, name: str, shift: float) -> Tensor:
    """Return attention's scores as format `name` holds them.

    Args:
        q: Queries, `(..., queries, d)`.
        k: Keys, `(..., keys, d)`.
        scale: Multiplies the products.
        name: The format of queries, keys and scores.
        shift: A number that all scores of the model share, which softmax does not see, but which
            takes bits from their differences.
    """
    products = rounded(q, name) @ rounded(k, name).transpose(-2, -1) * scale
    return rounded(products + shift, name) - shift


def unscaled_attention_scores(q: Tensor, k: Tensor, scale: float, *, gain: float) -> Tensor:
    """Return attention's scores scaled after FP16 products have overflowed.

    Args:
        q: Queries, `(..., queries, d)`.
        k: Keys, `(..., keys, d)`.
        scale: Multiplies the products, after they were rounded to FP16.
        gain: The products are that much larger on the way, as in a wider model.
    """
    products = rounded(q @ k.transpose(-2, -1) * gain, "fp16")
    return products * (scale / gain)


def low_exp(values: Tensor, *, name: str, shift: float) -> Tensor:
    """Return `exp(values)`, computed as `exp(values + shift)` in format `name` and scaled back.

    Args:
        values: FP32, any shape.
        name: The format of the argument and of the result.
        shift: Where the values lie in a model whose exponents are not centred; negative ones make
            the result small: below -17 FP16 has no value for it.
    """
    power = rounded(rounded(values + shift, name).exp(), name)
    return power * float(torch.tensor(-shift).exp())


def additive_mask(scores: Tensor, keep: Tensor, *, value: float) -> Tensor:
    """Return scores masked by adding `(1 - keep) * value` in FP16.

    With -1e9, which is -inf in FP16, a kept score becomes `0 * -inf`: NaN.

    Args:
        scores: FP32.
        keep: True where a score stays; broadcasts against `scores`.
        value: What is to hide a score.
    """
    hidden = 1 - keep.to(_HALF)
    return (scores.to(_HALF) + hidden * torch.tensor(value).to(_HALF)).to(scores.dtype)


def _seam(name: str, function: functools.partial[Tensor]) -> Plant:
    return Plant(seams={name: function})


def _attention(dose: str) -> Plant:
    name, _, shift = dose.rpartition("_")
    return _seam(
        "attention_scores",
        functools.partial(low_attention_scores, name=name, shift=float(shift)),
    )


def _exp(dose: str) -> Plant:
    name, _, shift = dose.rpartition("_")
    return _seam("exp", functools.partial(low_exp, name=name, shift=float(shift)))


FAULTS = (
    Fault(
        name="softmax_no_max",
        sentence="A softmax written by hand in FP16 that does not subtract the largest score: exp "
        "overflows or falls among the subnormals.",
        source="NVIDIA/FasterTransformer#43",
        dose="a number added to every score",
        plant=lambda dose: _seam(
            "softmax", functools.partial(softmax_without_maximum, shift=float(dose))
        ),
    ),
    Fault(
        name="low_attention_logits",
        sentence="Attention's logits are kept in a low format after they have drifted to large "
        "values: their differences lose their bits.",
        source="marin-community/marin#8217",
        dose="the format, and how far the logits have drifted",
        plant=_attention,
    ),
    Fault(
        name="attention_scale_late",
        sentence="Attention's products are formed in FP16 and divided by the root of the width "
        "afterwards: in wide models they overflow first.",
        source="pytorch/pytorch#60940",
        dose="how much larger the products are",
        plant=lambda dose: _seam(
            "attention_scores", functools.partial(unscaled_attention_scores, gain=float(dose))
        ),
    ),
    Fault(
        name="low_exp",
        sentence="An exponential in a low format where it becomes very small or very large.",
        source="huggingface/sentence-transformers#3800",
        dose="the format, and the number by which the argument is shifted",
        plant=_exp,
    ),
    Fault(
        name="fp16_mask",
        sentence="A mask is added as (1 - keep) * -1e9 in FP16, where -1e9 is an infinity and zero "
        "times it NaN.",
        source="NVIDIA/apex#1052",
        plant=lambda dose: _seam("mask", functools.partial(additive_mask, value=-1e9)),
    ),
)
