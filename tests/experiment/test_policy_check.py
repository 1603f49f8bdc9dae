"""The check of policies before a sweep: traces one step of whatever the workload does."""

import pytest
import torch

from harness.experiment.policy_check import check_policies
from harness.precision.policy import PrecisionPolicy
from harness.workloads.registry import make_workload

FILE = """
import torch
from torch import nn

def build_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))

def batches(seed, steps):
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        yield torch.randn(8, 4, generator=generator) * (1 - step / (steps - 1))

def loss_fn(model, batch):
    x = batch.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    return (slope - 1).square().mean()

def make_optimizer(model):
    return torch.optim.AdamW(model.parameters())
"""
FP32 = PrecisionPolicy(name="fp32")
BF16 = PrecisionPolicy(name="bf16", compute_format="bf16")
FALLBACK = PrecisionPolicy(
    name="bf16_fallback",
    compute_format="bf16",
    fp32_selectors=("normalization", "attention_scores", "output_head", "loss"),
)


def check(tmp_path, text, policies, steps=10):
    path = tmp_path / "penalty.py"
    path.write_text(text)
    workload = make_workload({"kind": "custom", "file": str(path)})
    return check_policies(
        workload,
        policies,
        reference="fp32",
        seed=0,
        steps=steps,
        device=torch.device("cpu"),
        backend="auto",
    )


def test_a_loss_with_derivatives_and_a_curriculum_is_traced(tmp_path):
    result = check(tmp_path, FILE, [FP32, BF16, FALLBACK])
    assert set(result.audits) == {"fp32", "bf16", "bf16_fallback"}
    assert not result.skipped
    assert "bf16" in result.audits["bf16"]["addmm"]


def test_a_raising_iterator_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"batches \(step 0\) raised: penalty.py line 12"):
        check(tmp_path, FILE, [FP32, BF16], steps=1)


# Without the inner derivative, whose products autocast lowers whatever the module.
PLAIN = (
    FILE[: FILE.index("    x = batch")]
    + "    return model(batch).mean()\n\n"
    + FILE[FILE.index("def make_optimizer") :]
)
OWN_AUTOCAST = PLAIN.replace(
    "    return model(batch)",
    "    with torch.autocast('cpu', dtype=torch.bfloat16):\n        return model(batch)",
).replace("nn.LayerNorm(8)", "nn.ReLU()")  # outside the harness it follows the CPU's own lists
KEPT = PrecisionPolicy(name="kept", compute_format="bf16", fp32_modules=("0", "1", "2", "3"))


@pytest.mark.parametrize(
    ("text", "policy", "cause"),
    [
        (PLAIN, KEPT, "as under 'fp32'$"),
        (OWN_AUTOCAST, BF16, "its own code computes in bf16 already"),
        (PLAIN.replace("model(batch)", "model.double()(batch.double())"), BF16, "in FP64"),
    ],
    ids=["kept", "own_autocast", "double"],
)
def test_a_policy_that_changes_nothing_is_an_error(tmp_path, text, policy, cause):
    with pytest.raises(ValueError, match=rf"'{policy.name}' changes nothing .*{cause}"):
        check(tmp_path, text, [FP32, policy])


def test_a_policy_of_the_backward_pass_alone_changes_something(tmp_path):
    """Its forward pass is the reference's, op by op."""
    backward_only = PrecisionPolicy(
        name="backward_only", compute_format="tf32", fp32_modules=("forward:re:.+",)
    )
    result = check(tmp_path, PLAIN, [FP32, backward_only])
    assert result.audits["backward_only"] == result.audits["fp32"]
    neither = PrecisionPolicy(name="neither", compute_format="tf32", fp32_modules=("re:.+",))
    with pytest.raises(ValueError, match="'neither' changes nothing"):
        check(tmp_path, PLAIN, [FP32, neither])


def test_entries_that_change_nothing_are_told_by_name(tmp_path):
    # The layer norm hands FP32 to tanh already, and nothing here calls a Cholesky factorization.
    policy = PrecisionPolicy(
        name="mine",
        compute_format="bf16",
        fp32_ops=("tanh", "linalg_cholesky"),
        fp32_modules=("backward:0",),
    )
    result = check(tmp_path, FILE, [FP32, policy])
    assert {note.code for note in result.notes} == {"ENTRY_WITHOUT_EFFECT"}
    entries = [note.message.split(": ")[1].split(" ")[0] for note in result.notes]
    assert entries == ["fp32_ops=[tanh]", "fp32_ops=[linalg_cholesky]"]
