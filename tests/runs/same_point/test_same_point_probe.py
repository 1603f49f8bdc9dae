"""The same-point probe: against a computation by hand, and planted faults that it must see."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tiny_workloads import (
    BF16,
    BF16_PURE,
    CLASSES,
    FEATURES,
    FP16,
    FP32,
    TF32,
    TinyWorkload,
    class_batches,
    cross_entropy,
    run,
    settings,
)
from torch import nn
from torch.nn import functional as F

from harness.numerics.formats import TF32 as TF32_FORMAT
from harness.numerics.rounding import round_to_format
from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.runs.same_point.probe import measure_same_point
from harness.runs.same_point.record import SamePointRecord
from harness.runs.same_point.settings import KnownRun, SamePointSettings

STEPS = 20
FP16_UNSCALED = PrecisionPolicy(name="fp16_unscaled", compute_format="fp16")
TRUNCATED = PrecisionPolicy(name="truncated", compute_format="e8m1", rounding="toward_zero")


def probe(
    workload: TinyWorkload,
    *candidates: PrecisionPolicy,
    steps: int = STEPS,
    batches: int = 8,
    points: tuple[float, ...] = (0.5, 1.0),
    **values,
) -> dict[str, SamePointRecord]:
    record = run(workload, FP32, steps)
    known = KnownRun(
        losses=record.series["loss"],
        batches=record.fingerprints.batches,
        learning_rates=record.series["learning_rate"],
    )
    found = measure_same_point(
        workload,
        candidates,
        settings(steps),
        reference=FP32,
        probe=SamePointSettings(points=points, batches=batches),
        known=values.pop("known", known),
        **values,
    )
    for one in found.values():
        # As text: NaN is unequal to itself.
        assert SamePointRecord.from_json(one.to_json()).to_json() == one.to_json()
    return found


@dataclasses.dataclass(frozen=True)
class Ratios:
    """nu, beta, eta and retention of a record, pooled over its points."""

    nu: float
    beta: float
    eta: float
    retention: float

    @classmethod
    def of(cls, record: SamePointRecord) -> Ratios:
        assert record.failed is None, record.failed
        path, k = [p for p in record.points if p.kind == "trajectory"], record.num_batches
        return cls(
            nu=sum(p.error_sq for p in path) / sum(p.noise for p in path),
            beta=sum(p.mean_error_sq - p.error_noise / k for p in path)
            / sum(p.mean_gradient_sq - p.noise / k for p in path),
            eta=sum(p.cross for p in path) / sum(p.self_cross for p in path),
            retention=min(p.retained / p.updated for p in record.points),
        )


def row(record: SamePointRecord, module: str):
    return next(m for m in record.modules if m.module == module)


def test_a_linear_model_by_hand():
    """Least squares under TF32: gradients, errors and updates as written on paper (oracle)."""
    rate, features, num, steps, k = 0.1, 5, 12, 6, 4

    def data(seed, count):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            x = torch.randn(num, features, generator=generator)
            yield x, x.sum(1, keepdim=True) + torch.randn(num, 1, generator=generator)

    workload = TinyWorkload(
        model=lambda: nn.Linear(features, 1, bias=False),
        loss=lambda model, batch: 0.5 * (model(batch[0]) - batch[1]).square().mean(),
        data=data,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=rate),
        clip=None,
        held_out_batches=0,
    )
    found = probe(workload, TF32, steps=steps, batches=k, points=(1.0,))["tf32"]

    def tf32(x):
        return round_to_format(x, TF32_FORMAT)

    def exact(x):
        return x

    def gradient(w, batch, rounded):
        x, y = batch
        residual = (rounded(x) @ rounded(w).T - y) / num
        return rounded(residual).T @ rounded(x)

    drawn = list(data(0, steps + k))
    w = workload.build_model(0).weight.detach()
    for batch in drawn[:steps]:
        w = w - rate * gradient(w, batch, exact)
    f = torch.cat([gradient(w, b, exact) for b in drawn[steps:]]).double()
    c = torch.cat([gradient(w, b, tf32) for b in drawn[steps:]]).double()
    e = c - f
    (point, at_final_rate) = found.points
    # FP32 gradients in another order of summation: 1e-6 of the gradient, which the squares double;
    # the errors themselves are 1e-3 of it, so a thousandth is left of their digits.
    assert point.mean_gradient_sq == pytest.approx(float(f.mean(0).square().sum()), rel=1e-4)
    assert point.noise == pytest.approx(float((f - f.mean(0)).square().sum()) / (k - 1), rel=1e-4)
    assert point.error_sq == pytest.approx(float(e.square().sum()) / k, rel=2e-2)
    assert point.mean_error_sq == pytest.approx(float(e.mean(0).square().sum()), rel=2e-2)
    cross = sum(float(c[i] @ f[j]) for i in range(k) for j in range(k) if i != j)
    assert point.cross == pytest.approx(cross, rel=1e-4)
    assert point.updated == pytest.approx(rate**2 * float(f.square().sum()), rel=1e-4)
    assert point.retained == pytest.approx(rate**2 * float((c * f).sum()), rel=1e-4)
    assert (point.step, point.learning_rate, at_final_rate.kind) == (steps, rate, "final_rate")


def batchnorm_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
    )


def cosine(optimizer, steps):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-4)


def test_training_goes_on_bit_for_bit():
    """Optimizer state, buffers, dropout masks and schedule are as if nobody had looked."""
    workload = TinyWorkload(model=batchnorm_net, scheduler=cosine)
    found = probe(workload, TF32, BF16, FP16, BF16_PURE, points=(0.25, 0.5, 1.0))
    for record in found.values():
        assert record.failed is None
        assert record.same_trajectory is True
        assert record.unseen is True
        assert [p.step for p in record.points] == [5, 10, 20, 20]
        assert record.modules[0].module == "(model)"
        assert [m.module for m in record.modules[1:]] == ["0", "1", "2", "3", "4"]


def test_another_trajectory_is_noticed():
    losses = run(TinyWorkload(), FP32, STEPS).series["loss"]
    other = KnownRun(losses=(*losses[:3], math.nextafter(losses[3], 9), *losses[4:]))
    assert probe(TinyWorkload(), BF16, known=other)["bf16"].same_trajectory is False
    assert probe(TinyWorkload(), BF16, known=KnownRun())["bf16"].same_trajectory is None


def test_the_same_call_finds_the_same():
    first, second = (probe(TinyWorkload(), BF16)["bf16"] for _ in range(2))
    assert first.points == second.points
    assert first.modules == second.modules


def test_a_second_fp32_has_no_error():
    """Same masks, same batches: nothing but the arithmetic can differ (A/A)."""
    workload = TinyWorkload(model=batchnorm_net)
    record = probe(workload, dataclasses.replace(FP32, name="again"))["again"]
    ratios = Ratios.of(record)
    assert (ratios.nu, ratios.beta, ratios.retention) == (0, 0, 1)
    assert ratios.eta == 1
    assert {m.local_forward_error for m in record.modules} == {0.0}


def test_harmless_formats_pass():
    found = probe(TinyWorkload(), TF32, BF16, FP16, BF16_PURE, points=(0.1, 0.33, 0.67, 0.97))
    for name in ("tf32", "bf16", "fp16"):
        ratios = Ratios.of(found[name])
        assert ratios.nu < 0.01
        assert abs(ratios.beta) < 0.005
        assert abs(ratios.eta - 1) < 0.01
        assert ratios.retention > 0.999
    # Unit roundoffs are 2^-11 twice and 2^-8; a ReLU that flips blurs the factor of 8.
    errors = {n: r.modules[0].gradient_error for n, r in found.items()}
    assert max(errors["tf32"], errors["fp16"]) < errors["bf16"] < 0.02


class Centred(nn.Module):
    """A fifth of its weights are biases that a normalization removes: their gradient is noise."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 24)
        self.first.weight.requires_grad_(False)
        self.head = nn.Linear(24, CLASSES, bias=False)

    def forward(self, x):
        h = self.first(x)
        return self.head(h - h.mean(0))


