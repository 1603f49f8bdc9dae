"""Many tensors as a few flat ones."""

from __future__ import annotations

import torch

from harness.probes.flat import flat_chunks


def test_chunks_hold_everything_in_order() -> None:
    tensors = [torch.arange(5.0), torch.empty(0), torch.arange(7.0).bfloat16().reshape(7, 1)]
    for limit in (1, 6, 100):
        chunks = list(flat_chunks(tensors, limit=limit))
        assert all(c.dtype is torch.float32 for c in chunks)
        assert torch.cat(chunks).tolist() == [*range(5), *range(7)]
    assert len(list(flat_chunks(tensors, limit=6))) == 2
    assert not list(flat_chunks([]))
