"""Dropout masks that depend on the seed, the step and the place in the model, never on the dtype.

torch's kernels draw other masks in another dtype, so that the same seed is not the same dropout
under another policy. For the duration of a run the dropout ops of ATen get kernels, registered
below autograd's Python layer, that draw every mask as integers, multiply in FP32 and round once;
C++ callers (LSTM, multi-head attention) are caught too. Other random draws are made independent of
the dtype by `random_draws`. All of it is recorded as a checksum per step, NumPy's and Python's own
generators included.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from harness.runs.determinism import Checksum, PlaceWeights
from harness.runs.random_draws import LOW_PRECISION, HostGenerators, register_draws

# Klambauer et al. 2017 (self-normalizing networks): -scale * alpha of SELU; as in ATen.
_ALPHA = 1.7580993408473766


class MaskRecorder:
    """Collects one order-sensitive checksum per step over all random masks of that step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weights = PlaceWeights(device)
        self._checksum = Checksum(self.weights)
        self._listening = False
        self._host = HostGenerators()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside; masks drawn elsewhere (recomputation, evaluation) are not counted."""
        self._checksum, self._listening = Checksum(self.weights), True
        try:
            yield
        finally:
            self._listening = False
            self._checksum.settle()
            self._checksum.add_number(self._host.drawn())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record inside: what is drawn there is drawn again."""
        listening, self._listening = self._listening, False
        try:
            yield
        finally:
            self._listening = listening

    def add(self, drawn: Tensor, *, stays: bool = False) -> None:
        """Add one mask or other random tensor to the step's checksum.

        Args:
            drawn: On any device; only those on the run's own count.
            stays: Whether nobody else holds it, so that it cannot change before the step's end.
        """
        if self._listening and drawn.device.type == self.device.type:
            self._checksum.add(drawn)
            if not stays:
                self._checksum.settle()

    def value(self) -> Tensor:
        """Return the last recorded step's checksum: 0-dim int64, 0 where no mask was drawn."""
        return self._checksum.value()


class _Masks:
    """Draws masks; each one is keyed by one integer from torch's default CPU generator.

    That generator is reseeded at every step and restored by activation checkpointing, so that a
    recomputed forward pass draws the same masks again.
    """

    def __init__(self, device: torch.device, recorder: MaskRecorder) -> None:
        self._generator = torch.Generator(device)
        self._recorder = recorder
        self._device = device

    def draw(self, shape: tuple[int, ...], p: float) -> Tensor:
        """Return a bool mask, true with probability 1 - p (p to the nearest multiple of 2^-16)."""
        key = int(torch.empty((), dtype=torch.int64).random_())
        count = math.prod(shape)
        # Four 16-bit draws per 64-bit word: 3x faster on a CPU than one FP32 number per element.
        words = torch.empty((count + 3) // 4, dtype=torch.int64, device=self._device)
        words.random_(-(2**63), None, generator=self._generator.manual_seed(key))
        mask = words.view(torch.int16)[:count].reshape(shape) >= drop_threshold(p)
        self._recorder.add(mask, stays=True)
        return mask


def drop_threshold(p: float) -> int:
    """Return the int16 below which a draw is dropped; at least one of the 2^16 values is."""
    return min(max(round(p * 65536), 1), 65535) - 32768


def _multiply(x: Tensor, mask: Tensor, scale: float, offset: tuple[float, float] | None) -> Tensor:
    """Return x * mask * scale (+ mask * a + b) in FP32, rounded once to x's dtype."""
    dtype = x.dtype
    wide = x.float() if dtype in LOW_PRECISION else x
    # A CPU multiplies FP32 by FP32 6x faster than FP32 by bool; on a GPU the bool saves memory.
    keep = mask.view(torch.uint8).to(torch.float32) if x.device.type == "cpu" else mask
    result = wide * keep * scale
    if offset is not None:
        result = result + (keep * offset[0] + offset[1])
    return result.to(dtype)


def _dropout_kernel(
    masks: _Masks, *, feature: bool, alpha: bool, inplace: bool
) -> Callable[..., Tensor]:
    def kernel(x: Tensor, p: float, train: bool) -> Tensor:
        if not 0 <= p <= 1:
            raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
        if p == 0 or not train or x.numel() == 0:
            return x
        if p == 1:
            result = x * 0.0
        else:
            shape = tuple(x.shape)
            if feature:
                if len(shape) < 2:
                    raise RuntimeError("feature dropout needs an input of 2 dimensions or more")
                shape = shape[:2] + (1,) * (len(shape) - 2)
            mask = masks.draw(shape, p)
            a = 1 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p)) if alpha else 1 / (1 - p)
            offset = (_ALPHA * a, _ALPHA * a * (p - 1)) if alpha else None
            result = _multiply(x, mask, a, offset)
        return x.copy_(result) if inplace else result

    return kernel


