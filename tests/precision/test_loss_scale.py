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


def published_scales(overflows, *, init, window, hysteresis, floor, consecutive):
    """Return the scale after every step, from what DeepSpeed's algorithm says about histories.

    A clean step whose distance from the last overflow (from step -1 before the first) is a multiple
    of the window doubles the scale. An overflow halves it, down to the floor, unless fewer than
    `hysteresis - 1` overflows came before it since the last refill. Doubling refills; so does every
    clean step if overflows must be consecutive.
    """
    scales, scale, last_overflow, last_refill = [], init, -1, -1
    for step, overflow in enumerate(overflows):
        if overflow:
            spared = sum(overflows[last_refill + 1 : step])
            if spared >= hysteresis - 1:
                scale = max(scale / 2, floor)
            last_overflow = step
        else:
            doubles = (step - last_overflow) % window == 0
            scale *= 2 if doubles else 1
            if doubles or consecutive:
                last_refill = step
        scales.append(scale)
    return scales


@pytest.mark.parametrize(
    ("window", "hysteresis", "floor"), [(5, 2, 1.0), (1, 1, 0.0), (7, 3, 256.0), (2, 4, 1.0)]
)
@pytest.mark.parametrize("rate", [0.05, 0.4, 0.9])
@pytest.mark.parametrize("consecutive", [False, True])
def test_deepspeed_follows_the_published_algorithm(window, hysteresis, floor, rate, consecutive):
    """Oracle: the published algorithm, told from histories, on random overflow sequences."""
    settings = LossScaleSettings(
        kind="deepspeed",
        init_scale=2.0**16,
        growth_interval=window,
        hysteresis=hysteresis,
        min_scale=floor,
        consecutive_hysteresis=consecutive,
    )
    for seed in range(5):
        clean = overflow_sequence(seed, rate=rate)
        state, scales = make_loss_scale(settings), []
        for finite in clean:
            state = state.next(finite)
            scales.append(state.scale)
        assert scales == published_scales(
            [not finite for finite in clean],
            init=2.0**16,
            window=window,
            hysteresis=hysteresis,
            floor=floor,
            consecutive=consecutive,
        )


def test_consecutive_hysteresis_is_refilled_by_a_clean_step():
    """Overflow, clean, overflow: without refilling the second one halves the scale."""
    for consecutive, expected in ((False, [8.0, 8.0, 4.0]), (True, [8.0, 8.0, 8.0])):
        state, scales = (
            make_loss_scale(
                LossScaleSettings(
                    kind="deepspeed",
                    init_scale=8.0,
                    hysteresis=2,
                    consecutive_hysteresis=consecutive,
                )
            ),
            [],
        )
        for finite in (False, True, False):
            state = state.next(finite)
            scales.append(state.scale)
        assert scales == expected


def test_deepspeed_hysteresis_skips_before_it_lowers():
    state = make_loss_scale(
        LossScaleSettings(kind="deepspeed", init_scale=8.0, hysteresis=2, min_scale=4.0)
    )
    scales = []
    for _ in range(4):
        state = state.next(False)
        scales.append(state.scale)
    assert scales == [8.0, 4.0, 4.0, 4.0]
