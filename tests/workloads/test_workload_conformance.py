"""Conformance: what every built-in workload and a user's file must fulfil."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from harness.runs.determinism import weights_sha256
from harness.workloads.batches import iter_tensors
from harness.workloads.char_gpt import CharGpt
from harness.workloads.registry import make_workload
from harness.workloads.settings import CharGptSettings, read_settings

CONF = Path(__file__).parents[2] / "conf" / "workload"
BUILT_IN = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "custom")
# The GPU preset in a size that a test can train; its real size is counted below.
SHRUNK = {
    "char_gpt_124m": {
        "context": 32,
        "num_layers": 1,
        "width": 32,
        "num_heads": 2,
        "vocabulary_size": 1000,
        "num_characters": 200_000,
    }
}


def composed(name):
    """The YAML of a workload with its `defaults` merged, as Hydra does it."""
    data = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    merged = {}
    for base in data.pop("defaults", ["_self_"]):
        merged |= data if base == "_self_" else composed(base)
    return merged


@pytest.fixture(scope="module", params=BUILT_IN)
def workload(request):
    torch.set_num_threads(1)
    return make_workload(composed(request.param) | SHRUNK.get(request.param, {}))


def same_batches(first, second):
    pairs = zip(iter_tensors(list(first)), iter_tensors(list(second)), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_same_seed_means_same_weights_and_batches_bitwise(workload):
    torch.manual_seed(11)
    first = weights_sha256(workload.build_model(3))
    batches = list(workload.batches(3, 4))
    torch.manual_seed(12)  # whatever the global generator holds
    assert weights_sha256(workload.build_model(3)) == first
    assert same_batches(workload.batches(3, 4), batches)


def test_another_seed_means_other_weights_and_batches(workload):
    assert weights_sha256(workload.build_model(0)) != weights_sha256(workload.build_model(1))
    assert not same_batches(workload.batches(0, 1), workload.batches(1, 1))


def test_global_generator_is_left_alone(workload):
    before = torch.get_rng_state()
    workload.build_model(5)
    list(workload.batches(5, 2))
    workload.held_out(5)
    assert torch.equal(torch.get_rng_state(), before)


def test_yields_exactly_the_steps(workload):
    assert len(list(workload.batches(0, 7))) == 7


def test_has_dropout_clipping_and_fp32_weights(workload):
    model = workload.build_model(0)
    assert any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
    assert workload.clip is not None
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("steps", [10, 300])
def test_schedule_warms_up_and_ends_at_its_final_rate(workload, steps):
    settings = workload.settings
    optimizer = workload.make_optimizer(workload.build_model(0))
    scheduler = workload.make_scheduler(optimizer, steps)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert max(rates) == pytest.approx(settings["peak_lr"])
    assert rates[0] < max(rates)
    assert rates[-1] < max(rates)
    last = optimizer.param_groups[0]["lr"]
    # Absolute: the decay to zero leaves the rounding of cos(pi).
    assert last == pytest.approx(settings["peak_lr"] * settings["final_lr_ratio"], abs=1e-12)


def test_held_out_is_the_same_for_all_seeds_and_large_enough(workload):
    held_out = workload.held_out(0)
    assert same_batches(held_out, workload.held_out(1))
    assert sum(workload.num_items(batch) for batch in held_out) >= 2048


def test_training_data_are_not_held_out(workload):
    """No held-out example is ever drawn for training (planted: the same windows would be equal)."""
    held_out = {row.numpy().tobytes() for batch in workload.held_out(0) for row in batch[0]}
    drawn = {row.numpy().tobytes() for batch in workload.batches(0, 40) for row in batch[0]}
    # Text repeats itself (blank lines, licenses), images do not.
    allowed = 0 if "digits" in workload.name else len(held_out) // 50
    assert len(held_out & drawn) <= allowed


def test_short_training_lowers_a_finite_scalar_loss(workload):
    torch.manual_seed(0)
    model, steps = workload.build_model(0), 20
    optimizer = workload.make_optimizer(model)
    scheduler = workload.make_scheduler(optimizer, steps)
    losses = []
    for batch in workload.batches(0, steps):
        loss = workload.loss_fn(model, batch)
        assert loss.ndim == 0
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert all(map(math.isfinite, losses))
    # At least 0.05 nats in 20 steps; a detached or frozen model moves by dropout noise only,
    # and only up or down by far less than that averaged over five steps.
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.05


def test_settings_are_plain_and_name_no_folder(workload):
    assert workload.settings["name"] == workload.name
    assert workload.settings["loss_unit"] == workload.loss_unit == "nats"
    assert len(workload.data_sha256) == 64
    assert yaml.safe_load(yaml.safe_dump(workload.settings)) == workload.settings
    assert "/" not in str(list(workload.settings.values()))


def test_names_are_unique():
    assert len({composed(name)["name"] for name in BUILT_IN}) == len(BUILT_IN)


def test_gpu_preset_has_the_parameters_of_gpt2_small():
    settings = read_settings(composed("char_gpt_124m"))
    assert isinstance(settings, CharGptSettings)
    with torch.device("meta"):
        model = CharGpt(settings, vocabulary_size=settings.vocabulary_size)
    # Radford et al. 2019 (with the released model's 50,257 rows): 124,439,808. Here the padded
    # vocabulary adds 47 rows of 768.
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 + 47 * 768


def test_digits_convnet_has_its_documented_size():
    model = make_workload(composed("digits_convnet")).build_model(0)
    assert sum(p.numel() for p in model.parameters()) == 31_930
