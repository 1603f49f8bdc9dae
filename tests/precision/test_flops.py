"""FLOPs against hand counts and, where torch has a formula, against FlopCounterMode."""

import pytest
import torch
from precision_models import CPU, batch, build, loss_fn, policy
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from harness.precision.audit import audited_step
from harness.precision.execution import applied

FP32 = policy("fp32")


def audit_of(model, forward, with_policy=FP32):
    with applied(with_policy, model, device=CPU) as execution:
        with audited_step(execution, model) as audit:
            with execution.forward():
                loss = forward()
            loss.backward()
        return audit.result()


def flops_by(result, *names):
    sums = {}
    for row in result["rows"]:
        key = tuple(row[name] for name in names)
        sums[key] = sums.get(key, 0) + row["flops"]
    return {key: count for key, count in sums.items() if count}


def test_a_two_layer_mlp_by_hand():
    model, x = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), torch.randn(7, 3)
    result = audit_of(model, lambda: model(x).sum())
    # Forward 2*7*3*5 and 2*7*5*2; backward as much for each weight's gradient, and once more for
    # the input of the second layer (the first layer's input needs none).
    assert flops_by(result, "module", "direction") == {
        ("0", "forward"): 210,
        ("2", "forward"): 140,
        ("0", "backward"): 210,
        ("2", "backward"): 280,
    }
    assert result["flops"] == 840


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_totals_are_those_of_torch_but_for_what_it_does_not_count(compute):
    data = batch()
    model = build()
    result = audit_of(model, lambda: loss_fn(model, data), policy(compute))
    with FlopCounterMode(display=False) as counter:
        loss_fn(build(), data).backward()
    # torch 2.13 has no formula for the CPU's fused attention: 4 sequences of 2 heads, each with two
    # products of 8 x 8 by 8 forward, five backward.
    attention = flops_by(result, "family")[("attention",)]
    assert attention == 16384 + 40960
    assert result["flops"] == counter.get_total_flops() + attention


def test_convolution_and_recurrent_layers_by_hand():
    conv, x = nn.Conv1d(3, 4, 5), torch.randn(2, 3, 9, requires_grad=True)
    result = audit_of(conv, lambda: conv(x).sum())
    forward = 2 * 2 * 4 * 5 * 3 * 5  # batch, filters, positions, channels, taps
    assert result["flops"] == 3 * forward
    lstm, y = nn.LSTM(4, 6), torch.randn(5, 2, 4)
    result = audit_of(lstm, lambda: lstm(y)[0].sum())
    forward = 2 * 5 * 2 * (4 * 6) * (4 + 6)  # steps, sequences, gates, input and state
    assert result["flops"] == 3 * forward


def test_vectors_count():
    weight, x = nn.Parameter(torch.randn(3, 4)), torch.randn(4)
    model = nn.Module()
    model.weight = weight
    assert audit_of(model, lambda: (weight @ x).sum())["flops"] == 2 * 12