def _composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an op's composite implementation, whose inner ops are dispatched (and recorded) anew."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _attention_kernel(
    dropout: Callable[..., Tensor], replaces: Callable[[Tensor], bool]
) -> Callable[..., Tensor]:
    """Attention whose dropout is ours: the fused CUDA kernels draw theirs inside, by dtype.

    A CPU has no fused kernel with dropout, and what it has instead computes 16-bit products in
    FP32; there ours `replaces` it for those alone.
    """
    op = torch.ops.aten.scaled_dot_product_attention.default

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0 or not replaces(query):
            torchs: Tensor = _composite(
                op,
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
            return torchs
        if enable_gqa:
            key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        scores = (query * (scale or 1 / math.sqrt(query.size(-1)))) @ key.transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, -math.inf)
            else:
                scores = scores + attn_mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
        return dropout(weights, dropout_p, True).to(value.dtype) @ value

    return kernel


def _recurrent_kernel(op: Any, *, dropout_index: int) -> Callable[..., Any]:
    """A recurrent op without cuDNN where it has dropout: cuDNN draws its masks inside."""

    def kernel(*args: Any) -> Any:
        if args[dropout_index] > 0 and args[dropout_index + 1]:
            with _without_cudnn():
                return _composite(op, *args)
        return _composite(op, *args)

    return kernel


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Switch cuDNN off; `torch.backends.cudnn.flags` also touches TF32 by its old switch."""
    switch: Any = torch.backends.cudnn
    enabled = switch.enabled
    switch.enabled = False
    try:
        yield
    finally:
        switch.enabled = enabled


@contextmanager
def paired_dropout(device: torch.device) -> Iterator[MaskRecorder]:
    """Make all dropout and all 16-bit random draws on `device` independent of dtypes.

    Yields the recorder of their checksums. Kernels are process-wide and removed on exit; not for
    use in two threads at once. Limit: draws inside compiled graphs and inside extensions' own
    kernels are not seen.
    """
    recorder = MaskRecorder(device)
    masks = _Masks(device, recorder)
    backend = "CUDA" if device.type == "cuda" else "CPU"
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            # torch warns that a kernel of its own is replaced, which is the purpose.
            warnings.filterwarnings("ignore", message=r"(?s).*[Oo]verrid")
            _register(library, backend, masks, recorder)
        yield recorder
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _register(
    library: torch.library.Library, backend: str, masks: _Masks, recorder: MaskRecorder
) -> None:
    autograd = f"Autograd{backend}"
    plain = _dropout_kernel(masks, feature=False, alpha=False, inplace=False)
    for feature in (False, True):
        for alpha in (False, True):
            for inplace in (False, True):
                name = "feature_" * feature + "alpha_" * alpha + "dropout" + "_" * inplace
                kernel = _dropout_kernel(masks, feature=feature, alpha=alpha, inplace=inplace)
                library.impl(name, kernel, autograd)  # type: ignore[no-untyped-call]
    if backend == "CUDA":
        register_fused(library, autograd, plain)
    else:
        attention = _attention_kernel(plain, lambda query: query.dtype in LOW_PRECISION)
        library.impl("scaled_dot_product_attention", attention, autograd)  # type: ignore[no-untyped-call]
    register_draws(library, backend, recorder.add)


def register_fused(
    library: torch.library.Library, key: str, dropout: Callable[..., Tensor]
) -> None:
    """Register the ops whose CUDA kernels draw masks inside themselves."""
    attention = _attention_kernel(dropout, lambda query: True)
    library.impl("scaled_dot_product_attention", attention, key)  # type: ignore[no-untyped-call]
    aten = torch.ops.aten
    for op, index in (
        (aten.lstm.input, 5),
        (aten.gru.input, 5),
        (aten.rnn_tanh.input, 5),
        (aten.rnn_relu.input, 5),
    ):
        library.impl(op, _recurrent_kernel(op, dropout_index=index), key)  # type: ignore[no-untyped-call]
