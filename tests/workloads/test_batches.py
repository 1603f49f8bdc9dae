"""Batches of any nesting: moved whole, types kept, tensors walked in a fixed order."""

import collections
import dataclasses
import threading
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from harness.workloads.batches import iter_tensors, leading_size, to_device

META = torch.device("meta")  # a second device that every machine has


class Pair(NamedTuple):
    x: torch.Tensor
    label: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    size: int = dataclasses.field(init=False, default=3)


def nested():
    return {
        "z": (torch.ones(2), [torch.zeros(3), None]),
        "a": Pair(torch.ones(4), "four"),
        "m": collections.OrderedDict(k=Frozen(torch.ones(5))),
        "n": 7,
    }


def test_tensors_come_in_an_order_of_structure_not_of_insertion():
    batch = nested()
    shuffled = {key: batch[key] for key in reversed(list(batch))}
    sizes = [len(t) for t in iter_tensors(batch)]
    assert sizes == [4, 5, 2, 3]
    assert [len(t) for t in iter_tensors(shuffled)] == sizes


def test_every_tensor_moves_and_types_stay():
    batch = nested()
    moved = to_device(batch, META)
    assert {t.device.type for t in iter_tensors(moved)} == {"meta"}
    assert {t.device.type for t in iter_tensors(batch)} == {"cpu"}  # the original is untouched
    assert type(moved["a"]) is Pair
    assert moved["a"].label == "four"
    assert type(moved["m"]) is collections.OrderedDict
    assert type(moved["m"]["k"]) is Frozen
    assert moved["z"][1][1] is None
    assert moved["n"] == 7
    assert [len(t) for t in iter_tensors(moved)] == [len(t) for t in iter_tensors(batch)]


def test_mapping_subclasses_keep_what_else_they_hold():
    batch = collections.defaultdict(list, {"x": torch.ones(2)})
    moved = to_device(batch, META)
    assert moved.default_factory is list
    assert moved["x"].device.type == "meta"
    assert batch["x"].device.type == "cpu"
    wrapped = to_device(collections.UserDict(x=torch.ones(2)), META)
    assert isinstance(wrapped, collections.UserDict)
    assert wrapped["x"].device.type == "meta"


def test_packed_sequence_stays_one():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device(packed, torch.device("cpu"))
    assert isinstance(moved, PackedSequence)
    assert torch.equal(moved.data, packed.data)
    assert [len(t) for t in iter_tensors(packed)] == [5, 3]


def test_a_loss_may_change_its_batch_in_place():
    lock = threading.Lock()  # cannot be copied, and need not be
    batch = {"x": torch.ones(3), "packed": pack_sequence([torch.ones(3)]), "lock": lock}
    moved = to_device(batch, torch.device("cpu"))
    moved["x"].add_(1)
    moved["packed"].data.add_(1)
    assert torch.equal(batch["x"], torch.ones(3))
    assert torch.equal(batch["packed"].data, torch.ones(3))
    assert moved["lock"] is lock


def test_coordinates_that_take_a_gradient_stay_leaves():
    moved = to_device(torch.ones(3, requires_grad=True), torch.device("cpu"))
    assert moved.requires_grad
    assert moved.is_leaf


@pytest.mark.parametrize(
    ("batch", "size"),
    [(torch.ones(4, 2), 4), ((torch.tensor(1.0), torch.ones(3)), 3), ({"a": 1}, None), ([], None)],
)
def test_leading_size(batch, size):
    assert leading_size(batch) == size
