"""Tensors of every kind as real views, and what a probe's own ops do not disturb."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.probes.tensors import real_view, tensors_within, unseen


def test_ordinary_tensors_are_seen_as_they_are() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        tensor = torch.ones(3, 2, dtype=dtype, requires_grad=True)
        view, reason = real_view(tensor)
        assert view is not None
        assert reason == ""
        assert view.dtype is dtype
        assert not view.requires_grad
        assert view.data_ptr() == tensor.data_ptr()
    for shape in ((), (0,), (3, 0)):
        view, _ = real_view(torch.ones(shape))
        assert view is not None
        assert view.shape == shape


def test_complex_values_are_pairs_of_reals() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    for tensor, expected in ((values, [1, 2, 3, -4]), (values.conj(), [1, -2, 3, 4])):
        view, _ = real_view(tensor)
        assert view is not None
        assert view.flatten().tolist() == expected


def test_sparse_tensors_are_their_stored_values() -> None:
    twice = torch.sparse_coo_tensor([[1, 1, 4]], [1.0, 2.0, 5.0], (6,), check_invariants=True)
    view, _ = real_view(twice)
    assert view is not None
    assert sorted(view.tolist()) == [3.0, 5.0]  # the same place twice is one value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls compressed layouts a beta
        view, _ = real_view(torch.eye(3).to_sparse_csr())
    assert view is not None
    assert view.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.arange(3), "int64 values are not floating-point"),
        (lambda: torch.ones(3, dtype=torch.bool), "bool values are not floating-point"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "quantized values are integers",
        ),
    ],
)
def test_what_has_no_exponent_is_said(make: Any, reason: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.quantize_per_tensor is deprecated
        tensor = make()
    assert real_view(tensor) == (None, reason)


def test_containers_are_searched() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1)])
    assert [t.numel() for t in tensors_within([one, {"a": (two, None)}, "x", [three]])] == [1, 2, 3]
    assert any(t is packed.data for t in tensors_within(packed))


class Seeing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_what_a_probe_computes_is_seen_by_no_mode_and_rounded_by_no_autocast() -> None:
    a = torch.full((2, 2), 1.0 + 2.0**-10, requires_grad=True)

    def product() -> Tensor:
        return a @ a

    with Seeing() as outer, torch.autocast("cpu", dtype=torch.bfloat16):
        assert product().dtype is torch.bfloat16
        before = list(outer.seen)
        with unseen():
            inside = product()
        assert outer.seen == before
        assert product().dtype is torch.bfloat16
    assert inside.dtype is torch.float32
    assert not inside.requires_grad
    with pytest.raises(ZeroDivisionError), Seeing() as outer, unseen():
        1 / 0  # noqa: B018
    assert torch.is_grad_enabled()
