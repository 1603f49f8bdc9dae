"""The names that `decision.method` may have: the rule of this package, and the rivals to it."""

from __future__ import annotations

NON_INFERIORITY = "non_inferiority"
RIVAL_NAMES: tuple[str, ...] = (
    "relative_tail",
    "pointwise_band",
    "ulp_envelope",
    "paired_t",
    "welch_t",
    "block_bootstrap",
    "steps_to_target",
    "last_step",
)
METHODS: tuple[str, ...] = (NON_INFERIORITY, *RIVAL_NAMES)
