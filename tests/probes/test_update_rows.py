"""What 16-bit weights keep of updates, against the casts element by element."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from harness.probes.update_rows import COLUMNS, Piece, observed_rows, pieces, what_if_rows


def test_pieces_cover_every_element_once_and_in_order() -> None:
    tensors = [torch.arange(5.0), torch.empty(0), torch.arange(5.0, 17.0).view(3, 4)]
    modules, sizes = ("a", "b", "a"), tuple(t.numel() for t in tensors)
    for limit in (1, 4, 6, 100):
        found = pieces(modules, sizes, limit)
        assert torch.cat([p.joined(tensors) for p in found]).tolist() == list(range(17))
        assert all(sum(p.sizes) <= limit for p in found)
        assert all(len(p.joined(tensors)) == sum(p.sizes) for p in found)
    assert pieces(("a", "a", "b"), (2, 3, 1)) == (
        Piece(("a", "b"), (5, 1), ((0, 0, 2), (1, 0, 3), (2, 0, 1)), True),
    )
    assert pieces((), ()) == ()
    assert pieces(("a",), (0,)) == ()


def test_joining_copies_and_keeps_the_widest_dtype() -> None:
    one = torch.zeros(3)
    (piece,) = pieces(("a",), (3,))
    joined = piece.joined([one])
    one += 1
    assert joined.tolist() == [0.0, 0.0, 0.0]
    (piece,) = pieces(("a", "a"), (1, 1))
    assert piece.joined([torch.ones(1), torch.ones(1, dtype=torch.float64)]).dtype is torch.float64


def by_hand(old: Tensor, new: Tensor) -> dict[str, float]:
    """Oracle: one element at a time, in FP64 with torch's casts."""
    row = dict.fromkeys(COLUMNS, 0.0)
    for w, v in zip(old.tolist(), new.tolist(), strict=True):
        dw = torch.tensor(v - w, dtype=torch.float32).item()
        row["updates"] += dw != 0
        row["size"] += abs(dw)
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            stored = torch.tensor(w, dtype=torch.float32).to(dtype).item()
            exact = torch.tensor(stored, dtype=torch.float32) + dw
            rounded = exact.to(dtype).item()
            row[f"kept_{name}"] += rounded != stored
            if name == "bf16":
                row["along_bf16"] += math.copysign(1.0, dw) * (rounded - stored) if dw else 0.0
    return row


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_match_the_casts_element_by_element(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    old = (torch.randn(200, dtype=torch.float64) * 0.1).to(dtype)
    old[:20] = torch.linspace(60000, 70000, 20)  # up to and beyond FP16's range
    step = torch.randn(200, dtype=torch.float64) * torch.logspace(-9, 1, 200, dtype=torch.float64)
    new = old + step.to(dtype)
    new[50:60] = old[50:60]
    rows = what_if_rows(old, new, sizes=[150, 50])
    for row, span in zip(rows.tolist(), (slice(0, 150), slice(150, 200)), strict=True):
        expected = by_hand(old[span], new[span])
        found = dict(zip(COLUMNS, row, strict=True))
        for name in COLUMNS[:3]:
            assert found[name] == expected[name], name
        # FP32 sums of 150 terms against FP64: 150 roundings of 2^-24.
        assert found["size"] == pytest.approx(expected["size"], rel=1e-5)
        assert found["along_bf16"] == pytest.approx(expected["along_bf16"], rel=1e-5)


def test_updates_too_small_for_fp32_are_seen_in_fp64() -> None:
    old = torch.ones(3, dtype=torch.float64)
    rows = what_if_rows(old, old + 2.0**-40, sizes=[3])
    assert rows[0, 0] == 3
    assert what_if_rows(old.float(), (old + 2.0**-40).float(), sizes=[3])[0, 0] == 0


def test_an_infinite_weight_keeps_nothing() -> None:
    old = torch.tensor([1e5, 1e5, 1.0])
    updates, _, kept_fp16, *_ = what_if_rows(old, old + 64.0, sizes=[3])[0].tolist()
    assert (updates, kept_fp16) == (3, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_observed_rows_by_hand(dtype: torch.dtype) -> None:
    old = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=dtype)
    new = torch.tensor([1.0, 1.5, 1.0, 1.5], dtype=dtype)
    gradient = torch.tensor([1.0, -1.0, 0.0, math.nan], dtype=dtype)
    row = observed_rows(old, new, gradient, sizes=[4])[0].tolist()
    kept = (1.0, 0.0) if dtype is torch.bfloat16 else (0.0, 1.0)
    assert row == [2.0, *kept, 0.0, 0.0]