def test_weights_without_a_gradient_of_their_own_do_not_count_as_lost_updates():
    """AdamW makes whole steps of FP32's rounding noise, and no format repeats that noise."""

    def optimizer(model):
        own = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(own, lr=1e-2, eps=1e-15)

    found = probe(TinyWorkload(model=Centred, optimizer=optimizer), TF32, FP16, BF16)
    for name, record in found.items():
        assert Ratios.of(record).retention > 0.98, name
        assert any("left out of the retention" in note for note in record.notes)


def test_truncated_products_are_biased():
    """Planted fault: products of operands cut to 1 mantissa bit shrink; rounding them does not."""
    nearest = dataclasses.replace(TRUNCATED, name="nearest", rounding="nearest")
    found = probe(TinyWorkload(), TRUNCATED, nearest)
    assert Ratios.of(found["truncated"]).beta > 0.05
    assert Ratios.of(found["nearest"]).beta < Ratios.of(found["truncated"]).beta / 2
    assert Ratios.of(found["truncated"]).nu > Ratios.of(found["nearest"]).nu


def sgd_with_small_rate(model):
    return torch.optim.SGD(model.parameters(), lr=1e-4)


def test_updates_that_bf16_weights_lose():
    """Planted fault: steps far below half an ulp of the weights are not stored."""
    small = TinyWorkload(optimizer=sgd_with_small_rate)
    assert Ratios.of(probe(small, BF16_PURE)["bf16_pure"]).retention < 0.5
    assert Ratios.of(probe(small, BF16)["bf16"]).retention > 0.99


