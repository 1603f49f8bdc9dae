"""The timing stage: ratios against brute force, round trip, exclusions, trainings left alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_workloads import BF16, FP16, FP32, TF32, TinyWorkload, class_batches, settings

from harness.precision.policy import PrecisionPolicy
from harness.runs.timing.record import (
    Profile,
    TimeRatio,
    TimingRecord,
    read_timing,
    time_ratio,
    write_timing,
)
from harness.runs.timing.step_times import control_note, measure_step_times

PROFILE = Profile(
    steps=3,
    families={"matmul": 0.75, "cast": 0.25},
    ops=(("mm", 0.75), ("copy_", 0.25)),
    low_precision_share=0.5,
    cast_share=0.25,
    fp32_elementwise_share=0.125,
    sentence="bf16: a sentence",
)


def test_ratio_of_medians_and_its_interval_by_brute_force() -> None:
    """Oracle: all 4^4 resamples of four blocks, in pairs."""
    candidate, reference = [1.0, 1.2, 1.1, 3.0], [2.0, 2.0, 2.2, 2.1]
    ratio = time_ratio(candidate, reference)
    assert ratio.value == pytest.approx(1.15 / 2.05)
    all_resamples = [
        np.median([candidate[i] for i in pick]) / np.median([reference[i] for i in pick])
        for pick in itertools.product(range(4), repeat=4)
    ]
    low, high = np.quantile(all_resamples, [0.025, 0.975])
    # 2000 random resamples of a discrete distribution: its steps near the ends are about 5 %
    assert ratio.ci_low == pytest.approx(low, rel=0.06)
    assert ratio.ci_high == pytest.approx(high, rel=0.06)


def test_degenerate_blocks() -> None:
    assert time_ratio([1.0], [2.0]) == TimeRatio(value=0.5, ci_low=None, ci_high=None)
    assert time_ratio([3.0] * 4, [2.0] * 4) == TimeRatio(value=1.5, ci_low=1.5, ci_high=1.5)
    with pytest.raises(ValueError, match="blocks"):
        time_ratio([], [])
    with pytest.raises(ValueError, match="blocks"):
        time_ratio([1.0], [1.0, 2.0])


def test_round_trip_and_bad_files(tmp_path: Path) -> None:
    record = TimingRecord(
        workload="m",
        device="cpu",
        reference="fp32",
        steps_per_block=3,
        step_time_s={"fp32": (0.1, 0.2), "bf16": (0.05, 0.1)},
        ratios={"bf16": TimeRatio(value=0.5, ci_low=0.4, ci_high=None)},
        excluded={"tf32": "emulated on this device"},
        note="a note",
        profiles={"bf16": PROFILE},
    )
    assert read_timing(tmp_path) is None
    path = write_timing(record, tmp_path / "deep")
    assert read_timing(tmp_path / "deep") == record
    path.write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(ValueError, match="99"):
        read_timing(tmp_path / "deep")
    path.write_text("nonsense")
    with pytest.raises(ValueError, match=r"timing\.json"):
        read_timing(tmp_path / "deep")


def test_a_record_of_version_1_has_no_profiles(tmp_path: Path) -> None:
    old = {
        "schema_version": 1,
        "workload": "m",
        "device": "cpu",
        "reference": "fp32",
        "steps_per_block": 2,
        "step_time_s": {"fp32": [0.1]},
        "ratios": {"bf16": {"value": 0.5, "ci_low": None, "ci_high": None}},
        "excluded": {},
        "note": "",
    }
    (tmp_path / "timing.json").write_text(json.dumps(old))
    record = read_timing(tmp_path)
    assert record is not None
    assert record.profiles == {}
    assert record.ratios["bf16"].value == 0.5
    for bad in ({"steps": 1}, {**dataclasses.asdict(PROFILE), "ops": [["mm"]]}):
        (tmp_path / "timing.json").write_text(json.dumps({**old, "profiles": {"bf16": bad}}))
        with pytest.raises(ValueError, match="incomplete"):
            read_timing(tmp_path)


def test_profiles_of_what_was_timed() -> None:
    counts = {"blocks": 1, "steps_per_block": 2, "warmup_steps": 1, "profile_steps": 2}
    native = settings(1, backend="native")
    record = measure_step_times(
        TinyWorkload(), [FP32, TF32, BF16], settings(1), reference="fp32", **counts
    )
    assert "tf32" not in record.profiles
    record = measure_step_times(TinyWorkload(), [FP32, BF16], native, reference="fp32", **counts)
    assert list(record.profiles) == ["fp32", "bf16"]
    for profile in record.profiles.values():
        assert profile.steps == 2
        assert sum(profile.families.values()) == pytest.approx(1.0)
        assert 0.8 <= sum(share for _, share in profile.ops) <= 1.0 + 1e-9
        assert profile.families["matmul"] > 0
        assert profile.families["optimizer"] > 0
    assert record.profiles["fp32"].low_precision_share == 0.0
    assert record.profiles["bf16"].low_precision_share > 0.0
    assert record.profiles["bf16"].cast_share > 0.0
    assert "the reference" in record.profiles["fp32"].sentence
    assert not measure_step_times(
        TinyWorkload(), [FP32], native, reference="fp32", blocks=1
    ).profiles


def test_a_profiler_that_fails_costs_the_profile_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: object, *, device: torch.device) -> None:
        raise RuntimeError("CUPTI is not here\nmore")

    monkeypatch.setattr("harness.runs.timing.step_times.profiled_ops", broken)
    record = measure_step_times(
        TinyWorkload(), [FP32], settings(1), reference="fp32", blocks=1, profile_steps=1
    )
    assert record.profiles == {}
    assert record.note.endswith("no profile of fp32: RuntimeError: CUPTI is not here")
    assert "fp32" in record.step_time_s


def test_stage_times_native_policies_and_says_why_not_the_others() -> None:
    def broken(model, batch):
        if torch.is_autocast_enabled("cpu"):
            raise ZeroDivisionError("low precision only")
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    counts = {"blocks": 3, "steps_per_block": 2, "warmup_steps": 1}
    record = measure_step_times(
        TinyWorkload(), [FP32, TF32, FP16], settings(1), reference="fp32", **counts
    )
    assert len(record.step_time_s["fp32"]) == 3
    assert all(t > 0 for t in record.step_time_s["fp32"])
    assert record.excluded["tf32"] == "emulated on this device"
    assert "tf32" not in record.ratios
    assert "CPU" in record.note
    record = measure_step_times(
        TinyWorkload(loss=broken), [FP32, BF16], settings(1), reference="fp32", **counts
    )
    assert "low precision only" in record.excluded["bf16"]
    assert not record.ratios
    with pytest.raises(ValueError, match="reference"):
        measure_step_times(TinyWorkload(), [FP32], settings(1), reference="bf16")


def test_two_names_for_fp32_have_a_ratio_near_one() -> None:
    same = dataclasses.replace(FP32, name="same")
    record = measure_step_times(
        TinyWorkload(), [FP32, same], settings(1), reference="fp32", blocks=5, steps_per_block=4
    )
    # steps of a few hundred microseconds on a shared machine: only the order of magnitude is sure
    assert 0.2 < record.ratios["same"].value < 5


def test_the_stage_asks_for_the_batches_of_a_run() -> None:
    """What an iterator yields may depend on the number of steps: a curriculum, a schedule."""
    asked = []

    def curriculum(seed: int, steps: int):
        asked.append(steps)
        for step, (x, y) in enumerate(class_batches(seed, steps)):
            yield x * step / (steps - 1), y

    counts = {"blocks": 1, "steps_per_block": 2, "warmup_steps": 0}
    workload = TinyWorkload(data=curriculum)
    for steps in (300, 1):
        measure_step_times(workload, [FP32], settings(steps), reference="fp32", **counts)
    assert asked == [300, 2]


def test_a_loss_that_changes_its_batch_in_place_is_timed_on_the_batch_as_it_came() -> None:
    seen: list[float] = []

    def centred(model, batch):
        seen.append(float(batch[0].mean()))
        return torch.nn.functional.cross_entropy(model(batch[0].sub_(1.0)), batch[1])

    counts = {"blocks": 3, "steps_per_block": 1, "warmup_steps": 0}
    measure_step_times(TinyWorkload(loss=centred), [FP32], settings(1), reference="fp32", **counts)
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_a_control_that_took_another_time_is_told() -> None:
    control = PrecisionPolicy(name="twin", perturbation=2.0**-8)
    candidate = PrecisionPolicy(name="bf16", compute_format="bf16")
    off = TimeRatio(value=0.88, ci_low=0.84, ci_high=0.96)
    fine = TimeRatio(value=0.98, ci_low=0.95, ci_high=1.02)
    assert "twin does the same work as the reference and took 0.88" in control_note(
        [control, candidate], {"twin": off, "bf16": fine}
    )
    assert control_note([control, candidate], {"twin": fine, "bf16": off}) == ""
    assert control_note([candidate], {"bf16": off}) == ""
