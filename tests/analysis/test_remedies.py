"""Remedies name what the evidence names, and the grid's own policies that apply them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from factories import POLICIES, make_grid, make_record, make_same_point

from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.runs.same_point.record import ModuleError

SEEDS = (0, 1, 2)
HARM = {"offset": 0.5, "luck": 0.001}
BENIGN = {"luck": 0.001}


def culprit(policy: str, **fields: Any) -> Any:
    """Return a probe in which one module's own error stands out."""
    modules = [
        ModuleError(module=name, kind="Linear", local_forward_error=error)
        for name, error in (("net.dist", 0.5), ("net.f", 1e-3), ("head", 1e-3))
    ]
    return make_same_point(policy, modules=modules, **fields)


def keeping(*entries: str, name: str = "bf16_kept") -> PrecisionPolicy:
    return PrecisionPolicy(name=name, compute_format="bf16", fp32_modules=entries)


def reason(analysis: Any, records: list[Any], policy: str, **probes: Any) -> str:
    choice = analysis.findings(records, same_point=probes).choice
    (text,) = [r for r in choice.reasons if r.startswith(f"{policy} is ")]
    return str(text)


def test_the_module_is_named_ready_to_use(analysis: Any) -> None:
    text = reason(
        analysis, make_grid({"fp32": {}, "bf16": HARM}), "bf16", bf16=culprit("bf16", beta=0.5)
    )
    setting = "policy=bf16 policy.fp32_modules=[net.dist]"
    assert f"It points to keeping `net.dist` in FP32 ({setting})." in text


@pytest.mark.parametrize(
    ("entry", "covers"),
    [
        ("dist", True),
        ("net.dist", True),
        ("*.dist", True),
        ("net", True),
        ("re:net\\.d.*", True),
        ("head", False),
        ("forward:dist", False),
        ("net.dist.inner", False),
    ],
)
def test_a_policy_of_the_grid_that_keeps_it_is_named(
    analysis: Any, entry: str, covers: bool
) -> None:
    kept = [make_record(keeping(entry), seed, **BENIGN) for seed in SEEDS]
    records = [*make_grid({"fp32": {}, "bf16": HARM}), *kept]
    text = reason(analysis, records, "bf16", bf16=culprit("bf16"))
    setting = "policy=bf16 policy.fp32_modules=[net.dist]"
    named = f"keeping `net.dist` in FP32 ({setting}) (bf16_kept, accepted here)"
    assert (named in text) is covers


def test_what_the_grid_has_refuted_is_not_offered(analysis: Any) -> None:
    kept = [make_record(keeping("dist"), seed, **HARM) for seed in SEEDS]
    records = [*make_grid({"fp32": {}, "bf16": HARM}), *kept]
    assert "keeping `net.dist`" not in reason(analysis, records, "bf16", bf16=culprit("bf16"))


def test_a_format_that_works_only_with_more_in_fp32_is_no_remedy(analysis: Any) -> None:
    """FP16 overflows; so does BF16, and what mends both is the module."""
    kept = [make_record(keeping("head"), seed, **BENIGN) for seed in SEEDS]
    fp16 = [
        dataclasses.replace(r, series={**r.series, "loss": (math.nan,) * r.num_steps})
        for r in make_grid({"fp16": {}})
    ]
    for bf16, offered in ((HARM, False), (BENIGN, True)):
        records = [*make_grid({"fp32": {}, "bf16": bf16}), *fp16, *kept]
        assert ("BF16, which has" in reason(analysis, records, "fp16")) is offered
    alone = [*make_grid({"fp32": {}}), *fp16, *kept]
    assert "FP32's range (bf16_kept, accepted here)" in reason(analysis, alone, "fp16")


def test_flushed_gradients_point_to_loss_scaling(analysis: Any) -> None:
    static = PrecisionPolicy(
        name="fp16_static",
        compute_format="fp16",
        loss_scale=LossScaleSettings(kind="static", init_scale=1.0),
    )
    records = [
        *make_grid({"fp32": {}, "fp16": BENIGN}),
        *(make_record(static, seed, **HARM) for seed in SEEDS),
    ]
    whole = ModuleError(module="(model)", kind="Net", flushed_share=0.38)
    probe = dataclasses.replace(
        make_same_point("fp16", modules=[whole]), policy_content=static.content()
    )
    assert "loss scaling (fp16, accepted here)" in reason(
        analysis, records, "fp16_static", fp16_static=probe
    )
    # A dynamic scale finds its own size: what is flushed under it, no scale would save.
    only = make_grid({"fp32": {}, "fp16": HARM})
    assert "loss scaling" not in reason(
        analysis, only, "fp16", fp16=make_same_point("fp16", modules=[whole])
    )


def test_stochastic_rounding_is_offered_untried_but_not_to_itself(analysis: Any) -> None:
    probe = make_same_point("bf16_pure", retention=0.1)
    text = reason(
        analysis, make_grid({"fp32": {}, "bf16_pure": BENIGN}), "bf16_pure", bf16_pure=probe
    )
    assert "FP32 weights under the same arithmetic or stochastic rounding of the weights" in text
    rounded = dataclasses.replace(
        POLICIES["bf16_pure"], name="bf16_stochastic", weight_rounding="stochastic"
    )
    records = [*make_grid(["fp32"]), *(make_record(rounded, s, **BENIGN) for s in SEEDS)]
    text = reason(analysis, records, "bf16_stochastic", bf16_stochastic=probe)
    assert "stochastic rounding of the weights" not in text