def small_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def decays_to_almost_nothing(optimizer, steps):
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1.0 if step < steps - 1 else 1e-4
    )


@pytest.mark.parametrize("optimizer", [sgd_with_small_rate, small_adamw])
def test_stochastic_rounding_retains_them(optimizer):
    """On average all, and the average is what counts, however small the model and the rate.

    At the final rate a weight moves in one draw of 100,000: sampled, 400 weights would not tell.
    """
    stochastic = dataclasses.replace(BF16_PURE, name="stochastic", weight_rounding="stochastic")
    workload = TinyWorkload(optimizer=optimizer, scheduler=decays_to_almost_nothing)
    found = probe(workload, stochastic, BF16_PURE, points=(0.5, 0.9))
    assert Ratios.of(found["bf16_pure"]).retention < 0.5
    path_and_final = [p.retained / p.updated for p in found["stochastic"].points]
    assert len(path_and_final) == 3
    # Gradients are BF16's: unit roundoff 2^-8, and Adam divides one by another.
    assert path_and_final == pytest.approx([1.0] * 3, abs=0.02)
    assert found["stochastic"].same_trajectory is True


def test_fp8_has_the_error_of_its_format():
    fp8 = PrecisionPolicy(
        name="fp8",
        compute_format="fp8_e4m3",
        gradient_format="fp8_e5m2",
        operand_scaling="per_tensor",
    )
    record = probe(TinyWorkload(), fp8)["fp8"]
    # Unit roundoffs 2^-4 forward and 2^-3 backward.
    assert 0.01 < record.modules[0].gradient_error < 0.3
    assert Ratios.of(record).retention > 0.9


def test_a_final_rate_at_which_updates_are_lost():
    """At 50 % and 100 % of the run updates are large enough; at the final rate they are not."""

    def drops(optimizer, steps):
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1.0 if step < steps - 1 else 1e-4
        )

    workload = TinyWorkload(
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0), scheduler=drops, clip=None
    )
    record = probe(workload, BF16_PURE, points=(0.5, 0.9))["bf16_pure"]
    *path, final = record.points
    assert (final.kind, final.step) == ("final_rate", 18)
    assert final.learning_rate == pytest.approx(1e-4)
    assert min(p.retained / p.updated for p in path) > 0.8
    assert final.retained / final.updated < 0.3


