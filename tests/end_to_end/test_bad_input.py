"""Every kind of bad input: exit code 2 and one line on stderr that says what is wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

from harness import cli
from harness.experiment.manifest import Manifest, write

pytestmark = pytest.mark.slow  # about a hundred compositions by Hydra, a third of a second each

TINY = (Path(__file__).parent / "workloads" / "tiny.py").read_text(encoding="utf-8")
LOSS = "return F.mse_loss(model(batch[0]).float(), batch[1])"
CUSTOM = ("workload=custom", "workload.file=tiny.py")


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Run a command line in an empty folder that holds `tiny.py`; return its one line of error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv(cli.TRACEBACK_VARIABLE, raising=False)
    for name in ("HYDRA_FULL_ERROR", cli.COMMAND_VARIABLE):  # the command line sets them
        monkeypatch.setenv(name, os.environ.get(name, ""))
    choices = set(ConfigStore.instance().repo.get("policy", {}))
    (tmp_path / "tiny.py").write_text(TINY, encoding="utf-8")

    def run(*arguments: str) -> str:
        code = cli.run(arguments)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert code == 2, lines
        assert lines[0].startswith("error: ")
        assert not any((tmp_path / "runs").rglob("record.json"))
        return lines[0]

    yield run
    GlobalHydra.instance().clear()
    policies = ConfigStore.instance().repo.get("policy", {})
    for name in set(policies) - choices:
        del policies[name]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # --- unknown names: the known ones are listed ---
        (["+sweep=precison"], ["sweep/precison", "pair, precision, smoke"]),
        (
            ["policy=fp32,bf61"],
            ["policy/bf61", "bf16, bf16_fallback, bf16_pure, bf16_stochastic, fp16"],
        ),
        (["workload=char_gtp"], ["workload/char_gtp", "char_gpt", "custom", "digits_convnet"]),
        (["--config-dir", "nowhere"], ["nowhere", "not found"]),
        # --- misspelt keys ---
        (["trian.steps=3"], ["'trian.steps'", "did you mean train.steps"]),
        (["train.step=3"], ["'train.step'", "did you mean train.steps"]),
        (["+train.step=3"], ["'train.step'", "did you mean train.steps"]),
        (["+polcy=fp32"], ["'polcy'", "did you mean policy"]),
        (["workload.widht=3"], ["widht", "did you mean workload.width"]),
        (["+workload.widht=3"], ["widht", "did you mean width"]),
        (["decision.alhpa=0.1"], ["alhpa", "did you mean decision.alpha"]),
        (["+decision.alhpa=0.1"], ["alhpa"]),
        (["policy=bf16", "policy.fp32_module=[norm]"], ["fp32_module"]),
        (["sweep=precision"], ["+sweep=precision"]),
        (["steps"], ["'steps'", "key=value"]),
        # --- wrong types and values ---
        (["train.steps=many"], ["train.steps=many", "Integer"]),
        (["train.steps=1.5"], ["train.steps=1.5", "Integer"]),
        (["seed=first"], ["seed=first", "Integer"]),
        (["dry_run=perhaps"], ["dry_run=perhaps", "bool"]),
        (["workload.width=wide"], ["workload.width='wide'", "a whole number"]),
        (["decision.alpha=often"], ["decision.alpha='often'", "a number"]),
        (["decision.alpha=2"], ["decision.alpha=2", "(0, 0.5)"]),
        (["train.steps=0"], ["train.steps=0", "at least 1"]),
        (["train.steps=-3"], ["train.steps=-3", "at least 1"]),
        (["workload.steps=0"], ["workload.steps=0", "1 or more"]),
        (["probes.norms.every=0"], ["probes.norms.every=0", "at least 1"]),
        (["probes=all"], ["probes", "default", "every_step", "none"]),
        (["launch.threads=0"], ["launch.threads=0", "at least 1"]),
        (["train.backend=quick"], ["train.backend=quick", "auto, native, emulated"]),
        (["device=gpu"], ["device=gpu", "auto, cpu, cuda"]),
        (["action=rerun"], ["action=rerun", "run, report"]),
        (["workload.text=/nowhere.txt"], ["workload.text=/nowhere.txt", "No such file"]),
        (["hydra.mode=RUN"], ["hydra.mode=RUN"]),
        # --- the grid ---
        (["seed="], ["seed="]),
        (["seed=[]"], ["seed=[]"]),
        (["seed=-1"], ["seed=-1", "0 or more"]),
        (["seed=0,0"], ["seed 0", "twice"]),
        (["policy=fp32,bf16,bf16"], ["'bf16'", "twice"]),
        (["policy=bf16,fp16"], ["'fp32' is missing", "policy=fp32,bf16,fp16"]),
        (["reference=nobody"], ["'nobody' is missing"]),
        (["reference=bf16"], ["reference=bf16", "plain FP32"]),
        # --- policies ---
        (
            [*CUSTOM, "policy=fp32,bf16,fp16", "policy.fp32_modules=[head]"],
            ["all 3", "--config-dir"],
        ),
        ([*CUSTOM, "policy=bf16", "policy.fp32_modules=[haed]"], ["'haed'", "no module", "head"]),
        ([*CUSTOM, "policy=bf16", "policy.fp32_ops=[sofmax]"], ["'sofmax'", "closest: softmax"]),
        ([*CUSTOM, "policy=bf16", "policy.fp32_selectors=[heads]"], ["'heads'", "output_head"]),
        ([*CUSTOM, "policy=bf16", "policy.fp32_modules=['*']"], ["changes nothing"]),
        (
            [*CUSTOM, "policy=bf16", "policy.compute_format=bf17"],
            ["'bf17'", "fp32, tf32, bf16, fp16"],
        ),
        ([*CUSTOM, "policy=fp16", "policy.loss_scale.init_scale=0"], ["init_scale", "> 0"]),
        # --- where things are read from and written to ---
        ([*CUSTOM, "tracking.uri=nonsense"], ["tracking.uri='nonsense'", "sqlite:///FILE.db"]),
        ([*CUSTOM, "tracking.uri=sqlite:half.db"], ["tracking.uri='sqlite:half.db'"]),
        ([*CUSTOM, "tracking.uri=http://"], ["tracking.uri='http://'"]),
        ([*CUSTOM, "tracking.uri=file:///tmp/x"], ["tracking.uri='file:///tmp/x'"]),
        ([*CUSTOM, "output_dir=tiny.py/below"], ["tiny.py/below", "cannot be written"]),
        ([*CUSTOM, "sweep_id=a/b"], ["sweep_id=a/b"]),
        ([*CUSTOM, "sweep_id=latest"], ["sweep_id=latest"]),
        (["action=report"], ["needs sweep_id=NAME"]),
        (["action=report", "sweep_id=latest"], ["sweep_id=latest", "no completed sweep"]),
        (["action=report", "sweep_id=lost"], ["sweep_id=lost", "no such sweep", "known: none"]),
        # --- no file to train ---
        (["workload=custom"], ["workload.file=PATH.py"]),
        (["workload=custom", "workload.file=none.py"], ["none.py", "does not exist"]),
        (["workload=custom", "workload.file=."], ["is a folder"]),
        (["workload=custom", "workload.module=no_such.module"], ["no_such"]),
        ([*CUSTOM, "workload.module=json"], ["workload.file", "workload.module", "keep one"]),
    ],
    ids=" ".join,
)
def test_command_line(refused, arguments, words):
    line = refused(*arguments)
    for word in words:
        assert word in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none(refused):
    line = refused("device=cuda")
    assert "device=cuda" in line
    assert "no CUDA device" in line


def line_of(statement: str) -> int:
    return TINY[: TINY.index(statement)].count("\n") + 1


# What is wrong with a workload file -> the text that is replaced, its replacement, telling words.
FILES: dict[str, tuple[str, str, list[str]]] = {
    "no build_model": ("def build_model", "def get_net", ["does not define build_model(seed)"]),
    "similar name": (
        "def make_optimizer", "def make_optim", ["make_optim (is it make_optimizer?)"],
    ),
    "wrong arguments": (
        "def loss_fn(model, batch):", "def loss_fn(model):\n    batch = None",
        ["loss_fn(model) cannot be called as loss_fn(model, batch)"],
    ),
    "not a function": (
        "def make_optimizer(model):", "make_optimizer = 3\n\n\ndef other(model):",
        ["make_optimizer is not a function"],
    ),
    "syntax error": (
        "def loss_fn(", "def loss_fn((", [f"line {line_of('def loss_fn')}", "SyntaxError"],
    ),
    "import error": (
        "import torch\n", "import not_there\n",
        [f"line {line_of('import torch')}", "ModuleNotFoundError", "not_there"],
    ),
    "seeds that are not written out": (
        "(0, 1, 2)", "tuple(sorted({0, 1}))", ["SEEDS", f"line {line_of('STEPS')}"],
    ),
    "no seeds": ("(0, 1, 2)", "()", ["SEEDS", f"line {line_of('STEPS')}"]),
    "no steps": ("STEPS, SEEDS = 40,", "STEPS, SEEDS = 0,", ["STEPS=0", "1 or more"]),
    "loss_fn raises": (
        LOSS, f"raise KeyError('y')\n    {LOSS}",
        ["loss_fn raised", f"line {line_of(LOSS)}", "KeyError: 'y'"],
    ),
    "build_model raises": (
        "model = nn.Sequential()", "model = nn.Sequential(3)",
        ["build_model raised", f"line {line_of('model = nn')}", "TypeError"],
    ),
    "batches raises": (
        "x = torch.randn(32", "x = torch.randn(-1",
        ["batches (step 0) raised", f"line {line_of('x = torch')}"],
    ),
    "make_optimizer raises": (
        "lr=1e-2", "lr=-1.0", ["make_optimizer raised", f"line {line_of('return torch.optim')}"],
    ),
    "held_out raises": (
        "return list(", "return {}['x'] or (",
        ["held_out raised", f"line {line_of('return list')}", "KeyError"],
    ),
    "loss is no scalar": (LOSS, f"{LOSS[:-1]}, reduction='none')", ["shape (32, 1)", "scalar"]),
    "loss is detached": (LOSS, f"{LOSS}.detach()", ["loss_fn", "without a gradient"]),
    "loss is a number": (LOSS, f"{LOSS}.item()", ["loss_fn returned a value of type float"]),
    "loss is NaN": (LOSS, f"{LOSS}.sub(1e6).log()", ["the loss is nan at step 0 in FP32"]),
    "loss is infinite": (LOSS, f"{LOSS} / 0", ["the loss is inf at step 0 in FP32"]),
    "batches end early": ("range(steps)", "range(7)", ["ended early", "7 of 40", "step 7"]),
    "batches end one too soon": ("range(steps)", "range(steps - 1)", ["39 of 40", "step 39"]),
    "no batch at all": ("range(steps)", "range(0)", ["0 of 40", "step 0"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FILES)
def test_workload_file(refused, fault):
    old, new, words = FILES[fault]
    assert TINY.count(old) == 1
    Path("broken.py").write_text(TINY.replace(old, new), encoding="utf-8")
    line = refused("workload=custom", "workload.file=broken.py", "tracking.enabled=false")
    for word in ["broken", *words]:
        assert word in line


def test_steps_of_the_command_line_are_what_batches_must_last_for(refused):
    Path("tiny.py").write_text(TINY.replace("range(steps)", "range(40)"), encoding="utf-8")
    assert "step 40" in refused(*CUSTOM, "train.steps=50", "tracking.enabled=false")


POLICY_FILES = {
    "name of another policy": ("name: bf16\nfp32_modules: [head]\n", "'bf16'; rename one"),
    "unknown field": ("name: mine\nfp32_module: [head]\n", "fp32_module"),
    "module that is not there": ("name: mine\nfp32_modules: [tail]\n", "'tail'"),
    "changes nothing": ("name: mine\nfp32_modules: ['*']\n", "'mine' changes nothing"),
    "not YAML": ("name: [mine\n", "mine.yaml"),
    "wrong type": ("name: mine\nperturbation: much\n", "much"),
}


@pytest.mark.parametrize("fault", POLICY_FILES)
def test_policy_file(refused, fault):
    text, word = POLICY_FILES[fault]
    folder = Path("own/policy")
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(f"defaults: [bf16, _self_]\n{text}", encoding="utf-8")
    grid = "policy=fp32,bf16,mine"
    assert word in refused(*CUSTOM, "--config-dir", "own", grid, "tracking.enabled=false")


def test_tracking_uri_of_the_environment(refused, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-uri")
    assert "MLFLOW_TRACKING_URI='no-uri'" in refused(*CUSTOM)


def test_unknown_sweep_id_lists_the_known_ones(refused):
    manifest = Manifest(
        sweep_id="earlier", sweep="pair", command="", device="cpu", reference="fp32", runs=(),
        descriptions={},
    )  # fmt: skip
    write(manifest, Path.cwd())
    assert "known: earlier" in refused("action=report", "sweep_id=later")


def test_what_was_there_before_stays(refused):
    Path("runs").mkdir()
    Path("runs/mine.txt").write_text("kept", encoding="utf-8")
    refused(*CUSTOM, "policy=bf16", "policy.fp32_modules=[haed]")
    assert Path("runs/mine.txt").read_text(encoding="utf-8") == "kept"
