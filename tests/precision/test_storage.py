import pytest
import torch
from torch import nn

from harness.precision.storage import fp32_weights, stored_in


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    net.register_parameter("w", nn.Parameter(torch.randn(2, dtype=torch.cfloat)))
    return net


def test_weights_and_floating_buffers_are_cast_in_place_and_back():
    net = model()
    identities = [id(p) for p in net.parameters()]
    values = net[0].weight.detach().clone()
    with stored_in(net, torch.bfloat16):
        assert net[0].weight.dtype is net[1].running_mean.dtype is torch.bfloat16
        assert net[1].num_batches_tracked.dtype is torch.int64
        assert net.w.dtype is torch.complex64
        assert net[2].weight is net[0].weight
        assert [id(p) for p in net.parameters()] == identities
        net(torch.randn(3, 4, dtype=torch.bfloat16)).sum().backward()
    assert net[0].weight.dtype is torch.float32
    assert net[0].weight.grad is None
    assert torch.equal(net[0].weight, values.bfloat16().float())  # trained values are kept


def test_excepted_modules_keep_fp32_also_where_tied():
    net = model()
    with stored_in(net, torch.bfloat16, except_modules=["2"]):
        assert net[0].weight.dtype is torch.float32
        assert net[0].bias.dtype is torch.bfloat16


def test_everything_is_restored_after_an_exception():
    net = model()
    with pytest.raises(KeyError), stored_in(net, torch.bfloat16):
        raise KeyError
    assert {p.dtype for p in net.parameters()} == {torch.float32, torch.complex64}


def test_fp32_weights_for_evaluation_restores_the_very_same_tensors():
    net = model()
    with stored_in(net, torch.bfloat16):
        data = [t.data.data_ptr() for t in [*net.parameters(), *net.buffers()]]
        mean = net[1].running_mean.clone()
        with fp32_weights(net):
            assert net[0].weight.dtype is net[1].running_mean.dtype is torch.float32
            net(torch.randn(3, 4))  # in training mode: moves the running mean
        assert [t.data.data_ptr() for t in [*net.parameters(), *net.buffers()]] == data
        assert torch.equal(net[1].running_mean, mean)
