"""The batches of the same-point probe: some that the run never trained on, where there are any."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.runs.determinism import (
    Checksum,
    PlaceWeights,
    SeparateStream,
    preserved_random_state,
    seed_everything,
    stream_seed,
)
from harness.workloads.base import Workload
from harness.workloads.batches import iter_tensors, to_device


@dataclass(frozen=True, kw_only=True)
class ProbeBatches:
    """Batches on the device.

    Attributes:
        batches: At least 2.
        unseen: Whether none of them is a batch of the run.
        notes: Sentences on what could not be had.
    """

    batches: tuple[Any, ...]
    unseen: bool
    notes: tuple[str, ...]


def probe_batches(
    workload: Workload,
    *,
    seed: int,
    steps: int,
    count: int,
    device: torch.device,
    trained_on: Sequence[int] = (),
) -> ProbeBatches:
    """Return the last `count` of `steps + count` batches of a seed.

    Where the workload ends earlier, the last ones that it has: they were trained on. Random state
    of the process is as before on return.

    Args:
        workload: Any workload.
        seed: Of the run.
        steps: Batches that the run trains on.
        count: K, at least 2.
        device: Where they are to be.
        trained_on: Checksums of the run's batches; a batch among them is not unseen.

    Raises:
        ValueError: The workload has fewer than two batches.
    """
    with preserved_random_state(device):
        try:
            kept, drawn = _last(workload, seed=seed, num=steps + count, count=count, device=device)
        except Exception:  # noqa: BLE001 - an iterator may refuse more batches than its data has
            kept, drawn = _last(workload, seed=seed, num=steps, count=count, device=device)
    if len(kept) < 2:
        raise ValueError(f"the workload has {len(kept)} batches; at least 2 are needed")
    notes: list[str] = []
    unseen = drawn == steps + count
    if not unseen:
        notes.append(
            f"the workload ends after {drawn} batches, so the last {len(kept)} of them were used, "
            "which the run trains on"
        )
    batches = tuple(to_device(batch, device) for batch in kept)
    sums = [_checksum(batch, PlaceWeights(device)) for batch in batches]
    if unseen and set(sums) & set(trained_on):
        unseen = False
        notes.append("batches repeat: some of those used are batches that the run trains on")
    if len(set(sums)) < len(sums):
        notes.append(
            f"only {len(set(sums))} of the {len(sums)} batches differ, so their spread "
            "understates sampling noise"
        )
    return ProbeBatches(batches=batches, unseen=unseen, notes=tuple(notes))


def _last(
    workload: Workload, *, seed: int, num: int, count: int, device: torch.device
) -> tuple[list[Any], int]:
    """Return the last of up to `num` batches and how many there were, drawn as a run draws them."""
    seed_everything(stream_seed(seed, stream="model"), device)
    stream = SeparateStream(seed=stream_seed(seed, stream="data"), device=device)
    with stream:
        iterator: Iterator[Any] = iter(workload.batches(seed, num))
    kept: deque[Any] = deque(maxlen=count)
    drawn = 0
    for _ in range(num):
        with stream:
            try:
                batch = next(iterator)
            except StopIteration:
                break
        # A copy, since an iterator may fill one buffer again and again.
        kept.append(to_device(batch, torch.device("cpu")))
        drawn += 1
    return list(kept), drawn


def _checksum(batch: Any, weights: PlaceWeights) -> int:
    checksum = Checksum(weights)
    for tensor in iter_tensors(batch):
        checksum.add(tensor)
    return int(checksum.value())