class Exchangeable(nn.Module):
    """Computes its activation through an attribute, which a loss may set."""

    def __init__(self):
        super().__init__()
        self.activation = F.relu

    def forward(self, x):
        return self.activation(x)


def exchangeable_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 24), Exchangeable(), nn.Linear(24, CLASSES))


def through(activation):
    def loss(model, batch):
        model[1].activation = activation
        return cross_entropy(model, batch)

    return loss


def halving_adamw(model):
    """Return an optimizer that takes back half of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = []

    def remember(*_):
        before[:] = [p.detach().clone() for p in model.parameters()]

    def take_back(*_):
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=bool(before)):
                parameter.lerp_(old, 0.5)

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(take_back)
    return optimizer


def test_a_candidate_with_code_of_its_own():
    """A fault in the loss or in the optimizer is seen, beside one that has neither."""
    shared = TinyWorkload(model=exchangeable_mlp, loss=through(F.relu))
    policies = [dataclasses.replace(FP32, name=name) for name in ("again", "loss", "optimizer")]
    own = {
        "loss": dataclasses.replace(shared, loss=through(lambda x: 1.25 * F.relu(x))),
        "optimizer": dataclasses.replace(shared, optimizer=halving_adamw),
    }
    found = probe(shared, *policies, workloads=own)
    assert all(r.same_trajectory is True for r in found.values())
    again, loss, optimizer = (Ratios.of(found[p.name]) for p in policies)
    assert (again.nu, again.eta, again.retention) == (0, 1, 1)
    assert (optimizer.nu, optimizer.eta) == (0, 1)
    assert optimizer.retention == pytest.approx(0.5, rel=1e-5)  # one FP32 rounding in each lerp
    assert loss.nu > 0.01
    # 1.25 x for x, in the module that computes it and in no other.
    errors = {m.module: m.local_forward_error for m in found["loss"].modules[1:]}
    assert errors == {"0": 0.0, "1": pytest.approx(0.25, rel=1e-6), "2": 0.0}
    assert {m.local_forward_error for m in found["again"].modules} == {0.0}


def rounding_adamw(model):
    """Return an optimizer after whose steps the second moment is kept in a quarter of its size."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    def shrink(*_):
        for state in optimizer.state.values():
            state["exp_avg_sq"].div_(4.0)

    optimizer.register_step_post_hook(shrink)
    return optimizer


def test_what_an_optimizer_does_after_each_step_was_done_to_its_state_before():
    """A moment that is stored wrongly acts in the next step: the step aside must be that one."""
    shared = TinyWorkload(
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.0)
    )
    own = {"fp32_again": dataclasses.replace(shared, optimizer=rounding_adamw)}
    again = dataclasses.replace(FP32, name="fp32_again")
    found = probe(shared, again, workloads=own, points=(0.9,))["fp32_again"]
    # The moment is 0.999 v + 0.001 g^2, with v a quarter: the step is up to twice as long.
    assert 1.7 < Ratios.of(found).retention < 2.0
    assert found.same_trajectory is True


def test_settings_of_a_candidates_optimizer_are_its_own():
    def larger_eps(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e3)

    # The rate here is that of the run, whatever the candidate's optimizer begins with.
    def other_rate(model):
        return torch.optim.AdamW(model.parameters(), lr=7.0)

    shared = TinyWorkload(scheduler=cosine)
    policies = [dataclasses.replace(FP32, name=name) for name in ("eps", "rate")]
    own = {
        "eps": dataclasses.replace(shared, optimizer=larger_eps),
        "rate": dataclasses.replace(shared, optimizer=other_rate),
    }
    found = probe(shared, *policies, workloads=own)
    # Only weight decay is left of the step.
    assert abs(Ratios.of(found["eps"]).retention) < 0.1
    assert Ratios.of(found["rate"]).retention == 1


def tiny_loss(model, batch):
    # Output gradients near 1e-9: below FP16's smallest subnormal, 6e-8.
    return 1e-7 * cross_entropy(model, batch)


