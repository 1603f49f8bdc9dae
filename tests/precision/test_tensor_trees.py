import collections
import dataclasses

import pytest
import torch
from torch import nn

from harness.precision.tensor_trees import StructureError, leaves, map_tensors

Pair = collections.namedtuple("Pair", "a b")


class Bag(collections.OrderedDict):
    """As the outputs of a popular library: a mapping with a type of its own."""


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    name: str
    later: int = dataclasses.field(init=False)


ONE, TWO = torch.ones(1), torch.ones(1)
VALUES = [
    ONE,
    (ONE, TWO),
    [ONE, [TWO, 3]],
    {"x": ONE, "y": "text"},
    Pair(ONE, {"k": TWO}),
    Bag(x=ONE),
    Output(ONE, "n"),
    torch.max(torch.eye(2), 0),
    nn.utils.rnn.pack_sequence([torch.ones(2, 3)]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_tensors_change_and_nothing_else_does(value):
    changed = map_tensors(lambda t: t + 1, value)
    assert type(changed) is type(value)
    before, after = list(leaves(value)), list(leaves(changed))
    assert len(before) == len(after) > 0
    for old, new in zip(before, after, strict=True):
        same = torch.equal(new, old + 1) if isinstance(old, torch.Tensor) else new == old
        assert same


@pytest.mark.parametrize(
    "value", [*VALUES, None, 3, "text", object()], ids=lambda v: type(v).__name__
)
def test_what_does_not_change_is_the_same_object(value):
    assert map_tensors(lambda t: t, value) is value


def test_several_of_one_structure_are_walked_together():
    result = map_tensors(lambda a, b: a * b, {"x": (ONE, 1)}, {"x": (torch.tensor([3.0]), 2)})
    assert result == {"x": (torch.tensor([3.0]), 1)}


@pytest.mark.parametrize("other", [(ONE,), [ONE, 2, 3], None, (3, TWO)])
def test_other_structures_are_refused(other):
    with pytest.raises(StructureError):
        map_tensors(lambda a, b: a, (ONE, TWO), other)
