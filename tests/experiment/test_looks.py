"""Which runs a look takes, what a finished look says, and how a plan survives in the manifest."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
from factories import diverged, make_grid
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode

from harness.analysis.analyzer import analyze_model
from harness.analysis.rule import DecisionRule
from harness.analysis.seed_plan import SeedPlan
from harness.config import CONF, ConfigError, register
from harness.experiment import callback
from harness.experiment import manifest as manifests
from harness.experiment.announcement import runs_line, seeds_line
from harness.experiment.callback import live_experiment
from harness.experiment.grid import axis_values, expand
from harness.experiment.looks import Job, jobs_of_look, look_line, settled_lines, undecided
from harness.experiment.manifest import Manifest, PlannedRun
from harness.experiment.seed_plans import plan_mapping, plan_of, seeds_of_look, seeds_up_to
from hydra_plugins.precision_harness import LooksSweeper

RULE = DecisionRule()
LOOKS = SeedPlan.of(RULE, seeds_given=None)
FIXED = SeedPlan.of(RULE, seeds_given=3)
POLICIES = ("bf16", "fp32", "fp32_twin", "fp16")


def _manifest(seeds: SeedPlan = LOOKS, /, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "sweep_id": "s",
        "sweep": "precision",
        "command": "python -m harness",
        "device": "cpu",
        "reference": "fp32",
        "runs": tuple(
            PlannedRun(run_key=f"{m}-{p}-{s}", workload=m, policy=p, seed=s)
            for m, p, s in itertools.product(("one", "two"), POLICIES, range(seeds.max_pairs))
        ),
        "descriptions": {},
        "created_at": manifests.now(),
    }
    return Manifest(**{**values, **changes})


def _jobs(manifest: Manifest) -> list[Job]:
    return [
        Job(overrides=(run.run_key,), planned=run, is_shared=run.policy.startswith("fp32"))
        for run in manifest.runs
    ]


def _keys(jobs: list[Job]) -> list[str]:
    return [job.planned.run_key for job in jobs]


def test_the_first_look_goes_by_seed_with_the_reference_first():
    manifest = _manifest()
    keys = _keys(jobs_of_look(_jobs(manifest), manifest, LOOKS, 0))
    assert len(keys) == 2 * 4 * 3
    assert keys[:8] == [
        *("one-fp32-0", "one-bf16-0", "one-fp32_twin-0", "one-fp16-0"),
        *("one-fp32-1", "one-bf16-1", "one-fp32_twin-1", "one-fp16-1"),
    ]
    assert keys[12] == "two-fp32-0"


def test_a_later_look_takes_the_undecided_of_each_model_with_reference_and_control():
    manifest = _manifest()
    keys = _keys(jobs_of_look(_jobs(manifest), manifest, LOOKS, 1, {"two": ("fp16",)}))
    assert keys == [
        *("two-fp32-3", "two-fp32_twin-3", "two-fp16-3"),
        *("two-fp32-4", "two-fp32_twin-4", "two-fp16-4"),
    ]
    assert jobs_of_look(_jobs(manifest), manifest, LOOKS, 2, {}) == []


def test_a_fixed_plan_launches_the_grid_as_it_stands():
    manifest = _manifest(FIXED)
    jobs = _jobs(manifest)
    assert jobs_of_look(jobs, manifest, FIXED, 0) == jobs


def test_seeds_of_looks():
    seeds = list(range(8))
    assert [seeds_of_look(LOOKS, seeds, k) for k in range(3)] == [[0, 1, 2], [3, 4], [5, 6, 7]]
    assert seeds_up_to(LOOKS, seeds, 2) == [0, 1, 2]
    assert seeds_up_to(LOOKS, seeds, 3) == [0, 1, 2, 3, 4]
    assert seeds_up_to(FIXED, seeds[:3], 1) == [0, 1, 2]


def test_the_announcement_says_how_far_it_may_go():
    manifest = _manifest()
    assert runs_line(manifest, LOOKS, manifest.runs) == (
        "24 now (look 1 of 3), up to 64 if nobody is settled"
    )
    assert runs_line(manifest, LOOKS, manifest.runs[4:]).endswith(
        "of which 4 are finished and reused"
    )
    assert runs_line(_manifest(FIXED), FIXED, _manifest(FIXED).runs) == "24"
    assert seeds_line(manifest, LOOKS).startswith("in looks of 3, 5 and 8;")
    every = SeedPlan.of(DecisionRule(always_valid=True), seeds_given=None)
    assert seeds_line(manifest, every).startswith("3 to 8: a look after every one;")
    assert seeds_line(_manifest(FIXED), FIXED) == "0, 1, 2"


def test_a_look_says_what_it_runs():
    manifest = _manifest()
    jobs = jobs_of_look(_jobs(manifest), manifest, LOOKS, 1, {"one": ("bf16", "fp16")})
    assert look_line(LOOKS, 1, jobs) == ("look 2 of 3, 8 runs: one: bf16, fp16 on seeds 3 and 4")


def _findings(records: list[Any], plan: SeedPlan = LOOKS) -> Any:
    return analyze_model(
        records,
        sweep_id="s",
        policies=list(dict.fromkeys(r.policy for r in records)),
        seeds=range(plan.max_pairs),
        reference="fp32",
        rule=RULE,
        timings=None,
        speed_note="",
        command="python -m harness",
        descriptions={},
        plan=plan,
    )


@pytest.fixture(scope="module")
def after_first_look() -> Any:
    """Return findings in which bf16 is settled, fp16 failed on its first seed, tf32 is open."""
    records = make_grid({"fp32": {}, "bf16": {"luck": 0.0001}, "tf32": {"luck": 0.05}, "fp16": {}})
    kept = [r for r in records if r.policy != "fp16" or r.seed == 0]
    return _findings([diverged(r) if r.policy == "fp16" else r for r in kept])


def test_only_the_undecided_go_on(after_first_look):
    assert undecided([after_first_look]) == {after_first_look.workload: ("tf32",)}


def test_who_is_settled_is_said_once(after_first_look):
    bf16, fp16 = settled_lines(after_first_look, set())
    assert bf16.endswith(": bf16 accepted after 3 seeds")
    assert ": fp16 rejected after 1 seed: The loss is not finite at step" in fp16
    assert fp16.endswith("(2 runs of this look not started)")
    assert list(settled_lines(after_first_look, {"bf16", "fp16"})) == []


def test_a_reference_that_failed_ends_its_model():
    findings = _findings([r for r in make_grid({"fp32": {}, "bf16": {}}) if r.seed != 1])
    assert undecided([findings]) == {}
    (line,) = settled_lines(findings, set())
    assert "no finished run for seed 1" in line


@pytest.mark.parametrize("given", [None, 4])
def test_the_plan_survives_in_the_manifest(given, tmp_path):
    plan = SeedPlan.of(RULE, seeds_given=given)
    written = _manifest(plan, plan=plan_mapping(plan, seeds_given=given))
    manifests.write(written, tmp_path)
    read = manifests.read(tmp_path, "s")
    assert read == written
    assert plan_of(read, RULE) == plan


def test_another_rule_gives_another_plan_only_where_the_looks_were_left_to_it():
    left = _manifest(plan=plan_mapping(LOOKS, seeds_given=None))
    every = DecisionRule(always_valid=True)
    assert plan_of(left, every).kind == "always_valid"
    given = _manifest(FIXED, plan=plan_mapping(FIXED, seeds_given=3))
    assert plan_of(given, every) == FIXED
    with pytest.raises(ConfigError, match="add up to"):
        plan_of(left, DecisionRule(look_alphas=(0.04, 0.04, 0.04)))


def test_a_manifest_of_the_first_version_is_a_fixed_plan(tmp_path):
    path = manifests.write(_manifest(FIXED), tmp_path)
    data = json.loads(path.read_text())
    del data["plan"]
    path.write_text(json.dumps({**data, "schema_version": 1}))
    read = manifests.read(tmp_path, "s")
    assert plan_of(read, RULE) == FIXED
    assert read.runs == _manifest(FIXED).runs


@pytest.fixture
def composed():
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        yield lambda *overrides: loader.load_configuration(
            "config",
            overrides=["hydra.mode=MULTIRUN", *overrides],
            run_mode=RunMode.MULTIRUN,
        )


@pytest.mark.parametrize(
    ("overrides", "seeds", "given"),
    [
        ((), 8, None),
        (("decision.looks=[3,6,10]",), 10, None),
        (("decision.always_valid=true",), 8, None),
        (("decision.seeds=3",), 3, None),
        (("seed=0,1,2",), 3, 3),
        (("seed=4,9", "decision.always_valid=true"), 2, 2),
        (("hydra/sweeper=basic",), 1, 1),
    ],
)
def test_seeds_of_a_grid(overrides, seeds, given, composed):
    grid = expand(composed("+sweep=precision", "policy=fp32,bf16", *overrides))
    assert (len(axis_values(grid)[1]), grid.seeds_given) == (seeds, given)
    assert len(grid.jobs) == len(grid.runs) == 2 * 2 * seeds


def test_seeds_in_number_and_by_name_are_the_same_runs(composed):
    by_number, by_name = (
        expand(composed("+sweep=precision", "policy=fp32,bf16", seeds))
        for seeds in ("decision.seeds=3", "seed=0,1,2")
    )
    identity = [(r.workload, r.policy, r.seed) for r in by_number.runs]
    assert identity == [(r.workload, r.policy, r.seed) for r in by_name.runs]
    assert [dict(o.split("=", 1) for o in job)["seed"] for job in by_number.jobs] == [
        str(run.seed) for run in by_number.runs
    ]


def test_a_sweep_with_seeds_of_its_own_is_fixed(composed):
    for name, number in (("smoke", 3), ("pair", 1)):
        assert expand(composed(f"+sweep={name}")).seeds_given == number


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("seed=0,1", "decision.seeds=3"), "the seeds of this sweep are given: 2 of them"),
        (("hydra/sweeper=basic", "decision.seeds=3"), "needs hydra/sweeper=looks"),
        (("decision.look_alphas=[0.03,0.02,0.02]",), "add up to 0.07"),
        (("decision.seeds=0",), "decision.seeds=0"),
    ],
)
def test_contradictory_numbers_of_seeds_are_one_line(overrides, message, composed):
    with pytest.raises(ConfigError, match=message) as error:
        expand(composed("+sweep=precision", *overrides))
    assert "\n" not in str(error.value)


def test_jobs_have_what_composes_them(composed):
    grid = expand(composed("+sweep=precision", "train.steps=20", "policy=fp32,bf16"))
    loader = GlobalHydra.instance().config_loader()
    config = loader.load_sweep_config(composed("+sweep=precision"), list(grid.jobs[11]))
    run = grid.runs[11]
    assert (config.policy.name, config.seed) == (run.policy["name"], run.seed) == ("bf16", 3)
    assert config.train.steps == 20
    assert dataclasses.asdict(run.train)["steps"] == 20


def test_hydra_finds_the_sweeper_and_pays_nothing_for_it():
    """What lies in `hydra_plugins` is imported by every Hydra application of the environment."""
    program = (
        "import sys\n"
        "from hydra.core.plugins import Plugins\n"
        "found = Plugins.instance().class_name_to_class\n"
        "assert 'hydra_plugins.precision_harness.LooksSweeper' in found\n"
        "assert 'harness' not in sys.modules, 'imports the harness'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=CONF.parent)


def test_the_sweeper_says_where_it_belongs():
    context = HydraContext(config_loader=None, callbacks=Callbacks())
    with pytest.raises(HydraException, match="belongs to the precision harness"):
        live_experiment(context)


def test_the_sweeper_launches_batch_after_batch(monkeypatch):
    launched = []

    class Returned:
        return_value = None

    class Recorder:
        def launch(self, jobs, initial_job_idx):
            launched.append((initial_job_idx, jobs))
            return [Returned() for _ in jobs]

    class Experiment:
        def batches(self):
            yield [["seed=0"], ["seed=1"]]
            # What the first batch gave is there before the second is asked for.
            assert len(launched) == 1
            yield [["seed=2"]]

    monkeypatch.setattr(callback, "live_experiment", lambda context: Experiment())
    sweeper = LooksSweeper()
    sweeper.hydra_context, sweeper.launcher = object(), Recorder()
    returned = sweeper.sweep([])
    assert launched == [(0, [["seed=0"], ["seed=1"]]), (2, [["seed=2"]])]
    assert [len(batch) for batch in returned] == [2, 1]