def test_gradients_that_fp16_loses():
    """Planted fault: without loss scaling small gradients become zero; with it they do not."""
    workload = TinyWorkload(loss=tiny_loss, clip=None)
    found = probe(workload, FP16_UNSCALED, FP16)
    assert Ratios.of(found["fp16_unscaled"]).eta < 0.5
    assert row(found["fp16_unscaled"], "(model)").flushed_share > 0.5
    assert abs(Ratios.of(found["fp16"]).eta - 1) < 0.05
    assert row(found["fp16"], "(model)").flushed_share < 0.05


def large_loss(model, batch):
    return 1e4 * cross_entropy(model, batch)


def test_a_scale_that_overflows_is_lowered_as_the_scaler_would():
    workload = TinyWorkload(loss=large_loss)
    fixed = dataclasses.replace(
        FP16, name="fixed", loss_scale=LossScaleSettings(kind="static", init_scale=65536.0)
    )
    found = probe(workload, FP16, fixed)
    assert Ratios.of(found["fp16"]).nu < 0.01
    assert Ratios.of(found["fp16"]).retention > 0.99
    # A static scale stays, the gradients overflow, and the sums say so.
    assert all(not math.isfinite(p.error_sq) for p in found["fixed"].points)
    assert all(p.retained == 0 for p in found["fixed"].points)


def test_the_runs_own_scale_is_where_a_grown_scaler_starts():
    low = dataclasses.replace(
        FP16, name="low", loss_scale=LossScaleSettings(kind="dynamic", init_scale=1.0)
    )
    workload = TinyWorkload(loss=tiny_loss, clip=None)
    at_first = Ratios.of(probe(workload, low)["low"])
    grown = Ratios.of(probe(workload, low, loss_scales={"low": [2.0**20] * STEPS})["low"])
    assert abs(at_first.eta - 1) > 0.5
    assert abs(grown.eta - 1) < 0.05


class OnlyFP32(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, x):
        y = self.linear(x)
        if y.dtype is not torch.float32:
            raise RuntimeError("planted")
        return y


def test_a_candidate_that_raises_costs_the_others_nothing():
    found = probe(TinyWorkload(model=OnlyFP32), BF16, TF32)
    assert "planted" in found["bf16"].failed
    assert (found["bf16"].points, found["bf16"].modules) == ((), ())
    assert found["tf32"].failed is None
    assert found["tf32"].same_trajectory is True


class _FailsLow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if gradient.dtype is not torch.float32:
            raise RuntimeError("planted")
        return gradient


class FailsInBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(_FailsLow.apply(self.first(x)))


def test_gradients_of_a_step_that_raised_reach_nobody():
    """Planted fault: it stops half way through backward, with scaled gradients in place."""
    workload = TinyWorkload(model=FailsInBackward)
    alone = probe(workload, TF32)["tf32"]
    found = probe(workload, FP16, TF32)
    assert "planted" in found["fp16"].failed
    assert found["tf32"].points == alone.points
    last = probe(workload, TF32, FP16)
    assert last["fp16"].same_trajectory is True


def test_an_optimizer_with_a_closure_has_no_single_gradient():
    workload = TinyWorkload(optimizer=lambda m: torch.optim.LBFGS(m.parameters(), max_iter=2))
    failed = probe(workload, BF16)["bf16"].failed
    assert "LBFGS evaluates several gradients per step" in failed


def test_a_reference_that_cannot_be_repeated():
    calls = {"n": 0}

    def fails_later(model, batch):
        calls["n"] += 1
        if calls["n"] > 200:
            raise RuntimeError("planted")
        return cross_entropy(model, batch)

    workload = TinyWorkload(loss=fails_later)
    calls["n"] = 0
    known = KnownRun()
    run(workload, FP32, STEPS)
    calls["n"] = 195
    found = measure_same_point(
        workload,
        [BF16],
        settings(STEPS),
        reference=FP32,
        probe=SamePointSettings(points=(1.0,)),
        known=known,
    )
    assert "could not be repeated" in found["bf16"].failed
    assert "planted" in found["bf16"].failed


