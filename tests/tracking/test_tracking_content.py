"""What of a record is shown: metric points against the series, names and limits against MLflow."""

from __future__ import annotations

import dataclasses
import math

import pytest
from factories import make_record

from harness.runs.record import HeldOut, RunRecord
from harness.tracking import content


def _metrics(record: RunRecord) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for name, step, value in content.points(record):
        assert step not in found.setdefault(name, {}), "one value per step"
        found[name][step] = value
    return found


@pytest.fixture
def record() -> RunRecord:
    return dataclasses.replace(
        make_record("fp16", 2, num_steps=10),
        sampled_steps=(0, 5),
        sampled={
            "grad_nonzero": (200.0, 0.0),
            "grad_flushed_fp16": (50.0, 0.0),
            "grad_flushed_bf16": (2.0, 0.0),
            "grad_overflow_fp16": (1.0, 0.0),
            "lost_update_bf16": (30.0, 60.0),
            "update_total": (100.0, 80.0),
        },
        held_out=HeldOut(steps=(0, 8, 10), loss=(4.0, 2.0, math.nan)),
        samples_per_step=64.0,
        tokens_per_step=None,
        peak_memory_bytes=123456789,
    )


def test_names_are_the_documented_ones(record: RunRecord) -> None:
    assert set(_metrics(record)) == {
        *("loss/train", "loss/held_out", "grad_norm/global"),
        *("underflow/grad_fp16", "underflow/grad_bf16", "overflow/grad_fp16", "lost_update/bf16"),
        *("loss_scale/value", "loss_scale/skipped"),
        *("throughput/samples_per_s", "throughput/step_time_ms", "memory/peak_bytes"),
    }


def test_values_and_steps(record: RunRecord) -> None:
    metrics = _metrics(record)
    assert metrics["loss/train"] == dict(enumerate(record.series["loss"]))
    assert metrics["loss/held_out"] == {0: 4.0, 8: 2.0}  # the NaN is left out
    # Shares of non-zero elements; where there are none there is no share.
    assert metrics["underflow/grad_fp16"] == {0: 0.25}
    assert metrics["underflow/grad_bf16"] == {0: 0.01}
    assert metrics["overflow/grad_fp16"] == {0: 0.005}
    assert metrics["lost_update/bf16"] == {0: 0.3, 5: 0.75}
    assert metrics["throughput/step_time_ms"][3] == pytest.approx(10.0)  # 0.01 s
    assert metrics["throughput/samples_per_s"][3] == pytest.approx(6400.0)
    assert metrics["memory/peak_bytes"] == {9: 123456789.0}


def test_tokens_are_shown_where_there_are_tokens(record: RunRecord) -> None:
    tokens = dataclasses.replace(record, tokens_per_step=4096.0)
    assert _metrics(tokens)["throughput/tokens_per_s"][0] == pytest.approx(409600.0)


def test_a_policy_without_a_loss_scaler_has_no_loss_scale_chart() -> None:
    assert not any(name.startswith("loss_scale") for name in _metrics(make_record("bf16")))


def _with(record: RunRecord, **series: tuple[float, ...]) -> RunRecord:
    return dataclasses.replace(record, series={**record.series, **series})


def test_nonfinite_points_are_left_out_and_their_start_is_said(record: RunRecord) -> None:
    loss = (3.0, 2.0, math.nan, math.inf, *record.series["loss"][4:])
    broken = _with(record, loss=loss)
    metrics = _metrics(broken)
    assert sorted(metrics["loss/train"]) == [0, 1, 4, 5, 6, 7, 8, 9]
    assert metrics["first_nonfinite_step"] == {2: 2.0}
    assert content.tags(broken, sweep_id="s")["first_nonfinite_step"] == "2"


def test_overflow_on_a_skipped_step_is_how_a_scaler_works(record: RunRecord) -> None:
    norm = (1.0, math.inf, *record.series["grad_norm"][2:])
    skipped = (0.0, 1.0, *(0.0,) * 8)
    assert content.first_nonfinite_step(_with(record, grad_norm=norm, skipped=skipped)) is None
    assert content.first_nonfinite_step(_with(record, grad_norm=norm)) == 1


def test_a_run_that_crashed_at_once_has_no_points(record: RunRecord) -> None:
    empty = dataclasses.replace(
        record, series={}, sampled_steps=(), sampled={}, held_out=None, peak_memory_bytes=None
    )
    assert list(content.points(empty)) == []


def test_tags(record: RunRecord) -> None:
    tags = content.tags(record, sweep_id="precision-1")
    expected = {
        "kind": "run",
        "sweep_id": "precision-1",
        "workload": record.workload,
        "policy": "fp16",
        "seed": "2",
        "status": "completed",
        "execution": record.execution,
        "run_key": record.run_key,
    }
    assert expected.items() <= tags.items()
    assert content.run_name(record) == "fp16 seed 2"


def test_params_hold_all_settings_flat(record: RunRecord) -> None:
    params = content.params(
        dataclasses.replace(
            record,
            settings={"train": {"steps": 10, "betas": [0.9, 0.95]}, "none": None, "empty": {}},
            environment={"torch": "2.13.0"},
        )
    )
    assert params["settings.train.steps"] == "10"
    assert params["settings.train.betas"] == "[0.9, 0.95]"
    assert params["settings.none"] == "null"
    assert params["settings.empty"] == "{}"
    assert params["policy.loss_scale.kind"] == "dynamic"
    assert params["environment.torch"] == "2.13.0"


def test_params_keep_within_the_limits(record: RunRecord) -> None:
    params = content.params(
        dataclasses.replace(
            record, settings={"k" * 400: "v" * 7000, "a[0]": 1, "a(0)": 2, "ü=\n": 3}
        )
    )
    assert max(map(len, params)) <= 250
    assert max(map(len, params.values())) == 6000
    # Two names that become one are both kept.
    assert {params["settings.a_0_"], params["settings.a_0__2"]} == {"1", "2"}


@pytest.mark.parametrize(
    "name", ["a[0]", "a//b", "a/../b", "/a", "..", "a=b", "x\ny", "", "ü", "a/./b", "a/", "k" * 300]
)
def test_every_name_becomes_one_that_mlflow_takes(name: str) -> None:
    from mlflow.utils.validation import _validate_param_name

    _validate_param_name(content.safe_name(name))


def test_good_names_stay() -> None:
    for name in ("settings.train.steps", "a b-c_d/e:f"):
        assert content.safe_name(name) == name


def test_long_descriptions_are_cut_at_a_line() -> None:
    short = "# Report\n"
    assert content.description(short) == short
    text = content.description("| a | row |\n" * 2000)
    assert len(text) <= 8000
    body, note = text.rsplit("\n\n", 1)
    assert body.endswith("| a | row |")
    assert "report.md" in note


@pytest.mark.parametrize("name", ["../../etc", ".hidden", "a/b", "", "ü"])
def test_a_folder_name_is_one_plain_folder(name: str) -> None:
    made = content.folder_name(name)
    assert made
    assert "/" not in made
    assert not made.startswith(".")
