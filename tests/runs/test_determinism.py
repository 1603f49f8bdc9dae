"""Checksums that see any change, hashes over names and bytes, streams of their own."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harness.runs import determinism
from harness.runs.determinism import (
    Checksum,
    PlaceWeights,
    SeparateStream,
    deterministic,
    stream_seed,
    tensors_sha256,
    weights_sha256,
)

CPU = torch.device("cpu")
WEIGHTS = PlaceWeights(CPU)


def checksum(*tensors: torch.Tensor) -> int:
    total = Checksum(WEIGHTS)
    for tensor in tensors:
        total.add(tensor)
    return int(total.value())


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, 0.5]), min_size=2, max_size=40),
    data=st.data(),
)
def test_exchanging_two_different_values_changes_the_checksum(values, data) -> None:
    i = data.draw(st.integers(0, len(values) - 1))
    j = data.draw(st.integers(0, len(values) - 1))
    swapped = list(values)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    same = swapped == values
    assert (checksum(torch.tensor(values)) == checksum(torch.tensor(swapped))) == same


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
)
def test_any_single_change_is_seen(dtype: torch.dtype) -> None:
    values = (torch.arange(37) % 2).to(dtype)
    seen = {checksum(values)}
    for i in range(37):
        changed = values.clone()
        changed[i] = 1 - changed[i].int()
        seen.add(checksum(changed))
    assert len(seen) == 38


def test_shape_dtype_order_and_number_of_tensors_count() -> None:
    a, b = torch.arange(6.0), torch.ones(6)
    sums = [
        checksum(a, b),
        checksum(b, a),
        checksum(a),
        checksum(a.reshape(2, 3), b),
        checksum(a.double(), b),
        checksum(torch.cat([a, b])),
        checksum(),
        checksum(torch.empty(0)),
        checksum(torch.zeros(6)),
    ]
    assert len(set(sums)) == len(sums)
    assert checksum() == 0


def test_layout_in_memory_does_not_count() -> None:
    x = torch.arange(48.0).reshape(4, 12)
    assert checksum(x.t().contiguous().t()) == checksum(x)
    assert checksum(torch.cat([torch.zeros(1), x.flatten()])[1:].reshape(4, 12)) == checksum(x)
    sparse = torch.eye(4).to_sparse()
    assert checksum(sparse) != checksum(torch.eye(4).roll(1).to_sparse())
    z = torch.randn(5, dtype=torch.complex64)
    assert checksum(z.conj()) == checksum(z.conj().resolve_conj()) != checksum(z)


def test_long_tensors_are_summed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(100)
    monkeypatch.setattr(determinism, "_CHUNK_WORDS", 16)
    pieces = checksum(x)
    y = x.clone()
    y[[3, 90]] = y[[90, 3]]
    assert checksum(y) != pieces
    y[[3, 90]] = y[[90, 3]]
    assert checksum(y) == pieces


def test_weights_hash_covers_names_shapes_values_and_buffers() -> None:
    def model(**changes: object) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    base = model()
    assert weights_sha256(base) == weights_sha256(model())
    weight, buffer = model(), model()
    with torch.no_grad():
        weight[0].weight[0, 0] += 1e-7
        buffer[1].running_mean[0] += 1e-7
    renamed = nn.Sequential()
    renamed.add_module("x", base[0])
    renamed.add_module("1", base[1])
    hashes = {weights_sha256(m) for m in (base, weight, buffer, renamed)}
    assert len(hashes) == 4


def test_tensors_hash_depends_on_order() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    assert tensors_sha256([a, b]) != tensors_sha256([b, a])


def test_separate_stream_goes_on_where_it_was() -> None:
    stream = SeparateStream(seed=3, device=CPU)
    with stream:
        first = torch.rand(2)
    torch.manual_seed(99)
    torch.rand(10)
    with stream:
        second = torch.rand(2)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.cat([first, second]), expected)


def test_streams_differ() -> None:
    assert stream_seed(0, stream="model") != stream_seed(0, stream="data")
    assert stream_seed(0, stream="model") != stream_seed(1, stream="model")


def test_nondeterministic_kernels_are_noted_not_shown() -> None:
    notes: set[str] = set()
    with deterministic(1, notes):
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
        warnings.warn("this op does not have a deterministic implementation", stacklevel=1)
    assert notes == {"this op does not have a deterministic implementation"}
    with pytest.warns(UserWarning, match="other"), deterministic(1, notes):
        warnings.warn("other", stacklevel=1)
