"""What makes two runs with one seed differ in nothing but the policy, and the proof of it.

Seeds per step, separate random streams for data and model, deterministic kernels, and the
fingerprints that say afterwards whether two runs really shared weights and batches. Dropout masks
have a module of their own (`dropout`).
"""

from __future__ import annotations

import hashlib
import os
import random
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.precision.magnitude import stored_values

_MASK = (1 << 64) - 1
# The golden ratio times 2^64, odd: multiplying by it loses nothing.
_GOLDEN = -7046029254386353131
_CHUNK_WORDS = 1 << 22


def stream_seed(seed: int, *, stream: str, index: int = 0) -> int:
    """Return a 63-bit seed for item `index` of one named random stream of a run.

    Streams and indices are scrambled by SplitMix64 (Steele, Lea and Flood 2014), so that
    neighbouring seeds, steps and streams are unrelated.
    """
    state = (seed * 0x9E3779B97F4A7C15 + zlib.crc32(stream.encode())) & _MASK
    state = _splitmix64(state)
    return _splitmix64((state + index) & _MASK) >> 1


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed Python, NumPy and torch (CPU and, for a CUDA run, the device) with one number."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - users' iterators draw from the global state
    seed_torch(seed, device)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's global generators.

    `torch.manual_seed` asks every backend, 75 us a call on a CPU-only build; this one is called at
    every step and takes 1 us.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restore the global random state of Python, NumPy and torch on exit."""
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


class SeparateStream:
    """A torch random stream of its own for code that draws from the global generator.

    The batch iterator may draw from torch's global generator, which the trainer reseeds at every
    step; inside `with stream:` it finds its own state instead, continued where it left it.
    """

    def __init__(self, *, seed: int, device: torch.device) -> None:
        self._seed, self._device, self._entries = seed, device, 0
        generator = torch.Generator().manual_seed(seed)
        self._state = generator.get_state()

    def __enter__(self) -> None:
        torch.default_generator.set_state(self._state)
        if self._device.type == "cuda":
            # The device's state after a forward pass may depend on the policy; start from a number.
            torch.cuda.manual_seed_all(stream_seed(self._seed, stream="cuda", index=self._entries))
        self._entries += 1

    def __exit__(self, *_: object) -> None:
        self._state = torch.default_generator.get_state()


def ask_for_deterministic_cublas() -> None:
    """Set the variable without which matmuls on a GPU may differ from run to run.

    torch and cuBLAS read it once, at a process's first matmul: whatever computes before the runs
    must call this before. A user's own value is left.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic(num_threads: int, notes: set[str]) -> Iterator[None]:
    """Run with a fixed thread count and deterministic kernels where torch has them.

    Sums are split by thread, so results depend on `num_threads`. Where torch has no deterministic
    kernel its warning's first line is added to `notes` instead of being shown. Everything is
    restored on exit.
    """
    threads = torch.get_num_threads()
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filling: Any = torch.utils.deterministic
    fill = filling.fill_uninitialized_memory
    ask_for_deterministic_cublas()
    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.filterwarnings("always", message=r"(?s).*deterministic")
        # A skipped first step is a normal event under a loss scaler; the schedule goes on.
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)`")

        def note(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
            if "deterministic" in str(message):
                notes.add(str(message).splitlines()[0])
            else:
                show(message, category, *args, **kwargs)

        warnings.showwarning = note
        torch.set_num_threads(num_threads)
        # What use_deterministic_algorithms does, without its import of the compiler: 2 s a process.
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        # Filling every new tensor costs time and only hides reads of uninitialized memory.
        filling.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)
            filling.fill_uninitialized_memory = fill
            torch.set_num_threads(threads)


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 over all parameters and buffers by name: names, shapes, dtypes, bytes."""
    digest = hashlib.sha256()
    state = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(state, key=lambda item: item[0]):
        digest.update(name.encode())
        _update(digest, tensor)
    return digest.hexdigest()


def tensors_sha256(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 over tensors in order: shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        _update(digest, tensor)
    return digest.hexdigest()


def _update(digest: Any, tensor: Tensor) -> None:
    digest.update(f"{_shape(tensor)} {tensor.dtype}".encode())
    for part in _dense_parts(tensor.detach()):
        digest.update(_as_bytes(part).cpu().numpy())


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; of a nested one the shapes of its parts, one after the other."""
    if tensor.is_nested:
        return tuple(length for part in tensor.unbind() for length in part.shape)
    return tuple(tensor.shape)


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.is_quantized:  # to see its bytes as others ends the process
        tensor = tensor.dequantize()
    if tensor.is_nested:
        return (stored_values(tensor),)
    if tensor.layout == torch.strided:
        return (tensor,)
    sparse = tensor.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    return sparse.indices(), sparse.values()


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements in logical order as a flat uint8 tensor."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class PlaceWeights:
    """A table of pseudo-random odd int64 weights on a device, one per place; grows as needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._table = torch.empty(0, dtype=torch.int64, device=device)

    def first(self, count: int) -> Tensor:
        """Return the weights of the first `count` places."""
        if count > self._table.numel():
            # A power of two, so that growing shapes do not rebuild the table each time.
            size = 1 << max(10, (count - 1).bit_length())
            place = torch.arange(1, size + 1, dtype=torch.int64, device=self.device)
            mixed = place * _GOLDEN
            mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
            self._table = ((mixed ^ (mixed >> 27)) * -7723592293110705685) | 1
        return self._table[:count]


class Checksum:
    """An order-sensitive 64-bit checksum over tensors, computed on the device without waiting.

    The bytes are read as int64 words, each word is mixed and multiplied by the odd weight of its
    place, and the products are summed modulo 2^64. Any change of one word changes the sum;
    exchanging two words, tensors or shapes does, but for a chance of about 2^-32.
    """

    def __init__(self, weights: PlaceWeights) -> None:
        self._weights = weights
        self._sums: list[Tensor] = []
        self._waiting: list[Tensor] = []
        self._num_waiting = 0
        self._salt = 0

    def add(self, tensor: Tensor) -> None:
        """Continue by a tensor: its shape, dtype and elements in order.

        Small tensors are gathered, since one pass over all costs a fraction of one over each: none
        may change before `settle` or `value`. One elsewhere (the lengths of a packed sequence stay
        on the CPU) is copied to the device.
        """
        tensor = tensor.detach().to(self._weights.device, non_blocking=True)
        self._salt = (self._salt * _GOLDEN + _salt(_shape(tensor), tensor.dtype)) & _MASK
        for part in _dense_parts(tensor):
            flat = _as_words(part)
            for start in range(0, flat.numel(), _CHUNK_WORDS):
                words = flat[start : start + _CHUNK_WORDS]
                if self._num_waiting + words.numel() > _CHUNK_WORDS:
                    self.settle()
                self._waiting.append(words)
                self._num_waiting += words.numel()

    def settle(self) -> None:
        """Sum up what has been added; the tensors may change afterwards."""
        if not self._waiting:
            return
        words = self._waiting[0] if len(self._waiting) == 1 else torch.cat(self._waiting)
        self._waiting, self._num_waiting = [], 0
        # The shift brings high bits down: multiplying alone moves them out at the top.
        mixed = words ^ (words >> 29)
        # Not torch.dot, which CUDA has for floating dtypes only.
        self._sums.append((mixed * self._weights.first(words.numel())).sum())

    def add_number(self, number: int) -> None:
        """Continue by a number that the device need not see; 0 changes nothing."""
        if number:
            self._salt = (self._salt * _GOLDEN + number) & _MASK

    def value(self) -> Tensor:
        """Return the checksum so far: 0-dim int64 on the device; 0 when nothing was added."""
        self.settle()
        if not self._sums:
            total = torch.zeros((), dtype=torch.int64, device=self._weights.device)
        else:
            total = (torch.stack(self._sums) * self._weights.first(len(self._sums))).sum()
        # As a signed number, which is what an int64 tensor takes.
        return total + ((self._salt ^ (1 << 63)) - (1 << 63)) if self._salt else total


@lru_cache(maxsize=1024)
def _salt(shape: torch.Size, dtype: torch.dtype) -> int:
    return zlib.crc32(f"{tuple(shape)} {dtype}".encode())


def _as_words(tensor: Tensor) -> Tensor:
    flat = _as_bytes(tensor)
    if flat.numel() % 8:
        flat = torch.cat([flat, flat.new_zeros(8 - flat.numel() % 8)])
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)
