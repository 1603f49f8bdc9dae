"""Every fault does what its sentence says, shown on a small tensor, and every arm stays a pair."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness.calibration.arms import Arm, arms_of, planted, workload_of
from harness.calibration.doses import QUICK
from harness.calibration.faults import hooks
from harness.calibration.faults.catalogue import FAULTS
from harness.calibration.faults.rounded import rounded, rounded_running_sum, rounded_sum
from harness.calibration.tasks import TASKS
from harness.precision.policy import PrecisionPolicy
from harness.runs.settings import ProbeSettings, RunSettings
from harness.runs.trainer import train

TESTED: dict[str, Callable[[], None]] = {}


def fault(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Let a function be the test of the fault `name`."""

    def remember(test: Callable[[], None]) -> Callable[[], None]:
        assert name not in TESTED
        TESTED[name] = test
        return test

    return remember


def seam(name: str, dose: str, which: str) -> Callable[..., Tensor]:
    function = planted(name, dose).seams[which]
    return function


def policy(name: str, dose: str = "") -> PrecisionPolicy:
    return planted(name, dose).policy


def stepped(
    name: str, dose: str, *, start: float, gradients: list[float], make: Callable[..., object]
) -> tuple[Tensor, torch.optim.Optimizer]:
    """Return one weight after optimizer steps with these gradients under a fault's hooks."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(start)
    optimizer = make(model.parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    for hook in planted(name, dose).hooks:
        hook.install(optimizer, model)
    for gradient in gradients:
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
    return model.weight.detach(), optimizer


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)  # type: ignore[arg-type]


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)  # type: ignore[arg-type]


@fault("fp16_underflow")
def _() -> None:
    scale = policy("fp16_underflow", "8").loss_scale
    assert (scale.kind, scale.init_scale) == ("static", 1 / 256)


@fault("clip_before_unscale")
def _() -> None:
    chosen = policy("clip_before_unscale", "10")
    assert chosen.clip_before_unscale
    assert chosen.loss_scale.init_scale == 1024


@fault("scaler_thrashing")
def _() -> None:
    scale = policy("scaler_thrashing", "3").loss_scale
    assert (scale.growth_interval, scale.growth_factor) == (3, 256)


@fault("scaler_late_start")
def _() -> None:
    assert policy("scaler_late_start", "40").loss_scale.init_scale == 2.0**40


@fault("scaler_one_of_two")
def _() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    planted("scaler_one_of_two", "16").hooks[0].install(optimizer, nn.Linear(1, 1))
    for parameter in (first, second):
        parameter.grad = torch.ones(1)
    optimizer.step()
    assert (first.item(), second.item()) == (-1, -16)


@fault("few_mantissa_bits")
def _() -> None:
    assert policy("few_mantissa_bits", "2").compute_format == "e8m2"


@fault("truncation")
def _() -> None:
    chosen = policy("truncation", "4")
    assert (chosen.compute_format, chosen.rounding) == ("e8m4", "toward_zero")
    assert chosen.round_results


@fault("fp8_unscaled")
def _() -> None:
    chosen = policy("fp8_unscaled", "e4m3_e5m2")
    assert (chosen.compute_format, chosen.gradient_format) == ("fp8_e4m3", "fp8_e5m2")
    assert chosen.operand_scaling == "none"


@fault("low_format_gradients")
def _() -> None:
    chosen = policy("low_format_gradients", "e8m1")
    assert (chosen.compute_format, chosen.gradient_format) == ("e8m7", "e8m1")


@fault("all_ops")
def _() -> None:
    chosen = policy("all_ops", "fp16")
    assert (chosen.compute_format, chosen.low_precision_ops) == ("fp16", ("all",))
    assert chosen.loss_scale.kind == "none"


@fault("pure")
def _() -> None:
    chosen = policy("pure", "bf16")
    assert (chosen.param_format, chosen.compute_format) == ("bf16", "bf16")
    assert chosen.weight_rounding == "nearest"


@fault("rounded_weights")
def _() -> None:
    # 1 - 0.001 lies nearer to 1 than to 1 - 2^-8, the value below it in BF16.
    weight, _ = stepped("rounded_weights", "bf16", start=1.0, gradients=[1.0] * 20, make=sgd)
    assert weight.item() == 1
    weight, _ = stepped("rounded_weights", "bf16", start=1.0, gradients=[3.0], make=sgd)
    assert weight.item() == 1 - 2.0**-8


@fault("rounded_weights_late")
def _() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    planted("rounded_weights_late", "0.5_bf16").hooks[0].install(optimizer, nn.Linear(1, 1))
    values = []
    for rate in (1e-3, 0.6e-3, 0.4e-3):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.ones(1)
        optimizer.step()
        values.append(weight.item())
    assert values[0] == pytest.approx(0.999)
    assert values[1] == pytest.approx(0.9984)
    # 0.998 rounds to 1 - 2^-9 in no format of 7 bits; to 1 - 2^-8 = 0.99609 or 1, which is nearer.
    assert values[2] == 1 - 2.0**-8


@fault("optimizer_state")
def _() -> None:
    gradients = [1.0, *[0.0] * 30]
    _, kept = stepped("step_counter", "e8m20", start=0.0, gradients=gradients, make=adam)
    _, low = stepped("optimizer_state", "second_bf16", start=0.0, gradients=gradients, make=adam)
    moments = [next(iter(o.state.values()))["exp_avg_sq"].item() for o in (kept, low)]
    assert moments[0] == pytest.approx(1e-3 * 0.999**30)
    # 0.999 v rounds back to v in BF16, so v stays what the first gradient made it.
    assert moments[1] == torch.tensor(1e-3).bfloat16().item()


@fault("quantized_second_moment")
def _() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([weight], lr=1e-3)
    hook = planted("quantized_second_moment", "255").hooks[0]
    hook.install(optimizer, nn.Linear(1, 1))
    weight.grad = torch.tensor([1.0, 0.04])
    optimizer.step()
    # 0.04^2 = 0.0016 of the maximum is below half of 1/255.
    assert optimizer.state[weight]["exp_avg_sq"].tolist() == [pytest.approx(1e-3), 0]


@fault("fp16_adam_eps")
def _() -> None:
    _, optimizer = stepped("fp16_adam_eps", "1e-3", start=0.0, gradients=[], make=adam)
    assert optimizer.param_groups[0]["eps"] == 1e-3


@fault("step_counter")
def _() -> None:
    _, bf16 = stepped("step_counter", "bf16", start=0.0, gradients=[1.0] * 260, make=adam)
    _, low = stepped("step_counter", "e8m3", start=0.0, gradients=[1.0] * 260, make=adam)
    counters = [next(iter(o.state.values()))["step"].item() for o in (bf16, low)]
    assert counters == [256, 16]


@fault("weight_decay_lost")
def _() -> None:
    def decayed(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)  # type: ignore[arg-type]

    weight, _ = stepped("weight_decay_lost", "bf16", start=1.0, gradients=[0.0] * 5, make=decayed)
    assert weight.item() == 1  # 1 - 0.001 is 1 in BF16


@fault("gradients_stored")
def _() -> None:
    # Half of E5M2's smallest value, 2^-16, is its limit of rounding to zero.
    weight, _ = stepped("gradients_stored", "fp8_e5m2_0", start=0.0, gradients=[2.0**-17], make=sgd)
    assert weight.item() == 0
    weight, _ = stepped("gradients_stored", "fp8_e5m2_0", start=0.0, gradients=[1.1], make=sgd)
    assert weight.item() == pytest.approx(-1e-3)
    weight, _ = stepped("gradients_stored", "fp8_e5m2_8", start=0.0, gradients=[2.0**-10], make=sgd)
    assert weight.item() == 0


@fault("softmax_no_max")
def _() -> None:
    scores = torch.tensor([[0.0, 1.0, -math.inf]])
    exact = torch.softmax(scores, -1)
    assert torch.allclose(seam("softmax_no_max", "0", "softmax")(scores), exact, atol=1e-3)
    # exp(12) is beyond 65504: infinity over infinity.
    assert seam("softmax_no_max", "11", "softmax")(scores).isnan().any()
    # exp(-18) is zero in FP16, and so is the sum.
    assert seam("softmax_no_max", "-19", "softmax")(scores).isnan().any()


@fault("low_attention_logits")
def _() -> None:
    q, k = torch.tensor([[1.0]]), torch.tensor([[0.25], [0.5]])
    exact = torch.tensor([[0.25, 0.5]])
    assert torch.equal(seam("low_attention_logits", "bf16_0", "attention_scores")(q, k, 1.0), exact)
    # From 256 on BF16 counts in twos: both scores become 256.
    drifted = seam("low_attention_logits", "bf16_256", "attention_scores")(q, k, 1.0)
    assert torch.equal(drifted, torch.zeros(1, 2))


@fault("attention_scale_late")
def _() -> None:
    q, k = torch.full((1, 4), 10.0), torch.full((1, 4), 10.0)
    late = seam("attention_scale_late", "100", "attention_scores")
    assert late(q, k, 0.5).item() == pytest.approx(200)
    late = seam("attention_scale_late", "1000", "attention_scores")
    assert late(q, k, 0.5).item() == math.inf


@fault("low_exp")
def _() -> None:
    exp = seam("low_exp", "fp16_-12", "exp")
    # exp(-18) = 1.5e-8 is below half of FP16's smallest value, 2^-25.
    assert exp(torch.tensor([-6.0])).item() == 0
    assert exp(torch.tensor([12.0])).item() == pytest.approx(math.exp(12), rel=1e-3)
    assert seam("low_exp", "fp16_0", "exp")(torch.tensor([12.0])).item() == math.inf


@fault("fp16_mask")
def _() -> None:
    masked = seam("fp16_mask", "", "mask")(torch.zeros(2), torch.tensor([True, False]))
    assert masked[0].isnan()
    assert masked[1] == -math.inf


@fault("norm_overflow")
def _() -> None:
    x = torch.tensor([[300.0, -300.0], [3.0, -3.0]])
    one, zero = torch.ones(2), torch.zeros(2)
    normalized = seam("norm_overflow", "1", "norm")(x, one, zero)
    # 300^2 is beyond 65504, and 1 over infinity is 0.
    assert torch.equal(normalized[0], zero)
    assert torch.allclose(normalized[1], torch.tensor([1.0, -1.0]), atol=1e-3)


@fault("norm_cancellation")
def _() -> None:
    x = torch.tensor([[1.0, -1.0]])
    one, zero = torch.ones(2), torch.zeros(2)
    exact = seam("norm_cancellation", "bf16_0", "norm")(x, one, zero)
    assert torch.allclose(exact, torch.tensor([[1.0, -1.0]]), atol=1e-3)
    # (100^2 + 1) is 9984 in BF16 as 100^2 is: their difference is 0, and eps is all that is left.
    blown = seam("norm_cancellation", "bf16_100", "norm")(x, one, zero)
    assert blown[0, 0].item() == pytest.approx(1 / math.sqrt(1e-5), rel=1e-3)


@fault("batch_statistics_overflow")
def _() -> None:
    x = torch.tensor([[[200.0]], [[-200.0]], [[200.0]], [[-200.0]]])
    mean, variance = seam("batch_statistics_overflow", "1", "batch_statistics")(x)
    assert mean.item() == 0
    assert variance.item() == 65504 / 4  # of 160000 / 4
    _, small = seam("batch_statistics_overflow", "1", "batch_statistics")(x / 100)
    assert small.item() == pytest.approx(4)


@fault("batch_statistics_cancellation")
def _() -> None:
    x = torch.tensor([[[1.0]], [[-1.0]]])
    mean, variance = seam("batch_statistics_cancellation", "bf16_0", "batch_statistics")(x)
    assert (mean.item(), variance.item()) == (0, 1)
    mean, variance = seam("batch_statistics_cancellation", "bf16_100", "batch_statistics")(x)
    assert (mean.item(), variance.item()) == (0, 0)


@fault("running_statistics")
def _() -> None:
    low = seam("running_statistics", "bf16", "running_statistics")
    # A tenth of 0.01 is less than half the spacing below 1, 2^-9.
    assert low(torch.ones(1), torch.tensor([0.99]), 0.1).item() == 1
    assert low(torch.ones(1), torch.tensor([0.5]), 0.1).item() == torch.tensor(0.95).bfloat16()


@fault("low_ema")
def _() -> None:
    low = seam("low_ema", "bf16", "ema")
    assert low(torch.ones(1), torch.tensor([0.9]), 0.99).item() == 1
    assert low(torch.ones(1), torch.zeros(1), 0.5).item() == 0.5


@fault("low_pool")
def _() -> None:
    ones = torch.ones(1, 1024)
    # Adding ones stops at 256.
    assert seam("low_pool", "bf16_0", "pool")(ones, 1).item() == 0.25
    assert seam("low_pool", "e8m20_0", "pool")(ones, 1).item() == 1


@fault("pool_overflow")
def _() -> None:
    pool = seam("pool_overflow", "100", "pool")
    assert pool(torch.full((1, 10), 6.0), 1).item() == 6
    assert pool(torch.full((1, 10), 600.0), 1).item() == pytest.approx(65504 / 1000)


@fault("low_residual")
def _() -> None:
    x, y = torch.tensor([1.0]), torch.tensor([0.25])
    assert seam("low_residual", "bf16_0", "residual")(x, y).item() == 1.25
    assert seam("low_residual", "bf16_255", "residual")(x, y).item() == 1


@fault("low_loss_mean")
def _() -> None:
    losses = torch.tensor([1.0, 3.0], requires_grad=True)
    mean = seam("low_loss_mean", "fp16_20", "reduce_loss")(losses)
    assert mean.item() == 2
    (gradient,) = torch.autograd.grad(mean, losses)
    assert gradient.tolist() == [0.5, 0.5]  # 2^-21 is a value of FP16
    (gradient,) = torch.autograd.grad(
        seam("low_loss_mean", "fp16_24", "reduce_loss")(losses), losses
    )
    assert gradient.tolist() == [0, 0]  # 2^-25 is a tie with zero


@fault("low_token_losses")
def _() -> None:
    logits, target = torch.tensor([[1.0, 1.25]], requires_grad=True), torch.tensor([0])
    exact = torch.nn.functional.cross_entropy(logits, target)
    (right,) = torch.autograd.grad(exact, logits)

    def gradient(dose: str, targets: Tensor) -> Tensor:
        losses = seam("low_token_losses", dose, "token_losses")(logits, targets)
        assert losses.item() == pytest.approx(exact.item())
        (found,) = torch.autograd.grad(losses, logits)
        return found

    assert torch.allclose(gradient("bf16_0", target), right, rtol=2.0**-6)
    # From 512 on BF16 counts in fours: both logits are 512, and each class has a half.
    assert gradient("bf16_512", target).tolist() == [[-0.5, 0.5]]
    shares = torch.tensor([[1.0, 0.0]])
    assert torch.equal(gradient("bf16_0", shares), gradient("bf16_0", target))


@fault("low_logits")
def _() -> None:
    h, weight = torch.tensor([[257.0]]), torch.tensor([[1.0]])
    assert seam("low_logits", "bf16", "logits")(h, weight).item() == 256


@fault("low_pairwise_distance")
def _() -> None:
    a = torch.tensor([[1.0, 2.0]])
    exact = seam("low_pairwise_distance", "bf16_0", "pairwise_distance")(a, a + 0.5)
    assert exact.item() == 0.5
    # 1001 and 2001 are no values of TF32: the product is that of their neighbours.
    point = torch.tensor([[2049.0]])
    far = seam("low_pairwise_distance", "tf32_0", "pairwise_distance")(point, point)
    assert far.item() == 2 * 2049**2 - 2 * 2048**2


@fault("low_solve")
def _() -> None:
    solved = seam("low_solve", "bf16", "solve")(torch.tensor([[1.001]]), torch.tensor([[1.0]]))
    assert solved.item() == 1


@fault("low_cumulative_sum")
def _() -> None:
    total = seam("low_cumulative_sum", "bf16_0", "cumulative_sum")(torch.ones(300), 0)
    assert total[:256].tolist() == list(range(1, 257))
    assert total[256:].eq(256).all()
    late = seam("low_cumulative_sum", "bf16_256", "cumulative_sum")(torch.ones(2, 3), 1)
    assert late.eq(0).all()


@fault("embedding_gradient")
def _() -> None:
    weight = torch.zeros(3, 2, requires_grad=True)
    index = torch.cat([torch.zeros(300, dtype=torch.int64), torch.tensor([2])])
    rows = seam("embedding_gradient", "bf16_1", "embedding")(weight, index)
    (gradient,) = torch.autograd.grad(rows.sum(), weight)
    assert gradient.tolist() == [[256, 256], [0, 0], [1, 1]]


@fault("low_positions")
def _() -> None:
    low = seam("low_positions", "bf16", "positions")(torch.tensor([255, 257, 258, 259]))
    assert low.tolist() == [255, 256, 258, 260]


@fault("low_timesteps")
def _() -> None:
    assert seam("low_timesteps", "bf16", "timesteps")(torch.tensor([937])).item() == 936


@fault("gradient_accumulation")
def _() -> None:
    rule = planted("gradient_accumulation", "bf16_8").shards
    assert rule is not None
    assert rule.shards == 8
    total = rule.accumulate(torch.tensor([256.0]), rule.send(torch.tensor([1.0])))
    assert total.item() == 256


@fault("all_reduce")
def _() -> None:
    small = planted("all_reduce", "fp16_-12").shards
    large = planted("all_reduce", "fp16_12").shards
    assert small is not None
    assert large is not None
    assert small.send(torch.tensor([2.0**-14])).item() == 0
    assert large.send(torch.tensor([16.0])).item() == math.inf
    assert small.accumulate(torch.tensor([256.0]), torch.tensor([1.0])).item() == 257


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_does_what_it_says(name: str) -> None:
    TESTED[name]()


def test_there_are_many_kinds_of_faults_and_each_is_used_somewhere() -> None:
    used = {arm.family for task in TASKS for arm in arms_of(task) if arm.kind == "fault"}
    assert len(used) >= 24
    assert used == set(FAULTS)


def test_every_source_is_a_repository_with_a_number() -> None:
    for one in FAULTS.values():
        assert one.source == "" or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", one.source), one.name


@pytest.mark.parametrize("task", TASKS)
def test_arms_have_unique_names_that_are_file_names(task: str) -> None:
    arms = arms_of(task)
    names = [arm.name for arm in arms]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_@.-]+", name) for name in names)
    assert names[0] == "fp32"
    assert [arm.kind for arm in arms].count("reference") == 1
    assert all(arm.policy.name == arm.name for arm in arms)
    assert sum(arm.kind == "null" for arm in arms) >= 4
    assert sum(arm.kind == "harmless" for arm in arms) >= 4


def test_the_quick_study_has_three_tasks_with_every_kind_of_arm() -> None:
    quick = {task: arms_of(task, quick=True) for task in TASKS}
    chosen = {task: arms for task, arms in quick.items() if arms}
    assert set(chosen) == {"gpt_cool", "mlp_regression", "convnet"}
    for task, arms in chosen.items():
        assert 10 <= len(arms) <= 12
        assert {arm.kind for arm in arms} == {"reference", "null", "harmless", "fault"}
        assert arms[0].name == "fp32"
        assert [arm.name for arm in arms] == [
            arm.name for arm in arms_of(task) if arm.name in QUICK[task]
        ]
        assert len(arms) == len(QUICK[task]), "a name of the quick study is no arm"


@pytest.mark.parametrize("task", TASKS)
def test_every_arm_is_a_pair_of_the_reference(task: str) -> None:
    arms = arms_of(task)
    settings = RunSettings(
        steps=3,
        seed=5,
        device="cpu",
        num_threads=1,
        tail_evaluations=1,
        probes=ProbeSettings.off(),
    )

    def prints(arm: Arm) -> object:
        record = train(workload_of(task, arm), arm.policy, settings, run_key="k", environment={})
        assert record.crash is None, record.crash
        return record.fingerprints

    expected = prints(arms[0])
    for arm in arms[1:]:
        assert prints(arm) == expected, arm.name


def test_an_arm_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="fault='no_such'"):
        planted("no_such", "")
    with pytest.raises(ValueError, match="task='no_such'"):
        arms_of("no_such")


def test_rounding_concerns_the_gradient_as_in_a_cast() -> None:
    x = torch.tensor([1.001], requires_grad=True)
    incoming = torch.tensor([1.001])
    (gradient,) = torch.autograd.grad(rounded(x, "bf16"), x, incoming)
    (real,) = torch.autograd.grad(x.bfloat16().float(), x, incoming)
    assert rounded(x, "bf16").item() == 1
    assert gradient.item() == real.item() == 1


def test_a_sum_in_parts_rounds_once_a_part() -> None:
    ones = torch.ones(1000, requires_grad=True)
    assert rounded_sum(ones, 0, "bf16").item() == 256
    in_parts = rounded_sum(ones, 0, "bf16", parts=4)
    assert in_parts.item() == 1000
    (gradient,) = torch.autograd.grad(in_parts, ones)
    assert gradient.eq(1).all()


def test_the_gradient_of_a_running_sum_is_what_autograd_gives() -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(2))
    (low,) = torch.autograd.grad(rounded_running_sum(x, 1, "e8m22"), x, weight)
    (exact,) = torch.autograd.grad(x.cumsum(1), x, weight)
    # 2^-22, once for the sum and once for its rounding.
    assert torch.allclose(low, exact, rtol=2.0**-21)


def test_hooks_keep_nothing_between_runs() -> None:
    hook = hooks.RoundedWeights(name="bf16", below=0.5)
    for _ in range(2):
        weight = nn.Parameter(torch.tensor([1.001]))
        optimizer = torch.optim.SGD([weight], lr=1e-9)
        hook.install(optimizer, nn.Linear(1, 1))
        weight.grad = torch.zeros(1)
        optimizer.step()
        # The first rate is the highest so far; a peak kept from an earlier run would round here.
        assert weight.item() == pytest.approx(1.001)
        optimizer.param_groups[0]["lr"] = 1.0
        weight.grad = torch.zeros(1)
        optimizer.step()
