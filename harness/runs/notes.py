"""What a preflight may remark on a workload, and what each remark means; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something about a workload that a reader of its verdicts should know.

    Attributes:
        code: A key of `NOTE_CODES`.
        message: One sentence with the particulars.
    """

    code: str
    message: str


# Code -> what it means and what to do about it.
NOTE_CODES: Mapping[str, str] = {
    "UNUSED_NAME": (
        "The workload file defines a name that the harness does not know but that looks like an "
        "optional one (make_scheduler, held_out, eval_fn, CLIP, STEPS, SEEDS). It had no effect. "
        "Rename it if it was meant to have one."
    ),
    "BATCHES_NOT_CHECKED": (
        "The batch iterator was too slow to be walked to its end before training. If it ends "
        "early, the runs crash at that step."
    ),
    "BATCHES_WITHOUT_TENSORS": (
        "The batches hold no tensor in a tuple, list, dict or dataclass, so their fingerprints "
        "are empty: that two runs saw the same data is assumed, not proven."
    ),
    "BATCHES_NOT_REPRODUCIBLE": (
        "Asked twice with one seed, batches(seed, steps) gave different data. Runs of different "
        "policies then train on different data, and every verdict will be PAIRING_BROKEN. Draw "
        "from a generator that is seeded with `seed`."
    ),
    "MODEL_NOT_REPRODUCIBLE": (
        "Asked twice with one seed, build_model(seed) gave different weights although the global "
        "generators were seeded the same. Every verdict will be PAIRING_BROKEN. Make the weights "
        "a function of `seed`."
    ),
    "WEIGHTS_NOT_FP32": (
        "The model as built has floating parameters in another format than FP32, so its FP32 "
        "reference is not FP32 throughout."
    ),
    "LOSS_LOGGED_LOW_PRECISION": (
        "The workload computes its loss in a 16-bit format even under FP32. Differences smaller "
        "than that format's spacing are invisible. Compute the loss from logits cast to FP32."
    ),
    "HELDOUT_MISSING": (
        "The workload has neither held_out nor eval_fn: verdicts rest on the training loss alone."
    ),
    "HELDOUT_SMALL": (
        "The held-out set has fewer items than advised, which makes its loss a noisy endpoint."
    ),
    "HELDOUT_NONFINITE": (
        "The held-out figure was NaN or infinite in FP32 after three steps; if it stays so, the "
        "reference cannot be compared with."
    ),
    "ENTRY_WITHOUT_EFFECT": (
        "An entry of a policy's fp32_ops, fp32_modules or low_precision_ops changed nothing in a "
        "traced step: the model calls nothing that it names, or that ran in this format anyway. "
        "The policy's verdict says nothing about the entry."
    ),
}
