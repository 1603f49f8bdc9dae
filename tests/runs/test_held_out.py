"""Held-out evaluation: when, over what, in which arithmetic, and leaving no trace."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_workloads import BF16, BF16_PURE, FP32, TinyWorkload, class_batches, cross_entropy, run
from torch import nn

from harness.runs.held_out import HeldOutEvaluator, evaluation_steps

CPU = torch.device("cpu")


def test_evaluations_are_spread_over_the_last_third() -> None:
    assert evaluation_steps(300, 5) == (0, 220, 240, 260, 280, 300)
    assert evaluation_steps(20, 5) == (0, 15, 16, 18, 19, 20)
    assert evaluation_steps(1, 5) == (0, 1)
    assert evaluation_steps(2, 1) == (0, 2)


def test_loss_is_the_mean_over_items_in_eval_mode() -> None:
    """Oracle: one batch of everything; the batches are of unequal size."""

    def data(seed: int, steps: int):
        for size, (x, y) in enumerate(class_batches(seed, steps), start=3):
            yield x[:size], y[:size]

    workload = TinyWorkload(data=data, held_out_batches=4)
    model = workload.build_model(0)
    evaluator = HeldOutEvaluator(workload, seed=0, device=CPU)
    evaluator.evaluate(model, step=0)
    result = evaluator.result()
    batches = workload.held_out(0)
    assert batches is not None
    together = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    model.eval()
    with torch.no_grad():
        expected = float(cross_entropy(model, together))
    assert result is not None
    assert result.num_items == 3 + 4 + 5 + 6
    # float64 sum of FP32 means against one FP32 mean
    assert result.loss[0] == pytest.approx(expected, rel=1e-6)
    assert result.unit == "nats"


def test_low_precision_weights_are_evaluated_in_fp32() -> None:
    record = run(TinyWorkload(), BF16_PURE, steps=6)
    model_free = run(TinyWorkload(), BF16, steps=6)
    assert record.held_out is not None
    assert model_free.held_out is not None
    # Before training, autocast's weights are the FP32 ones: exactly FP32's value.
    assert model_free.held_out.loss[0] == run(steps=6).held_out.loss[0]  # type: ignore[union-attr]
    # BF16 weights are other weights, and their loss is no BF16 number.
    assert record.held_out.loss[0] != model_free.held_out.loss[0]
    value = torch.tensor(record.held_out.loss[0])
    assert float(value.bfloat16()) != float(value)


def test_own_figure_replaces_the_loss() -> None:
    workload = TinyWorkload(evaluation=lambda m: 0.25)
    held_out = run(workload, steps=6).held_out
    assert held_out is not None
    assert held_out.unit == "own units"
    assert set(held_out.loss) == {0.25}
    assert held_out.num_items is None


def test_random_evaluation_is_the_same_every_time() -> None:
    workload = TinyWorkload(evaluation=lambda m: float(torch.rand(())))
    held_out = run(workload, steps=6).held_out
    assert held_out is not None
    assert len(set(held_out.loss)) == 1


def test_loss_with_derivatives_is_evaluated_with_gradients() -> None:
    def smoothness(model: nn.Module, batch: object) -> torch.Tensor:
        x, y = batch  # type: ignore[misc]
        x = x.clone().requires_grad_()
        loss = nn.functional.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    record = run(TinyWorkload(loss=smoothness), FP32, steps=6)
    assert record.held_out is not None
    assert all(math.isfinite(x) for x in record.held_out.loss)


def test_buffers_counted_in_eval_mode_are_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layer(x)

    workload = TinyWorkload(model=Counting)
    model = workload.build_model(0)
    model(torch.ones(1, 12))
    evaluator = HeldOutEvaluator(workload, seed=0, device=CPU)
    evaluator.evaluate(model, step=0)
    assert float(model.calls) == 1
    assert model.training
    assert model.layer.weight.grad is None


def test_a_loss_that_changes_its_batch_in_place_does_no_harm() -> None:
    def doubling(model: nn.Module, batch: object) -> torch.Tensor:
        x, y = batch  # type: ignore[misc]
        return nn.functional.cross_entropy(model(x.mul_(2)), y)

    def evaluate_twice() -> tuple[float, ...]:
        workload = TinyWorkload(loss=doubling)
        evaluator = HeldOutEvaluator(workload, seed=0, device=CPU)
        model = workload.build_model(0)
        evaluator.evaluate(model, step=0)
        evaluator.evaluate(model, step=1)
        result = evaluator.result()
        assert result is not None
        return result.loss

    first, second = evaluate_twice()
    assert first == second
    reference, candidate = run(TinyWorkload(loss=doubling)), run(TinyWorkload(loss=doubling), BF16)
    assert candidate.fingerprints == reference.fingerprints


def test_evaluating_trains_neither_a_target_network_nor_a_hidden_state() -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = nn.Linear(12, 4), nn.Linear(12, 4).requires_grad_(False)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            with torch.no_grad():
                self.target.weight.lerp_(self.online.weight, 0.1)
            return self.online(x) + self.target(x)

    workload = TinyWorkload(model=Averaged)
    model = workload.build_model(0)
    before = model.target.weight.clone()
    HeldOutEvaluator(workload, seed=0, device=CPU).evaluate(model, step=0)
    assert model.calls == 0
    assert torch.equal(model.target.weight, before)


def test_what_the_model_stores_in_16_bits_by_itself_is_evaluated_so() -> None:
    """Its forward pass casts for that layer; FP32 weights there would not fit the input."""

    class HalfBody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(12, 8).bfloat16(), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x.bfloat16()).float())

    record = run(TinyWorkload(model=HalfBody), FP32)
    assert record.status == "completed"
    assert record.held_out is not None
    assert all(math.isfinite(x) for x in record.held_out.loss)
