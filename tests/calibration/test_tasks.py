"""The small trainings: they learn, repeat, and compute through every seam they name."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.calibration.tasks import DEFAULTS, TASKS, ShardRule, make_task
from harness.calibration.tasks.diffusion import averaged_name
from harness.calibration.tasks.problem import sinusoids
from harness.calibration.tasks.schedules import FINAL, cosine, linear
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.settings import ProbeSettings, RunSettings
from harness.runs.trainer import train

FP32 = PrecisionPolicy(name="fp32")
TEN_STEPS = 10


def trained(task: Any, *, steps: int = TEN_STEPS, seed: int = 0, policy: Any = FP32) -> RunRecord:
    settings = RunSettings(
        steps=steps, seed=seed, device="cpu", num_threads=1, probes=ProbeSettings.off()
    )
    return train(task, policy, settings, run_key="test", environment={})


def loss_and_gradients(task: Any, *, seed: int = 3) -> tuple[float, dict[str, Tensor]]:
    model = task.build_model(seed)
    model.train()
    batch = next(task.batches(seed, 1))
    torch.manual_seed(seed)  # dropout
    loss = task.loss_fn(model, batch)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def test_four_tasks_in_each_half_with_every_seam_somewhere() -> None:
    halves = [info.half for info in TASKS.values()]
    assert sorted(halves) == ["A"] * 4 + ["B"] * 4
    assert {seam for info in TASKS.values() for seam in info.seams} == set(DEFAULTS)
    assert [name for name, info in TASKS.items() if not info.can_shard] == ["convnet"]


@pytest.mark.parametrize("name", TASKS)
def test_a_run_repeats_bit_for_bit_and_seeds_differ(name: str) -> None:
    first, again, other = (trained(make_task(name), seed=seed) for seed in (0, 0, 1))
    assert first.status == "completed"
    assert first.series["loss"] == again.series["loss"]
    assert first.held_out == again.held_out
    assert first.fingerprints == again.fingerprints
    assert first.series["loss"] != other.series["loss"]
    # One held-out set for all seeds, large enough for the rule.
    assert first.fingerprints.held_out_sha256 == other.fingerprints.held_out_sha256
    assert first.held_out is not None
    assert first.held_out.num_items is not None
    assert first.held_out.num_items >= 2048


def one_step(task: Any, model: nn.Module, batch: Any) -> None:
    task.loss_fn(model, batch).backward()
    task.make_optimizer(model).step()


@pytest.mark.parametrize(("name", "seam"), [(n, s) for n, i in TASKS.items() for s in i.seams])
def test_training_goes_through_the_seam_and_evaluation_does_not(name: str, seam: str) -> None:
    def planted(*args: Any) -> Tensor:
        raise ArithmeticError(seam)

    task = make_task(name, {seam: planted})
    model = task.build_model(0)
    batch = next(task.batches(0, 1))
    with pytest.raises(ArithmeticError, match=seam):
        one_step(task, model, batch)
    model.eval()
    with torch.no_grad():
        value = task.loss_fn(model, task.held_out(0)[0])
    assert math.isfinite(float(value))


@pytest.mark.parametrize("name", TASKS)
def test_a_model_of_the_reference_computes_through_the_seams_of_whom_it_is_given_to(
    name: str,
) -> None:
    def doubled(losses: Tensor) -> Tensor:
        return 2 * losses.mean()

    reference, candidate = make_task(name), make_task(name, {"reduce_loss": doubled})
    model = reference.build_model(0)
    batch = next(reference.batches(0, 1))
    losses = []
    for task in (reference, candidate, reference):
        torch.manual_seed(0)
        losses.append(float(task.loss_fn(model, batch).detach()))
    assert losses[1] == pytest.approx(2 * losses[0], rel=1e-6)
    assert losses[2] == losses[0]


@dataclass(frozen=True)
class Halving:
    """Halves every weight after a step; writes down the optimizers it is installed on."""

    seen: list[Optimizer] = field(default_factory=list)

    def install(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.seen.append(optimizer)

        @torch.no_grad()
        def halve(*_: Any) -> None:
            for parameter in model.parameters():
                parameter.mul_(0.5)

        optimizer.register_step_post_hook(halve)


@pytest.mark.parametrize("name", TASKS)
def test_hooks_act_and_fingerprints_stay(name: str) -> None:
    hook = Halving()
    plain, hooked = trained(make_task(name)), trained(make_task(name, hooks=[hook]))
    assert len(hook.seen) == 1
    assert hooked.fingerprints == plain.fingerprints
    for series in ("batch", "masks"):
        assert hooked.series.get(series) == plain.series.get(series)
    assert hooked.series["loss"][0] == plain.series["loss"][0]
    assert hooked.series["loss"][2:] != plain.series["loss"][2:]


def add(total: Tensor, part: Tensor) -> Tensor:
    return total + part


def keep(part: Tensor) -> Tensor:
    return part


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("name", [n for n, info in TASKS.items() if info.can_shard])
def test_fp32_shards_give_the_whole_batchs_gradient(name: str, shards: int) -> None:
    rule = ShardRule(shards=shards, accumulate=add, send=keep)
    loss, gradients = loss_and_gradients(make_task(name))
    sharded_loss, sharded = loss_and_gradients(make_task(name, shards=rule))
    assert sharded_loss == pytest.approx(loss, rel=1e-5)
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
    difference = torch.cat([(sharded[n] - g).flatten() for n, g in gradients.items()]).norm()
    # FP32 sums of some hundred terms in another order.
    assert difference <= 1e-5 * norm


def test_what_the_shard_rule_says_is_done_once_per_part_and_parameter() -> None:
    sent: list[Tensor] = []

    def send(part: Tensor) -> Tensor:
        sent.append(part.clone())
        return part.bfloat16().float()

    rule = ShardRule(shards=4, accumulate=lambda total, part: 2 * total + part, send=send)
    task = make_task("finetune", shards=rule)
    _, gradients = loss_and_gradients(task)
    assert len(sent) == 4 * len(gradients)
    [parts] = [
        group
        for k in range(0, len(sent), 4)
        if (group := sent[k : k + 4])[0].shape == gradients["first.weight"].shape
    ]
    first, second, third, fourth = (part.bfloat16().float() for part in parts)
    expected = 2 * (2 * (2 * first + second) + third) + fourth
    assert torch.equal(gradients["first.weight"], expected)


def test_what_cannot_be_made_is_said() -> None:
    rule = ShardRule(shards=2, accumulate=add, send=keep)
    with pytest.raises(ValueError, match="task='gpt' does not exist; allowed: gpt_cool, "):
        make_task("gpt")
    with pytest.raises(ValueError, match="seam 'ema' is not one of task kernel; allowed: pairwise"):
        make_task("kernel", {"ema": DEFAULTS["ema"]})
    with pytest.raises(ValueError, match="convnet cannot be computed in shards"):
        make_task("convnet", shards=rule)
    with pytest.raises(ValueError, match="shards=1 is not allowed"):
        ShardRule(shards=1, accumulate=add, send=keep)
    thirds = make_task("finetune", shards=ShardRule(shards=3, accumulate=add, send=keep))
    with pytest.raises(ValueError, match="32 cannot be divided into 3 shards"):
        loss_and_gradients(thirds)


def test_the_held_out_figure_is_that_of_the_averaged_weights() -> None:
    task = make_task("diffusion")
    model = task.build_model(0)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = task.make_optimizer(model)
    task.loss_fn(model, next(task.batches(0, 1))).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = 0.98 * start[name].double() + 0.02 * parameter.detach().double()
        averaged = model.get_buffer(averaged_name(name)).double()
        assert torch.allclose(averaged, expected, rtol=0, atol=1e-6)
    model.eval()
    batch = task.held_out(0)[0]
    with torch.no_grad():
        value = float(task.loss_fn(model, batch))
        for name, parameter in model.named_parameters():
            parameter.copy_(model.get_buffer(averaged_name(name)))
        assert float(model(*batch)) == value


def test_padding_changes_no_loss_and_lonely_queries_stay_finite() -> None:
    task = make_task("gpt_cool")
    model = task.build_model(0)
    symbols, targets, place, padding = next(task.batches(0, 1))
    assert padding.tolist() == [0, 0, 0, 12, 0, 0, 0, 20]
    loss = task.loss_fn(model, (symbols, targets, place, padding)).detach()
    assert float(loss) == pytest.approx(math.log(model.head.out_features), rel=0.05)
    padded = torch.arange(symbols.shape[1]) < padding[:, None]
    other = torch.where(padded, (targets + 1) % 7, targets)
    same = task.loss_fn(model, (symbols.where(~padded, 5), other, place, padding)).detach()
    assert float(same) == float(loss)
    assert task.num_items((symbols, targets, place, padding)) == 8 * 32 - 32


def test_places_reach_beyond_what_bf16_tells_apart_and_decide_the_target() -> None:
    places = torch.cat([batch[2] for batch in make_task("gpt_hot").batches(0, 20)])
    assert 0.5 < float((places > 256).float().mean()) < 0.9
    symbols, targets, place, padding = next(make_task("gpt_hot").batches(1, 1))
    shown = torch.arange(symbols.shape[1]) >= padding[:, None]
    repeats = shown & (place % 4 >= 2)
    assert torch.equal(targets[repeats], symbols[repeats])


def test_batch_norm_agrees_with_torchs() -> None:
    from harness.calibration.tasks.convnet import BatchNorm

    own, torchs = BatchNorm(5), nn.BatchNorm2d(5)
    x = torch.randn(7, 5, 3, 3, generator=torch.Generator().manual_seed(0)) + 2
    # 8 ulp of values near 3: factor and shift are rounded before they meet.
    assert torch.allclose(own(x), torchs(x), rtol=0, atol=2e-6)
    assert torch.allclose(own.running_mean, torchs.running_mean, rtol=1e-6)
    assert torch.allclose(own.running_var, torchs.running_var, rtol=1e-6)
    own.eval()
    torchs.eval()
    assert torch.allclose(own(x), torchs(x), rtol=0, atol=2e-6)


def test_pairwise_distance_and_solve_agree_with_fp64() -> None:
    a, b = torch.randn(6, 3), torch.randn(4, 3)
    exact = torch.cdist(a.double(), b.double()).square()
    assert torch.allclose(DEFAULTS["pairwise_distance"](a, b).double(), exact, rtol=1e-5)
    matrix = a @ a.T + torch.eye(6)
    x = DEFAULTS["solve"](matrix, b.new_ones(6, 2))
    assert torch.allclose(matrix @ x, torch.ones(6, 2), atol=1e-5)


def test_sinusoids_have_the_periods_they_are_given() -> None:
    place = torch.tensor([0.0, 1.0, 4.0, 64.0])
    waves = sinusoids(place, width=4, shortest=4.0, longest=64.0)
    assert waves.shape == (4, 4)
    quarter, slow = math.tau / 4, math.tau / 64
    expected = [math.sin(quarter), math.sin(slow), math.cos(quarter), math.cos(slow)]
    assert torch.allclose(waves[1], torch.tensor(expected), atol=1e-6)
    assert torch.allclose(waves[3], waves[0], atol=1e-5)


@pytest.mark.parametrize("schedule", [cosine, linear])
def test_rates_rise_to_the_peak_and_end_at_a_hundredth(schedule: Callable[..., float]) -> None:
    rates = [schedule(step, 300, warmup=20) for step in range(300)]
    assert rates[0] == pytest.approx(1 / 20)
    assert max(rates) == rates[19] == 1.0
    assert rates[299] == pytest.approx(FINAL)
    assert sorted(rates[20:], reverse=True) == rates[20:]


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_fp32_learns_and_bf16_autocast_learns_the_same(name: str) -> None:
    steps = TASKS[name].steps
    bf16 = PrecisionPolicy(name="bf16", compute_format="bf16")
    reference = trained(make_task(name), steps=steps)
    candidate = trained(make_task(name), steps=steps, policy=bf16)
    assert reference.held_out is not None
    assert candidate.held_out is not None
    start, end = reference.held_out.loss[0], reference.held_out.loss[-1]
    assert end < 0.7 * start
    assert 0 < abs(candidate.held_out.loss[-1] - end) < 0.05 * (start - end)
