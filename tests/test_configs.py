"""Every YAML composes and becomes a value; every sweep expands (composition, no training)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from harness.analysis.decision import DecisionRule
from harness.config import CONF, SWEEPS, ConfigError, RunConfig, register
from harness.config_schema import GradientErrorConf, LossScaleConf, PolicyConf, ProbesConf
from harness.experiment.grid import axis_values, by_model, expand
from harness.experiment.plan import probe_settings
from harness.experiment.same_point_stage import same_point_settings
from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.probes.step_probes import STEP_PROBES
from harness.runs.same_point.settings import SamePointSettings
from harness.runs.settings import ProbeSettings

POLICIES = sorted(path.stem for path in (CONF / "policy").glob("*.yaml"))
WORKLOADS = sorted(path.stem for path in (CONF / "workload").glob("*.yaml"))
PROBES = sorted(path.stem for path in (CONF / "probes").glob("*.yaml"))
ALL_SWEEPS = sorted(path.stem for path in SWEEPS.glob("*.yaml"))


@pytest.fixture
def composed():
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        yield lambda *overrides: loader.load_configuration(
            "config", overrides=list(overrides), run_mode=RunMode.MULTIRUN
        )


@pytest.mark.parametrize("name", POLICIES)
def test_policy_composes_and_says_what_it_is(name, composed):
    config = RunConfig.from_hydra(composed(f"policy={name}"))
    policy = PrecisionPolicy.from_mapping(config.policy)
    assert policy.name == name
    assert policy.description.endswith(".")


def test_default_grid_has_exactly_one_reference_and_one_control(composed):
    policies = [
        PrecisionPolicy.from_mapping(RunConfig.from_hydra(composed(f"policy={name}")).policy)
        for name in ("fp32", "fp32_twin", "tf32", "fp16", "bf16", "bf16_fallback", "bf16_pure")
    ]
    assert [p.name for p in policies if p.is_reference] == ["fp32"]
    assert [p.name for p in policies if p.is_control] == ["fp32_twin"]
    assert len({p.content_hash() for p in policies}) == len(policies)


def _plain(values):
    return {
        name: _plain(value)
        if isinstance(value, dict)
        else tuple(value)
        if isinstance(value, list)
        else value
        for name, value in values.items()
    }


def test_the_schema_has_the_fields_and_defaults_of_the_values():
    # Written twice, because the schema is to load without what reads it.
    pairs = (
        (PolicyConf(name="p"), PrecisionPolicy(name="p")),
        (LossScaleConf(), LossScaleSettings()),
    )
    for schema, value in pairs:
        assert _plain(dataclasses.asdict(schema)) == _plain(dataclasses.asdict(value))


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_composes(name, composed):
    config = RunConfig.from_hydra(composed(f"workload={name}"))
    assert config.workload["kind"]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("decision.looks=[3,6,10]", "looks", (3, 6, 10)),
        ("decision.looks=[3, 6, 10]", "looks", (3, 6, 10)),
        ("decision.look_alphas=[0.03,0.01,0.01]", "look_alphas", (0.03, 0.01, 0.01)),
        ("decision.seeds=3", "seeds", 3),
        ("decision.margin=0.02", "margin", 0.02),
        ("decision.margin=2 %", "margin", "2 %"),
        ("decision.margin=2%", "margin", "2%"),
        ("decision.margin='0.3 own'", "margin", "0.3 own"),
        ("decision.always_valid=true", "always_valid", True),
    ],
)
def test_looks_and_a_margin_are_set_on_the_command_line(override, key, value, composed):
    rule = DecisionRule.from_mapping(RunConfig.from_hydra(composed(override)).decision)
    assert getattr(rule, key) == value


def test_decision_constants_make_a_rule(composed):
    rule = DecisionRule.from_mapping(RunConfig.from_hydra(composed()).decision)
    assert rule == DecisionRule()


@pytest.mark.parametrize("name", PROBES)
def test_probes_compose(name, composed):
    config = RunConfig.from_hydra(composed(f"probes={name}"))
    assert dataclasses.is_dataclass(config.probes.gradient_error)
    settings = probe_settings(config.probes)
    if name == "default":
        assert settings == ProbeSettings()
        assert config.probes.gradient_error == GradientErrorConf()
        assert same_point_settings(config.probes.gradient_error) == SamePointSettings()
    if name == "none":
        assert settings == ProbeSettings.off()
        assert settings.chosen(10) == {}


def test_one_probe_setting_changes_that_one_only(composed):
    config = RunConfig.from_hydra(composed("probes=none", "probes.norms.every=1"))
    assert probe_settings(config.probes).chosen(10) == {"norms": {"every": 1}}
    config = RunConfig.from_hydra(composed("probes.exponents.every=null"))
    assert config.probes.exponents.every is None
    assert config.probes.exponents.weight_gradients_every == 10


def test_every_step_probe_has_a_key_in_the_schema():
    names = {field.name for field in dataclasses.fields(ProbesConf)}
    assert set(STEP_PROBES) <= names


@pytest.mark.parametrize("name", ALL_SWEEPS)
def test_sweep_expands(name, composed):
    grid = expand(composed(f"+sweep={name}", "hydra.mode=MULTIRUN"))
    policies, seeds = axis_values(grid)
    assert "fp32" in policies
    assert len(grid.runs) == len(by_model(grid)) * len(policies) * len(seeds)


def test_precision_sweep_is_two_models_seven_policies_and_the_seeds_of_all_looks(composed):
    grid = expand(composed("+sweep=precision", "hydra.mode=MULTIRUN"))
    policies, seeds = axis_values(grid)
    assert (len(by_model(grid)), len(policies), seeds) == (2, 7, list(range(8)))
    assert grid.seeds_given is None


def test_command_line_list_replaces_the_sweeps_own(composed):
    grid = expand(
        composed("+sweep=precision", "hydra.mode=MULTIRUN", "policy=fp32,bf16", "seed=4,5")
    )
    assert axis_values(grid) == (["fp32", "bf16"], [4, 5])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.perturbation=0.1"], "would change all 7 policies"),
        (["seed=1,1"], "stands in this grid twice"),
        (["train.steps=0"], "train.steps=0: must be at least 1"),
        (["train.backend=cuda"], "one of auto, native, emulated"),
        (["probes.exponents.every=0"], "probes.exponents.every=0: must be at least 1, or null"),
        (["probes.lost_updates.every=-1"], "probes.lost_updates.every=-1"),
        (["probes.gradient_error.batches=1"], "must be at least 2"),
        (["probes.gradient_error.points=[]"], "between 0 and 1"),
        (["probes.gradient_error.points=[0.5,0.5]"], "must be ascending"),
        (["probes.gradient_error.points=[0.5,1.0]"], "between 0 and 1"),
        (["probes.gradient_error.fp64_max_parameters=-1"], "must be 0 or more"),
        (["probes.profile.steps=-1"], "must be 0 or more"),
        (["seed=-1"], "seed=-1"),
    ],
)
def test_contradictory_grids_are_refused_in_one_line(overrides, message, composed):
    with pytest.raises(ConfigError, match=message) as error:
        expand(composed("+sweep=precision", "hydra.mode=MULTIRUN", *overrides))
    assert "\n" not in str(error.value)


def test_two_contents_under_one_policy_name_are_refused(composed, tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine.yaml").write_text("defaults: [bf16, _self_]\nname: fp16\n")
    with pytest.raises(ConfigError, match="both named 'fp16'"):
        expand(
            composed(
                "+sweep=precision",
                "hydra.mode=MULTIRUN",
                f"hydra.searchpath=[file://{tmp_path}]",
                "policy=fp32,fp16,mine",
            )
        )


def test_missing_sweep_group_does_not_become_a_plain_value():
    config = OmegaConf.create({"sweep": "precision"})
    with pytest.raises(ConfigError, match="no group of sweeps"):
        RunConfig.from_hydra(config)


def test_every_config_folder_is_reachable():
    assert Path(CONF).is_dir()
    assert Path(SWEEPS).is_dir()


def test_only_the_sweeper_that_asks_again_can_try_fallbacks(composed):
    wanted = ("decision.try_fallback=true", "policy=fp32,bf16")
    assert len(expand(composed(*wanted, "seed=0")).runs) == 2
    with pytest.raises(ConfigError, match="try_fallback=true needs hydra/sweeper=looks"):
        expand(composed(*wanted, "seed=0", "hydra/sweeper=basic"))