def test_a_workload_that_ends_uses_batches_it_has_seen():
    def ends(seed, steps):
        return list(class_batches(seed, STEPS))[:steps]

    record = probe(TinyWorkload(data=lambda s, n: iter(ends(s, n))), BF16)["bf16"]
    assert record.unseen is False
    assert "ends after 20 batches" in record.notes[0]
    assert record.failed is None


def test_batches_that_come_again_are_not_unseen():
    def cycles(seed, steps):
        known = list(class_batches(seed, 3))
        return iter([known[i % 3] for i in range(steps)])

    record = probe(TinyWorkload(data=cycles), BF16)["bf16"]
    assert record.unseen is False
    assert any("only 3 of the 8 batches differ" in note for note in record.notes)


def test_fp64_is_the_truth_of_small_models():
    whole = row(probe(TinyWorkload(), BF16)["bf16"], "(model)")
    # FP32's own error is of the order of its unit roundoff, 6e-8.
    assert 1e-9 < whole.fp32_fp64_error < 1e-5
    # One batch against all of them: the same size, not the same number.
    assert whole.fp64_error == pytest.approx(whole.gradient_error, rel=1)


class Casts(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.linear, self.dtype = nn.Linear(12, 4), dtype

    def forward(self, x):
        return self.linear(x).to(self.dtype)


def test_a_models_own_casts_to_fp32_are_read_as_fp64():
    plain = probe(TinyWorkload(model=lambda: nn.Linear(12, 4)), BF16)["bf16"].modules[0]
    casting = probe(TinyWorkload(model=lambda: Casts(torch.float32)), BF16)["bf16"].modules[0]
    assert casting.fp32_fp64_error == pytest.approx(plain.fp32_fp64_error, rel=1e-6)
    assert casting.fp64_error > 0


class ScalesConstants(nn.Module):
    """A learned scalar times a constant: by torch's promotion FP32 where the constant is FP32."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return self.layer(x) + self.scale.exp() * torch.ones(CLASSES).cumsum(0)


def test_constants_in_fp32_are_read_as_fp64():
    whole = row(probe(TinyWorkload(model=ScalesConstants), BF16)["bf16"], "(model)")
    assert whole.fp32_fp64_error is not None
    assert whole.fp32_fp64_error < 1e-5


def test_a_model_that_casts_lower_has_no_fp64_truth():
    record = probe(TinyWorkload(model=lambda: Casts(torch.float16)), BF16)["bf16"]
    assert record.modules[0].fp64_error is None
    assert any(note.startswith("no comparison with FP64: its own code") for note in record.notes)


def test_random_numbers_of_the_format_have_no_fp64_truth():
    def noisy(model, batch):
        return cross_entropy(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))

    record = probe(TinyWorkload(loss=noisy), BF16)["bf16"]
    assert record.failed is None
    assert record.modules[0].fp64_error is None
    assert any("random numbers" in note for note in record.notes)


def test_random_state_and_switches_are_put_back():
    before = torch.get_rng_state()
    probe(TinyWorkload(), TF32, BF16)
    assert torch.equal(before, torch.get_rng_state())
    x = torch.randn(4, 4)
    assert F.linear(x, x).dtype is torch.float32


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"points": ()}, r"points=\[\]"),
        ({"points": (0.0,)}, r"points=\[0.0\]"),
        ({"points": (1.5,)}, r"points=\[1.5\]"),
        ({"batches": 1}, "batches=1"),
        ({"fp64_max_parameters": -1}, "fp64_max_parameters=-1"),
    ],
)
def test_settings_out_of_range(values, message):
    with pytest.raises(ValueError, match=message):
        SamePointSettings(**values)


def test_points_of_short_runs_fall_together():
    assert SamePointSettings().steps(300) == (30, 99, 201, 291)
    assert SamePointSettings().steps(4) == (1, 3, 4)
    assert SamePointSettings().steps(1) == (1,)


def test_the_last_rate_above_zero_is_the_final_one():
    assert KnownRun(learning_rates=(0.1, 0.05, 0.0)).final_rate == 0.05
    assert KnownRun(learning_rates=(math.nan,)).final_rate is None
