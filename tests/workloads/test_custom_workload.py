"""A user's file: loaded whole, checked for what is missing, its errors named by line."""

import dataclasses
import hashlib
import pickle
import random
import sys

import numpy as np
import pytest
import torch

from harness.workloads.registry import default_seeds, make_workload

GOOD = '''"""A line on the model.

More lines.
"""
import torch
from torch import nn

STEPS, SEEDS, CLIP = 40, (0, 1, 5), 0.5


def build_model(seed):
    torch.manual_seed(seed)
    return nn.Linear(3, 1)


def batches(seed, steps):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(8, 3, generator=g)


def loss_fn(model, batch):
    return model(batch).pow(2).mean()


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
'''


@pytest.fixture
def path(tmp_path):
    return tmp_path / "my_net.py"


def custom(path, text=GOOD, **settings):
    path.write_text(text)
    return make_workload({"kind": "custom", "file": str(path), **settings})


def refused(path, text):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is what is tested
        custom(path, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_file_becomes_a_workload(path):
    workload = custom(path)
    assert workload.name == "my_net"
    assert workload.description == "A line on the model."
    assert (workload.clip, workload.default_steps) == (0.5, 40)
    assert workload.data_sha256 == hashlib.sha256(GOOD.encode()).hexdigest()
    batch = next(workload.batches(0, 1))
    assert (workload.num_items(batch), workload.num_tokens(batch)) == (8, None)
    model = workload.build_model(0)
    assert workload.loss_fn(model, batch).ndim == 0
    optimizer = workload.make_optimizer(model)
    assert workload.make_scheduler(optimizer, 40) is None
    assert workload.held_out(0) is None
    assert workload.eval_fn(model) is None
    assert workload.hints == ()
    assert str(path.parent) not in str(workload.settings)


def test_settings_override_the_file(path):
    workload = custom(path, name="net", steps=7, clip=0, description="other")
    assert (workload.name, workload.default_steps, workload.clip) == ("net", 7, None)
    assert workload.description == "other"
    assert workload.settings["steps"] == 7


def test_optional_functions_are_used(path):
    text = GOOD + (
        "def make_scheduler(optimizer, steps):\n"
        "    return torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=steps)\n"
        "def held_out(seed):\n    return batches(seed, 2)\n"
        "def eval_fn(model):\n    return torch.tensor(1.5)\n"
    )
    workload = custom(path, text)
    model = workload.build_model(0)
    scheduler = workload.make_scheduler(workload.make_optimizer(model), 40)
    assert isinstance(scheduler, torch.optim.lr_scheduler.ConstantLR)
    assert len(workload.held_out(0)) == 2
    assert workload.eval_fn(model) == 1.5


@pytest.mark.parametrize("call", ["list(range(3))", "torch.utils.data.DataLoader(range(3))"])
def test_batches_may_be_any_iterable(path, call):
    text = GOOD.replace(
        "def batches(", "def batches(seed, steps):\n    return " + call + "\ndef _b("
    )
    assert len(list(custom(path, text).batches(0, 3))) == 3


def test_dataclasses_and_pickles_of_the_file_work(path):
    text = (
        GOOD + "import dataclasses\n@dataclasses.dataclass\nclass Batch:\n    x: 'torch.Tensor'\n"
    )
    workload = custom(path, text)
    value = sys.modules[workload.module_name].Batch(torch.ones(2))
    assert [field.name for field in dataclasses.fields(value)] == ["x"]
    assert torch.equal(pickle.loads(pickle.dumps(value)).x, value.x)


def test_import_runs_once_and_leaves_no_trace(path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = GOOD + (
        "import random\nimport numpy as np\nDRAWN = (torch.rand(1).item(), random.random(), "
        "np.random.rand())\ntorch.set_num_threads(torch.get_num_threads() + 1)\n"
        "torch.set_default_dtype(torch.float64)\n"
    )
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    threads = torch.get_num_threads()
    first_on_path = sys.path[0]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    drawn = sys.modules[custom(path, text).module_name].DRAWN
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32
    assert sys.path[0] == first_on_path
    again = custom(path, text)
    assert sys.modules[again.module_name].DRAWN is drawn  # imported once
    # Data drawn at import are the same in every process, so runs of several workers are pairs.
    other = custom(path, text + "# another content\n")
    assert sys.modules[other.module_name].DRAWN == drawn


def test_files_beside_it_are_importable_and_hashed(path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    beside = path.parent / "my_layers.py"
    beside.write_text("WIDTH = 3\n")
    (path.parent / "my_late.py").write_text("STEPS = 11\n")
    text = GOOD.replace(
        "    torch.manual_seed(seed)\n",
        "    import my_late\n    torch.manual_seed(seed + my_late.STEPS)\n",
    )
    text = "import my_layers\n" + text
    workload = custom(path, text)
    workload.build_model(0)  # imports inside functions work after loading, too
    before = workload.data_sha256
    beside.write_text("WIDTH = 4\n")
    assert custom(path, text).data_sha256 != before


def test_two_folders_may_have_files_of_one_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    widths = []
    for width in (3, 4):
        folder = tmp_path / str(width)
        folder.mkdir()
        (folder / "sizes_of_two.py").write_text(f"WIDTH = {width}\n")
        text = "from sizes_of_two import WIDTH\n" + GOOD.replace("(3, 1)", "(WIDTH, 1)")
        widths.append(custom(folder / "net.py", text).build_model(0).in_features)
    assert widths == [3, 4]


def test_module_by_name(tmp_path, monkeypatch):
    package = tmp_path / "pkg_for_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise_if_imported_for_seeds = True\n")
    (package / "sizes.py").write_text("WIDTH = 3\n")
    text = "from pkg_for_test.sizes import WIDTH\nfrom . import sizes\n" + GOOD
    (package / "net.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    settings = {"kind": "custom", "module": "pkg_for_test.net"}
    assert default_seeds(settings) == (0, 1, 5)
    assert "pkg_for_test" not in sys.modules
    workload = make_workload(settings)
    assert workload.name == "net"
    before = workload.data_sha256
    (package / "sizes.py").write_text("WIDTH = 4\n")
    assert make_workload(settings).data_sha256 != before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"file": "no/such.py"}, r"workload\.file=no/such\.py does not exist"),
        ({"file": "."}, r"workload\.file=\. is a folder"),
        ({"module": "no_such_package.net"}, r"no module 'no_such_package'"),
        ({"module": "json.nothing"}, r"no module 'json\.nothing'"),
        ({"module": "a..b"}, r"workload\.module=a\.\.b"),
        ({"module": "sys"}, r"workload\.module=sys"),
    ],
)
def test_missing_sources_are_named(settings, says):
    with pytest.raises(ValueError, match=says):
        make_workload({"kind": "custom", **settings})


