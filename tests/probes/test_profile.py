"""Profiles: what the profiler sees of known work, and what is said about it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from harness.precision.policy import PrecisionPolicy
from harness.probes.profile import OpTime, profiled_ops
from harness.runs.phases import Phases
from harness.runs.settings import ProbeSettings, RunSettings
from harness.runs.timing.profile import make_profile
from harness.runs.timing.record import TimeRatio
from harness.runs.trainer import train
from harness.workloads.registry import make_workload

CPU = torch.device("cpu")
BF16 = PrecisionPolicy(name="bf16", compute_format="bf16")
TF32 = PrecisionPolicy(name="tf32", compute_format="tf32")
FP32 = PrecisionPolicy(name="fp32")


def op(name: str, family: str, fmt: str, seconds: float, *, is_cast: bool = False) -> OpTime:
    return OpTime(name=name, family=family, format=fmt, is_cast=is_cast, seconds=seconds)


def by_key(ops: list[OpTime]) -> dict[tuple[str, str], OpTime]:
    return {(o.name, o.format): o for o in ops}


def test_ops_formats_and_casts_of_known_work() -> None:
    a, mask = torch.randn(64, 64), torch.ones(64, 64, dtype=torch.bool)

    def work() -> None:
        low = a.bfloat16()
        torch.mm(low, low)
        torch.mm(a, a).relu()
        a.clone()
        mask.float()
        a.mul(2.0)

    found = by_key(profiled_ops(work, device=CPU))
    assert found[("mm", "bf16")].family == found[("mm", "fp32")].family == "matmul"
    assert found[("relu", "fp32")].family == "elementwise"
    assert found[("copy_", "bf16")].is_cast
    # A clone, a mask that becomes numbers and a number's format are no casts between formats.
    assert not found[("copy_", "fp32")].is_cast
    assert {o.format for o in found.values() if o.is_cast} == {"bf16", "fp32"}
    assert found[("copy_", "fp32")].family == "copy"
    assert all(o.seconds > 0 for o in found.values())


def test_time_is_counted_once_and_without_annotations() -> None:
    model, phases = nn.Linear(32, 32), Phases(CPU, enabled=True)

    def work() -> None:
        with phases("forward"):
            model(torch.ones(4, 32)).sum().backward()

    ops = profiled_ops(work, device=CPU)
    names = {o.name for o in ops}
    assert "mm" in names
    assert not any("forward" in name or "Backward" in name for name in names)


def test_the_optimizer_is_a_family() -> None:
    weight = nn.Parameter(torch.ones(100))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def work() -> None:
        weight.square().sum().backward()
        optimizer.step()

    work()
    optimizer.zero_grad()
    families = {o.name: o.family for o in profiled_ops(work, device=CPU)}
    assert "optimizer" in families.values()
    assert families["sum"] == "reduction"


def test_the_profiler_leaves_the_terminal_alone(capfd: pytest.CaptureFixture[str]) -> None:
    profiled_ops(lambda: torch.ones(3).sum(), device=CPU)
    assert capfd.readouterr().err == ""


def test_an_exception_passes_and_a_further_profile_works() -> None:
    with pytest.raises(ZeroDivisionError):
        profiled_ops(lambda: 1 / 0, device=CPU)
    assert profiled_ops(lambda: torch.ones(3).sum(), device=CPU)


def test_shares_by_hand() -> None:
    ops = [
        op("mm", "matmul", "bf16", 4.0),
        op("gelu", "elementwise", "fp32", 3.0),
        op("copy_", "cast", "bf16", 1.0, is_cast=True),
        op("mul_", "optimizer", "fp32", 1.0),
        op("mm", "matmul", "fp32", 1.0),
    ]
    profile = make_profile(ops, steps=3, policy=BF16, ratio=None)
    assert profile.families == {
        "matmul": 0.5,
        "elementwise": 0.3,
        "cast": 0.1,
        "optimizer": 0.1,
    }
    assert profile.ops == (("mm", 0.5), ("gelu", 0.3))
    assert profile.low_precision_share == 0.4
    assert profile.cast_share == 0.1
    assert profile.fp32_elementwise_share == 0.4
    assert profile.sentence.startswith("bf16: gain not measured; 40 % in ")


def ratio(value: float) -> TimeRatio:
    return TimeRatio(value=value, ci_low=None, ci_high=None)


def test_sentences() -> None:
    stuck = [op("mm", "matmul", "bf16", 29.0), op("gelu", "elementwise", "fp32", 71.0)]
    assert make_profile(stuck, steps=1, policy=BF16, ratio=ratio(1 / 1.1)).sentence == (
        "bf16 gains 1.1x and no more because 71 % of the time is in FP32 element-wise ops"
    )
    fast = [op("mm", "matmul", "bf16", 90.0), op("gelu", "elementwise", "fp32", 10.0)]
    assert make_profile(fast, steps=1, policy=BF16, ratio=ratio(0.5)).sentence == (
        "bf16 gains 2x: 90 % in low-precision kernels and 10 % in FP32 element-wise ops"
    )
    slow = make_profile(fast, steps=1, policy=BF16, ratio=ratio(2.0)).sentence
    assert slow.startswith("bf16 is slower, at 0.5x the speed: 90 % in low-precision kernels")
    even = make_profile(stuck, steps=1, policy=BF16, ratio=ratio(1.001)).sentence
    assert even == "bf16 gains nothing (1.00x) because 71 % of the time is in FP32 element-wise ops"
    reference = make_profile(stuck, steps=1, policy=FP32, ratio=None, is_reference=True)
    assert reference.sentence.startswith("fp32, the reference: 71 % in FP32 element-wise ops")
    twin = PrecisionPolicy(name="fp32_twin", perturbation=2.0**-8)
    control = make_profile(stuck, steps=1, policy=twin, ratio=ratio(0.99)).sentence
    assert control.startswith("fp32_twin, FP32 as well: 71 % in FP32 element-wise ops")
    nothing = make_profile([], steps=1, policy=BF16, ratio=None)
    assert nothing.sentence == "bf16: the profiler saw no time in any op"
    assert nothing.ops == ()


def test_under_tf32_fp32_products_are_low_precision() -> None:
    ops = [op("mm", "matmul", "fp32", 3.0), op("gelu", "elementwise", "fp32", 1.0)]
    assert make_profile(ops, steps=1, policy=TF32, ratio=None).low_precision_share == 0.75
    assert make_profile(ops, steps=1, policy=FP32, ratio=None).low_precision_share == 0.0


def test_phases_are_off_unless_asked_for() -> None:
    phases = Phases(CPU, enabled=False)
    assert phases("forward") is phases("backward")
    with phases("forward"), phases("backward"):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_kernels_count_and_ranges_are_pushed() -> None:
    device = torch.device("cuda")
    a, phases = torch.randn(512, 512, device=device), Phases(device, enabled=True)

    def work() -> None:
        with phases("forward"):
            low = a.bfloat16()
            torch.mm(low, low)

    found = by_key(profiled_ops(work, device=device))
    assert found[("mm", "bf16")].seconds > 0
    assert any(o.is_cast for o in found.values())


def test_a_run_can_name_its_phases_and_its_numbers_stay() -> None:
    workload = make_workload({"kind": "digits_convnet", "name": "small"})

    def losses(*, mark: bool) -> tuple[float, ...]:
        settings = RunSettings(
            steps=2,
            seed=0,
            device="cpu",
            num_threads=1,
            probes=ProbeSettings.off(),
            mark_phases=mark,
        )
        record = train(workload, FP32, settings, run_key="key", environment={})
        assert record.crash is None, record.crash.traceback
        return record.series["loss"]

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        named = losses(mark=True)
    seen = {event.name for event in profiler.events() or ()}
    assert {"step 0", "step 1", "forward", "backward", "optimizer"} <= seen
    assert named == losses(mark=False)
