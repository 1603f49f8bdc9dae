"""Fallbacks as further runs: the overrides give exactly the policy, and grid and manifest agree."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from factories import POLICIES as PLAIN
from factories import diverged, make_record
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from harness.analysis.analyzer import analyze_model
from harness.analysis.rule import DecisionRule
from harness.config import CONF, RunConfig, register
from harness.experiment.fallback_jobs import overrides, with_fallbacks
from harness.experiment.grid import Grid
from harness.experiment.looks import jobs_of
from harness.experiment.manifest import Manifest, PlannedRun, workload_choice
from harness.precision.policy import LossScaleSettings, PrecisionPolicy

RULE = DecisionRule(try_fallback=True)


@pytest.fixture
def composed():
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        yield lambda *given: RunConfig.from_hydra(
            loader.load_configuration("config", overrides=list(given), run_mode=RunMode.MULTIRUN)
        )


WANTED = (
    PrecisionPolicy(
        name="bf16_keep_blocks_0_attn",
        description="Fallback: keeping `blocks.0.attn` in FP32, isn't it? [a, b] {c: d}\\",
        compute_format="bf16",
        fp32_modules=("blocks.0.attn", "backward:head", "re:net\\.d.*", "a'b"),
    ),
    PrecisionPolicy(
        name="scaled",
        compute_format="fp16",
        loss_scale=LossScaleSettings(kind="static", init_scale=512.5),
        clip_before_unscale=True,
    ),
    PrecisionPolicy(
        name="bf16_pure_stochastic",
        compute_format="bf16",
        param_format="bf16",
        weight_rounding="stochastic",
        low_precision_ops=("all",),
    ),
)


@pytest.mark.parametrize("base", ["bf16", "fp16_deepspeed", "fp8", "bf16_fallback"])
@pytest.mark.parametrize("wanted", WANTED, ids=lambda p: p.name)
def test_the_overrides_compose_to_exactly_that_policy(base, wanted, composed):
    before = composed(f"policy={base}").policy
    values = {**wanted.content(), "name": wanted.name, "description": wanted.description}
    after = composed(f"policy={base}", *overrides(before, values)).policy
    assert PrecisionPolicy.from_mapping(after) == wanted
    assert overrides(after, values) == ()


SEEDS = (0, 1, 2)
POLICIES = ("fp32", "fp16", "tf32")


@pytest.fixture
def sweep(composed) -> tuple[Grid, Manifest]:
    jobs = [
        ("workload=digits_convnet", f"policy={p}", f"seed={s}") for p in POLICIES for s in SEEDS
    ]
    runs = [composed(*job, "train.steps=60") for job in jobs]
    manifest = Manifest(
        sweep_id="s",
        sweep="precision",
        command="",
        device="cpu",
        reference="fp32",
        runs=tuple(
            PlannedRun(
                run_key=f"{run.policy['name']}{run.seed}",
                workload="digits_convnet",
                choice=workload_choice(run.workload),
                policy=run.policy["name"],
                seed=run.seed,
            )
            for run in runs
        ),
        descriptions={},
    )
    return Grid(runs=tuple(runs), arguments=(), jobs=tuple(jobs)), manifest


def findings(manifest: Manifest, *bad: str) -> list[Any]:
    """Return findings in which the given policies overflow in every seed."""
    records = [
        make_record(
            dataclasses.replace(PLAIN.get(policy, PLAIN["bf16"]), name=policy),
            seed,
            workload="digits_convnet",
        )
        for policy in manifest.policies("digits_convnet")
        for seed in SEEDS
    ]
    records = [diverged(r) if r.policy in bad else r for r in records]
    return [
        analyze_model(
            records,
            sweep_id="s",
            policies=manifest.policies("digits_convnet"),
            seeds=SEEDS,
            reference="fp32",
            rule=RULE,
            timings=None,
            speed_note="",
            command="",
            descriptions={},
        )
    ]


def test_a_failed_policy_gets_one_more_with_a_run_per_seed(sweep, composed):
    grid, manifest = sweep
    found = with_fallbacks(grid, manifest, findings(manifest, "fp16"), RULE)
    assert found.policies == {"digits_convnet": ("fp16_in_bf16",)}
    assert found.lines == ("digits_convnet: fp16_in_bf16 is tried automatically for fp16",)
    assert found.manifest.fallbacks == {"digits_convnet": {"fp16_in_bf16": "fp16"}}
    assert found.manifest.policies("digits_convnet") == ["fp32", "fp16", "fp16_in_bf16", "tf32"]
    assert "Fallback for fp16" in found.manifest.descriptions["fp16_in_bf16"]
    # What a worker composes from the job is the run that the manifest has.
    new = [
        job for job in jobs_of(found.grid, found.manifest) if job.planned.policy == "fp16_in_bf16"
    ]
    assert [job.planned.seed for job in new] == list(SEEDS)
    for job in new:
        config = composed(*job.overrides, "train.steps=60")
        planned = found.manifest.find(
            workload_choice(config.workload), config.policy["name"], config.seed
        )
        assert planned == job.planned
        assert PrecisionPolicy.from_mapping(config.policy).compute_format == "bf16"
    assert len({run.run_key for run in found.manifest.runs}) == 12


def test_the_same_findings_give_the_same_runs_and_nobody_gets_two(sweep):
    grid, manifest = sweep
    first = with_fallbacks(grid, manifest, findings(manifest, "fp16"), RULE)
    assert with_fallbacks(grid, manifest, findings(manifest, "fp16"), RULE) == first
    # As if the fallback had failed too, or were not judged yet.
    for known in (findings(first.manifest, "fp16", "fp16_in_bf16"), findings(manifest, "fp16")):
        again = with_fallbacks(first.grid, first.manifest, known, RULE)
        assert (again.grid, again.manifest, again.policies) == (first.grid, first.manifest, {})


def test_nothing_failed_nothing_to_try(sweep):
    grid, manifest = sweep
    found = with_fallbacks(grid, manifest, findings(manifest), RULE)
    assert (found.grid, found.manifest, found.policies, found.lines) == (grid, manifest, {}, ())


def test_a_name_that_the_grid_has_is_not_taken_twice(sweep):
    grid, manifest = sweep
    renamed = dataclasses.replace(
        manifest,
        runs=tuple(
            dataclasses.replace(r, policy="fp16_in_bf16") if r.policy == "tf32" else r
            for r in manifest.runs
        ),
    )
    found = with_fallbacks(grid, renamed, findings(manifest, "fp16"), RULE)
    assert found.policies == {}
    assert "another policy named fp16_in_bf16" in found.lines[0]
