"""Run keys: everything that can change numbers changes the key, a name alone does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.config import (
    ConfigError,
    LaunchConf,
    ProbesConf,
    RunConfig,
    ThroughputConf,
    TrackingConf,
    TrainConf,
    load_choice,
)
from harness.config_schema import EnabledConf, EveryConf, GradientErrorConf, ProfileConf
from harness.experiment.plan import num_steps, num_threads, resolve_device, run_key
from harness.workloads.registry import make_workload

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def workload():
    return make_workload(load_choice("workload", "digits_convnet"))


def _config(**changes: object) -> RunConfig:
    values: dict[str, object] = {
        "action": "run",
        "device": "cpu",
        "output_dir": Path("/somewhere"),
        "sweep_id": None,
        "reference": "fp32",
        "seed": 0,
        "dry_run": False,
        "workload": load_choice("workload", "digits_convnet"),
        "policy": load_choice("policy", "bf16"),
        "train": TrainConf(),
        "probes": ProbesConf(),
        "decision": {},
        "throughput": ThroughputConf(),
        "tracking": TrackingConf(),
        "launch": LaunchConf(),
    }
    return RunConfig(**{**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"policy": load_choice("policy", "fp16")},
        {"policy": {**load_choice("policy", "bf16"), "fp32_ops": ["softmax"]}},
        {"train": TrainConf(steps=17)},
        {"train": TrainConf(backend="emulated")},
        {"train": TrainConf(tail_evaluations=2)},
        {"probes": ProbesConf(norms=EveryConf(every=2))},
        {"probes": ProbesConf(triage=EnabledConf(enabled=False))},
        {"launch": LaunchConf(threads=2)},
    ],
)
def test_what_changes_numbers_changes_the_key(changes, workload):
    assert run_key(_config(**changes), workload, CPU) != run_key(_config(), workload, CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"output_dir": Path("/elsewhere")},
        {"sweep_id": "name"},
        {"dry_run": True},
        {"policy": {**load_choice("policy", "bf16"), "name": "other", "description": "Other."}},
        {"throughput": ThroughputConf(phase=False)},
        {"tracking": TrackingConf(enabled=False)},
        {"decision": {"alpha": 0.01}},
        {"probes": ProbesConf(gradient_error=GradientErrorConf(batches=4))},  # stages of their own
        {"probes": ProbesConf(profile=ProfileConf(steps=0))},
        {"train": TrainConf(steps=300)},  # the workload's own default
    ],
)
def test_what_does_not_change_numbers_keeps_the_key(changes, workload):
    assert run_key(_config(**changes), workload, CPU) == run_key(_config(), workload, CPU)


def test_workload_settings_and_data_change_the_key(workload):
    other = make_workload({**load_choice("workload", "digits_convnet"), "dropout": 0.4})
    assert run_key(_config(), other, CPU) != run_key(_config(), workload, CPU)
    moved = make_workload(load_choice("workload", "digits_convnet"))
    moved.data_sha256 = "0" * 64
    assert run_key(_config(), moved, CPU) != run_key(_config(), workload, CPU)


def test_steps_and_threads_have_defaults_that_the_command_line_overrides(workload):
    assert num_steps(_config(), workload) == workload.default_steps == 300
    assert num_steps(_config(train=TrainConf(steps=7)), workload) == 7
    assert num_threads(_config(), CPU) == 1
    assert num_threads(_config(launch=LaunchConf(threads=2)), CPU) == 2


def test_devices_are_checked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        resolve_device("cuda")
    with pytest.raises(ConfigError, match="one of auto, cpu, cuda"):
        resolve_device("tpu")