def test_syntax_error_names_the_line(path):
    message = refused(path, GOOD + "def broken(:\n")
    line = GOOD.count("\n") + 1
    assert f"my_net.py line {line}: SyntaxError" in message


@pytest.mark.parametrize(
    ("added", "says"),
    [
        ("import no_such_package_at_all", "ModuleNotFoundError: No module named 'no_such"),
        ("x = 1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('usage: net.py')", "SystemExit: usage: net.py"),
        ("import json; json.loads('{')", "JSONDecodeError"),  # raised elsewhere, caused here
        ("raise ValueError('two\\nlines')", "ValueError: two"),
    ],
)
def test_error_at_import_names_line_and_exception(path, added, says):
    before = {name for name in sys.modules if "my_net" in name}
    message = refused(path, GOOD + added + "\n")
    assert f"my_net.py line {GOOD.count(chr(10)) + 1}: " in message
    assert says in message
    # A broken import is not kept.
    assert {name for name in sys.modules if "my_net" in name} == before


@pytest.mark.parametrize(
    ("name", "written", "says"),
    [
        ("batches", "batch", r"batch (is it batches?)"),
        ("batches", "get_batches", r"get_batches (is it batches?)"),
        ("make_optimizer", "make_optim", r"make_optim (is it make_optimizer?)"),
        ("build_model", "model", r"model (is it build_model?)"),
        ("loss_fn", "loss", r"loss (is it loss_fn?)"),
        ("loss_fn", "something_else", "does not define loss_fn(model, batch)"),
    ],
)
def test_missing_function_is_named_with_its_lookalike(path, name, written, says):
    message = refused(path, GOOD.replace(f"def {name}(", f"def {written}("))
    assert f"my_net.py does not define {name}(" in message
    assert says in message


def test_all_missing_functions_are_named_at_once(path):
    message = refused(path, "x = 1\n")
    for name in ("build_model(seed)", "batches(seed, steps)", "loss_fn(model, batch)"):
        assert name in message


@pytest.mark.parametrize(
    ("added", "meant"),
    [
        ("def scheduler(optimizer, steps): pass", "make_scheduler"),
        ("clip = 2.0", "CLIP"),
        ("def heldout(seed): pass", "held_out"),
        ("def eval_func(model): pass", "eval_fn"),
        ("seeds = (1, 2)", "SEEDS"),
    ],
)
def test_optional_names_misspelt_give_a_hint(path, added, meant):
    text = GOOD.replace(", SEEDS, CLIP = 40, (0, 1, 5), 0.5", " = 40") + added + "\n"
    (hint,) = custom(path, text).hints
    assert f"is it {meant}?" in hint


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("def build_model(seed)", "def build_model()", "build_model() cannot be called as"),
        ("def batches(seed, steps)", "def batches(seed)", "batches(seed) cannot be called as"),
        ("STEPS, SEEDS, CLIP = 40, (0, 1, 5), 0.5", "STEPS = 0", "STEPS=0 is not allowed"),
        ("STEPS, SEEDS, CLIP = 40, (0, 1, 5), 0.5", "CLIP = 'x'", "CLIP='x' is not allowed"),
        ("STEPS, SEEDS, CLIP = 40, (0, 1, 5), 0.5", "held_out = []", "held_out is not a function"),
    ],
)
def test_names_of_the_wrong_kind_are_refused(path, old, new, says):
    assert old in GOOD
    assert says in refused(path, GOOD.replace(old, new))


@pytest.mark.parametrize(
    ("line", "seeds"),
    [
        ("SEEDS = (3, 4)", (3, 4)),
        ("SEEDS: list = [3]", (3,)),
        ("SEEDS = range(2, 4)", (2, 3)),
        ("STEPS, (SEEDS, CLIP) = 4, ([7, 8], 1.0)", (7, 8)),
        ("SEEDS = (1, 2)\nSEEDS = (5,)", (5,)),
        ("", None),
    ],
)
def test_seeds_are_read_without_running_the_file(path, line, seeds):
    path.write_text(f"import no_such_package_at_all\n{line}\n")
    assert default_seeds({"kind": "custom", "file": str(path)}) == seeds


@pytest.mark.parametrize(
    "value", ["(0.5, 1)", "tuple(x)", "3", "()", "(-1, 2)", "('a',)", "range(a)"]
)
def test_seeds_that_cannot_be_read_are_refused(path, value):
    path.write_text(f"\nSEEDS = {value}\n")
    with pytest.raises(ValueError, match=r"my_net\.py line 2: SEEDS must be written out"):
        default_seeds({"kind": "custom", "file": str(path)})
