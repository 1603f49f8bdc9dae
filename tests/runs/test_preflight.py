"""Preflight: planted faults in a user's file are each one clear line before anything is trained."""

import os
import random
import warnings

import pytest
import torch

from harness.runs import preflight
from harness.runs.loss_check import sixteen_bit_format
from harness.runs.notes import NOTE_CODES
from harness.runs.preflight import check_workload
from harness.workloads.registry import make_workload

GOOD = """import torch
from torch import nn

def build_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))

def batches(seed, steps):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(8, 3, generator=g)

def loss_fn(model, batch):
    return model(batch).pow(2).mean()

def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""

SWITCH = "torch.backends.cuda.matmul.fp32_precision = 'tf32'"


@pytest.fixture
def check(tmp_path):
    def run(*changes, added="", steps=20):
        text = GOOD
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "my_net.py"
        path.write_text(text + added)
        workload = make_workload({"kind": "custom", "file": str(path)})
        return check_workload(workload, seed=0, steps=steps, device=torch.device("cpu"))

    return run


def codes(report):
    return [note.code for note in report.notes]


def test_sound_file_passes_with_sizes_and_times(check):
    report = check(added="def held_out(seed):\n    return list(batches(99, 300))\n")
    assert report.notes == ()
    assert (report.num_parameters, report.parameter_bytes) == (3 * 4 + 4 + 4 + 1, 21 * 4)
    assert report.held_out_items == 2400
    assert report.step_seconds > 0
    assert report.held_out_seconds > 0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (".pow(2).mean()", ".pow(2)", r"shape \(8, 1\).*scalar"),
        (".pow(2).mean()", ".pow(2).mean()[None]", r"shape \(1,\)"),
        (".pow(2).mean()", ".pow(2).mean().detach()", r"without a gradient"),
        (".pow(2).mean()", ".pow(2).mean().item()", r"a value of type float"),
        ("return model(batch)", "model(batch)", r"loss_fn returned None"),
        (".pow(2).mean()", ".pow(2).mean().to(torch.complex64)", r"complex64.*real"),
        (".mean()", ".mean() / 0", r"the loss is inf at step 0 in FP32"),
        (".mean()", ".mean().sub(9.0).log()", r"the loss is nan at step 0 in FP32"),
        ("range(steps)", "range(2)", r"yielded 2 of 20 batches, so step 2 has none"),
        ("range(steps)", "range(steps - 1)", r"so step 19 has none"),
        ("    for _", "    return\n    for _", r"yielded 0 of 20 batches"),
        ("return nn.Sequential", "nn.Sequential", r"build_model returned None"),
        ("return nn.Sequential", "return nn.LazyLinear(1);", r"'weight' has no values yet"),
        (
            "return nn.Sequential",
            "return nn.Linear(4, 1, device='meta');",
            r"'weight' has no values yet",
        ),
        ("torch.optim.SGD(", "max(", r"make_optimizer raised: my_net\.py line 17: TypeError"),
        (
            "torch.optim.SGD(model.parameters(), lr=0.1)",
            "[1]",
            r"make_optimizer returned a value of type list, not an optimizer",
        ),
    ],
)
def test_fault_that_wastes_every_run_is_an_error(check, old, new, says):
    with pytest.raises(ValueError, match=says) as caught:
        check((old, new))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "function"),
    [
        ("    torch.manual_seed(seed)\n", "build_model"),
        ("    g = torch.Generator().manual_seed(seed)\n", r"batches \(step 0\)"),
        ("    return model(batch).pow(2).mean()\n", "loss_fn"),
        ("    return torch.optim.SGD(model.parameters(), lr=0.1)\n", "make_optimizer"),
    ],
)
def test_exception_names_function_and_line(check, line, function):
    number = GOOD[: GOOD.index(line)].count("\n") + 1
    says = rf"{function} raised: my_net\.py line {number}: RuntimeError: broken here"
    with pytest.raises(ValueError, match=says):
        # The line stays behind it, so that a generator stays one.
        check((line, f"    raise RuntimeError('broken here'); {line.strip()}\n"))


@pytest.mark.parametrize(
    ("added", "says"),
    [
        ("def held_out(seed): return [][0]", r"held_out raised: my_net\.py line 18: IndexError"),
        ("def held_out(seed): return []", r"held_out returned no batches"),
        ("def held_out(seed): return ['x']", r"loss_fn on a held-out batch raised"),
        ("def eval_fn(model): return 'good'", r"eval_fn raised: ValueError: could not convert"),
        ("def make_scheduler(o, s): return o.lr", r"make_scheduler raised: my_net\.py line 18"),
    ],
)
def test_faults_in_optional_functions(check, added, says):
    with pytest.raises(ValueError, match=says):
        check(added=added + "\n")


def test_batches_that_hand_out_one_exhausted_iterator_are_caught(check):
    change = ("def batches(", "def batches(seed, steps):\n    return ONCE\n\ndef _made(")
    with pytest.raises(ValueError, match=r"ended early"):
        check(change, added="ONCE = iter(list(_made(0, 20)))\n")


def test_long_iterators_are_not_walked_to_the_end(check, monkeypatch):
    monkeypatch.setattr(preflight, "BUDGET_SECONDS", 0.0)
    report = check(("range(steps)", "range(10)"))
    (note,) = [n for n in report.notes if n.code == "BATCHES_NOT_CHECKED"]
    assert "beyond step 3" in note.message


@pytest.mark.parametrize(
    ("change", "added", "code"),
    [
        (("", ""), "", "HELDOUT_MISSING"),
        (("", ""), "def held_out(seed): return list(batches(9, 2))", "HELDOUT_SMALL"),
        (("", ""), "def eval_fn(model): return float('nan')", "HELDOUT_NONFINITE"),
        (("", ""), "def held_out(seed): return [torch.full((8, 3), torch.inf)]",
         "HELDOUT_NONFINITE"),
        (("", ""), "def scheduler(optimizer, steps): pass", "UNUSED_NAME"),
        (("seed)\n    return nn", "CALLS.append(1) or len(CALLS))\n    return nn"), "CALLS = []",
         "MODEL_NOT_REPRODUCIBLE"),
        (("manual_seed(seed)\n    for", "manual_seed(CALLS.append(1) or len(CALLS))\n    for"),
         "CALLS = []", "BATCHES_NOT_REPRODUCIBLE"),
        (("mean()", "mean().bfloat16()"), "", "LOSS_LOGGED_LOW_PRECISION"),
        (("mean()", "mean().half().float()"), "", "LOSS_LOGGED_LOW_PRECISION"),
        (("nn.Linear(4, 1))", "nn.Linear(4, 1)).double()"), "", "WEIGHTS_NOT_FP32"),
        (("yield torch.randn(8, 3, generator=g)", "yield [[1.0, 2.0, 3.0]]"), "",
         "BATCHES_WITHOUT_TENSORS"),
    ],
)  # fmt: skip
def test_what_only_weakens_a_verdict_is_a_note(check, change, added, code):
    changes = [change] if change[0] else []
    if code == "WEIGHTS_NOT_FP32":
        changes.append(("model(batch)", "model(batch.double())"))
    if code == "BATCHES_WITHOUT_TENSORS":
        changes.append(("model(batch)", "model(torch.tensor(batch))"))
    report = check(*changes, added=added + "\n")
    assert code in codes(report)
    assert set(codes(report)) <= set(NOTE_CODES)
    assert all("\n" not in note.message for note in report.notes)


def test_model_and_data_drawn_without_a_seed_are_fine_because_the_harness_seeds(check):
    report = check(("    torch.manual_seed(seed)\n", ""), (", generator=g", ""))
    assert codes(report) == ["HELDOUT_MISSING"]


def test_optimizer_that_needs_a_closure(check):
    report = check(("torch.optim.SGD(model.parameters(), lr=0.1)",
                    "torch.optim.LBFGS(model.parameters(), max_iter=2)"))  # fmt: skip
    assert codes(report) == ["HELDOUT_MISSING"]


def test_loss_with_derivatives_of_the_model_can_be_held_out(check):
    change = (
        "return model(batch).pow(2).mean()",
        "x = batch.requires_grad_()\n"
        "    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)\n"
        "    return model(x).pow(2).mean() + g.pow(2).mean()",
    )
    assert codes(check(change, added="def held_out(seed): return list(batches(9, 300))\n")) == []


def test_tied_sparse_and_unused_parameters(check):
    model = "nn.ModuleList([nn.Embedding(5, 4, sparse=True), nn.Linear(4, 5), nn.Linear(2, 2)])"
    report = check(
        ("nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))", model),
        ("torch.randn(8, 3, generator=g)", "{'k': (torch.randint(5, (8,), generator=g), 'name')}"),
        ("model(batch)", "model[1](model[0](batch['k'][0]))"),
    )
    assert report.num_parameters == 20 + 25 + 6


def test_random_state_threads_and_grad_mode_are_left_alone(check):
    states = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    check(("    return model(batch)", "    torch.rand(1)\n    return model(batch)"))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), torch.get_num_threads()) == states[1:]
    assert torch.is_grad_enabled()


def test_one_step_run_is_enough(check):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check(steps=1).step_seconds > 0


def test_code_that_sets_the_precision_switches_while_training_is_an_error(check):
    with pytest.raises(ValueError, match=r"cuda\.matmul to tf32 .* leave that to the policies"):
        check(("return model(batch)", f"{SWITCH}; return model(batch)"))
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        check(added=f"{SWITCH}\n")  # at import, where most people write it, it is overridden
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_cublas_is_told_to_be_deterministic_before_anything_computes(check, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    check()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    check()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_builtin_workload_has_no_notes():
    torch.set_num_threads(1)
    workload = make_workload({"kind": "char_gpt", "num_characters": 300_000})
    report = check_workload(workload, seed=0, steps=30, device=torch.device("cpu"))
    assert report.notes == ()
    assert report.held_out_items == 16_384


@pytest.mark.parametrize(
    ("losses", "name"),
    [
        ([torch.tensor(0.1).bfloat16()], "bf16"),
        ([torch.tensor(x).half().float() for x in (0.1, 0.7, 0.9)], "fp16"),
        ([torch.tensor(x) for x in (0.1, 0.7, 0.9)], None),
        ([torch.tensor(1.0)] * 5, None),  # a constant loss says nothing about its format
        ([], None),
    ],
)
def test_format_of_losses(losses, name):
    assert sixteen_bit_format(losses) == name
