"""Runs on a CUDA device: every default policy trains natively and pairs with FP32.

Their CPU twins are the conformance tests of policies, dropout and workloads.
"""

from __future__ import annotations

import pytest
import torch

from harness.config import load_choice
from harness.precision.policy import PrecisionPolicy
from harness.runs.environment import describe_environment
from harness.runs.record import RunRecord
from harness.runs.trainer import RunSettings, train
from harness.workloads.registry import make_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no CUDA device"),
]


def _run(workload: str, policy: str) -> RunRecord:
    device = torch.device("cuda")
    return train(
        make_workload(load_choice("workload", workload)),
        PrecisionPolicy.from_mapping(load_choice("policy", policy)),
        RunSettings(steps=20, seed=0, device="cuda", num_threads=1),
        run_key="gpu",
        environment=describe_environment(device, num_threads=1),
    )


@pytest.mark.parametrize("workload", ["char_gpt", "digits_convnet"])
@pytest.mark.parametrize("policy", ["tf32", "fp16", "bf16", "bf16_fallback", "bf16_pure"])
def test_a_candidate_pairs_with_fp32(workload: str, policy: str) -> None:
    reference, candidate = _run(workload, "fp32"), _run(workload, policy)
    assert (reference.status, candidate.status) == ("completed", "completed"), candidate.crash
    assert candidate.fingerprints == reference.fingerprints
    assert candidate.audit != reference.audit or policy == "tf32"
    assert reference.execution == "native"
    # The bound of the first-step warning for 16-bit formats: one rounding per layer at most.
    assert candidate.series["loss"][0] == pytest.approx(reference.series["loss"][0], rel=2**-5)
    assert candidate.peak_memory_bytes
