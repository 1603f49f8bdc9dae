import random

import pytest
import torch

from harness.precision.loss_scale import make_loss_scale
from harness.precision.policy import LossScaleSettings


def overflow_sequence(seed, n=300, rate=0.15):
    generator = random.Random(seed)
    return [generator.random() >= rate for _ in range(n)]


def test_none_has_no_scale_and_static_never_moves():
    assert make_loss_scale(LossScaleSettings()) is None
    state = make_loss_scale(LossScaleSettings(kind="static", init_scale=1024.0))
    for finite in overflow_sequence(0):
        state = state.next(finite)
    assert state.scale == 1024.0


@pytest.mark.parametrize(
    ("seed", "init", "growth", "backoff", "interval"),
    [
        (0, 65536.0, 2.0, 0.5, 3),
        (1, 1.0, 2.0, 0.5, 1),
        (2, 3.0, 1.7, 0.3, 4),
        (3, 2.0**120, 8.0, 0.5, 1),
    ],
)
def test_dynamic_follows_grad_scaler_step_by_step(seed, init, growth, backoff, interval):
    """Oracle: torch.amp.GradScaler fed with the same overflows, to the last bit."""
    settings = LossScaleSettings(
        kind="dynamic",
        init_scale=init,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
    )
    state = make_loss_scale(settings)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=init,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
    )
    for finite in overflow_sequence(seed):
        scaler.scale(torch.ones(1))  # makes the scaler's own tensors on first use
        parameter.grad = torch.tensor([1.0 if finite else torch.inf])
        scaler.step(optimizer)
        scaler.update()
        state = state.next(finite)
        assert state.scale == scaler.get_scale()


class PublishedDynamicLossScaler:
    """The algorithm of DeepSpeed's `DynamicLossScaler.update_scale`, written from its source."""

    def __init__(self, init_scale, scale_factor, scale_window, min_scale, delayed_shift):
        self.cur_scale, self.scale_factor = init_scale, scale_factor
        self.scale_window, self.min_scale = scale_window, min_scale
        self.delayed_shift = self.cur_hysteresis = delayed_shift
        self.cur_iter, self.last_overflow_iter = 0, -1

    def update_scale(self, overflow):
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_hysteresis = self.delayed_shift
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


@pytest.mark.parametrize(
    ("window", "hysteresis", "floor"), [(5, 2, 1.0), (1, 1, 0.0), (7, 3, 256.0)]
)
@pytest.mark.parametrize("rate", [0.05, 0.4])
def test_deepspeed_follows_the_published_algorithm(window, hysteresis, floor, rate):
    """Oracle: the published algorithm on random overflow sequences."""
    settings = LossScaleSettings(
        kind="deepspeed",
        init_scale=2.0**16,
        growth_interval=window,
        hysteresis=hysteresis,
        min_scale=floor,
    )
    for seed in range(5):
        state = make_loss_scale(settings)
        published = PublishedDynamicLossScaler(2.0**16, 2.0, window, floor, hysteresis)
        for finite in overflow_sequence(seed, rate=rate):
            published.update_scale(not finite)
            state = state.next(finite)
            assert state.scale == published.cur_scale


def test_deepspeed_hysteresis_skips_before_it_lowers():
    state = make_loss_scale(
        LossScaleSettings(kind="deepspeed", init_scale=8.0, hysteresis=2, min_scale=4.0)
    )
    scales = []
    for _ in range(4):
        state = state.next(False)
        scales.append(state.scale)
    assert scales == [8.0, 4.0, 4.0, 4.0]
