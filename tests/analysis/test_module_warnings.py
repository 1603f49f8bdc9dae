"""The module that is to blame is found in runs that fail as people reported it; controls name none.

Each record imitates what the probes store of one public failure; the names are those of its model.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from factories import (
    POLICIES,
    diverged,
    make_grid,
    make_same_point,
    with_final,
    with_norms,
    with_probe,
)

from harness.analysis.findings import Verdict
from harness.precision.policy import LossScaleSettings, PrecisionPolicy
from harness.runs.same_point.record import ModuleError

SCALED = LossScaleSettings(kind="dynamic")
FP16_ALL = PrecisionPolicy(
    name="fp16_all_ops", compute_format="fp16", low_precision_ops=("all",), loss_scale=SCALED
)
HARM = {"offset": 0.5, "luck": 0.001}
BENIGN = {"luck": 0.001}


def error(module: str, local: float | None = 1e-3, **fields: Any) -> ModuleError:
    return ModuleError(module=module, kind="Linear", local_forward_error=local, **fields)


def message(verdict: Verdict, code: str) -> str:
    (found,) = [reason.message for reason in verdict.reasons if reason.code == code]
    return found


def grid(policy: str, how: dict[str, Any], change: Any = None, reference: Any = None) -> list[Any]:
    """Return FP32 and one candidate, each changed by a function of the record."""
    same = {"fp32": reference or (lambda r: r), policy: change or (lambda r: r)}
    return [same[r.policy](r) for r in make_grid({"fp32": {}, policy: how})]


def overflowing_norm(record: Any) -> Any:
    """A norm that squares in FP16: inf inside, zeros out, nothing flows back through it."""
    record = with_norms(
        record,
        inp={"grad_zero_share": 1.0, "output_zero_share": 0.0},
        norm={"grad_zero_share": 1.0, "output_zero_share": 1.0},
        head={"grad_zero_share": 0.1, "output_zero_share": 0.0},
    )
    rows = [{"module": "norm", "op": "aten::pow.x", "direction": "forward", "format": "fp16"}]
    return with_probe(record, "audit", {"nonfinite": rows, "rows": []})


def sound_norm(record: Any) -> Any:
    quiet = {"grad_zero_share": 0.0, "output_zero_share": 0.0}
    return with_norms(record, inp=quiet, norm=quiet, head=quiet)


def test_a_layer_that_goes_dead_without_nan(analysis: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(POLICIES, "fp16_all_ops", FP16_ALL)
    verdict = analysis.verdict(
        grid("fp16_all_ops", HARM, overflowing_norm, sound_norm), "fp16_all_ops"
    )
    assert verdict.outcome == "reject"
    assert message(verdict, "DEAD_GRADIENTS") == (
        "Gradients of `inp` and `norm` are all zero; FP32: none."
    )
    assert message(verdict, "ZERO_OUTPUTS") == "`norm` puts out only zeros; under FP32 not so."
    assert message(verdict, "NONFINITE_INSIDE").startswith(
        "Inside `norm` the output of pow in FP16 is not finite though its inputs are"
    )
    assert verdict.guilty_module == "norm"
    assert verdict.guilty_sentence == (
        "look at `norm`: the output of pow in FP16 is not finite though its inputs are."
    )
    assert verdict.modules[0].module == "norm"


def test_the_dead_layer_is_found_from_its_zeros_alone(analysis: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(POLICIES, "fp16_all_ops", FP16_ALL)

    def without_audit(record: Any) -> Any:
        return with_probe(overflowing_norm(record), "audit", {})

    records = grid("fp16_all_ops", HARM, without_audit, sound_norm)
    verdict = analysis.verdict(records, "fp16_all_ops")
    assert verdict.guilty_module == "norm"
    assert "puts out only zeros" in verdict.guilty_sentence


def test_what_overflows_under_fp32_as_well_is_no_finding(analysis: Any) -> None:
    def with_row(record: Any) -> Any:
        row = {"module": "a", "op": "aten::log", "direction": "forward", "format": record.policy}
        return with_probe(record, "audit", {"nonfinite": [row]})

    verdict = analysis.verdict(grid("bf16", HARM, with_row, with_row))
    assert "NONFINITE_INSIDE" not in analysis.codes(verdict)


def test_a_scaler_that_calibrates_is_no_finding(analysis: Any) -> None:
    def with_row(record: Any) -> Any:
        row = {"module": "a", "op": "aten::mm", "direction": "backward", "format": "fp16"}
        return with_probe(record, "audit", {"nonfinite": [row]})

    for policy, told in (("fp16", False), ("fp16_unscaled", True)):
        verdict = analysis.verdict(grid(policy, HARM, with_row), policy)
        assert ("NONFINITE_INSIDE" in analysis.codes(verdict)) is told


def test_distances_by_expansion(analysis: Any) -> None:
    """One module's own error is orders above the others'; what follows it only shows it."""
    modules = [
        error("(model)", 1.1, gradient_error=1.0),
        error("dist", 0.139),
        error("f", 3e-4),
        error("f.0", 4e-4, gradient_error=1.3, noise_ratio=40.0),
        error("f.1", 0.0),
        error("f.2", 2e-4, gradient_error=0.9, noise_ratio=20.0),
    ]
    probe = make_same_point("tf32", modules=modules, nu=9.0)
    findings = analysis.findings(grid("tf32", HARM), same_point={"tf32": probe})
    (verdict,) = findings.verdicts
    assert message(verdict, "MODULE_ERROR") == (
        "Given FP32's own input, the output of `dist` is off by 14 %; the other modules' by at "
        "most 0.04 %."
    )
    assert verdict.guilty_module == "dist"
    assert verdict.modules[0].module == "dist"
    (text,) = [r for r in findings.choice.reasons if r.startswith("tf32 is rejected")]
    assert "keeping `dist` in FP32 (policy=tf32 policy.fp32_modules=[dist])" in text


def test_rounded_timesteps(analysis: Any) -> None:
    """The module that gets the numbers is named; keeping it in FP32 is not offered: too late."""
    modules = [
        error("(model)", 0.6),
        error("inp", 2e-3),
        error("t_embed", 0.0, integer_input_max=999.0),
        error("t_proj", 2e-3, noise_ratio=3.0),
    ]
    probe = make_same_point("bf16", modules=modules, nu=2.0)
    findings = analysis.findings(grid("bf16", HARM), same_point={"bf16": probe})
    (verdict,) = findings.verdicts
    text = message(verdict, "INTEGERS_ROUNDED")
    assert "Whole numbers up to 999 (positions, timesteps) reach `t_embed`" in text
    assert "those above 256 are not exact in BF16" in text
    assert verdict.guilty_module == "t_embed"
    (said,) = [r for r in findings.choice.reasons if r.startswith("bf16 is rejected")]
    assert "It points to carrying those whole numbers in FP32 up to where they are used." in said


def test_numbers_that_the_format_holds_are_no_finding(analysis: Any) -> None:
    modules = [error("(model)"), error("t_embed", 0.0, integer_input_max=999.0)]
    probe = make_same_point("fp16", modules=modules)
    verdict = analysis.verdict(grid("fp16", BENIGN), "fp16", same_point=probe)
    assert "INTEGERS_ROUNDED" not in analysis.codes(verdict)


def test_clipping_before_unscaling_shows_in_the_size_of_updates(analysis: Any) -> None:
    def sized(size: float) -> Any:
        return lambda r: with_norms(
            r, a={"update_to_weight": 1e-3 * size}, b={"update_to_weight": 4e-3 * size}
        )

    verdict = analysis.verdict(grid("fp16", HARM, sized(2.0**-16), sized(1.0)), "fp16")
    assert message(verdict, "UPDATE_RATIO") == (
        "Updates, relative to the weights, are 1.53e-05 times FP32's."
    )
    # It concerns every module, so none is named.
    assert verdict.guilty_module is None
    calm = analysis.verdict(grid("fp16", BENIGN, sized(1.3), sized(1.0)), "fp16")
    assert "UPDATE_RATIO" not in analysis.codes(calm)


def lost(share: float) -> Any:
    rows = {"updates": [100, 100], "lost_bf16": [100 * share, 100 * share]}
    return lambda r: with_probe(
        with_norms(r, **{"0": {"update_to_weight": 3e-4}}),
        "lost_updates",
        {"steps": [0, 5], "modules": {"0": rows, "2": {**rows, "lost_bf16": [99, 99]}}},
    )


def test_stalled_weights_say_where_and_how_small_the_updates_are(analysis: Any) -> None:
    def stalled(record: Any) -> Any:
        sampled = {**record.sampled, "lost_update_bf16": record.sampled["update_total"]}
        changed = lost(0.9)(record)
        return type(record)(**{**vars(changed), "sampled": sampled})

    verdict = analysis.verdict(grid("bf16_pure", HARM, stalled, lost(0.0)), "bf16_pure")
    text = message(verdict, "LOST_UPDATES")
    assert "most in `2` (99 %)" in text
    assert "FP32's are 0.0003 of the weights, below half the spacing of BF16 (0.00195)" in text
    # All modules lose alike.
    assert verdict.guilty_module is None


def test_triage_stands_first_and_names_the_module(analysis: Any) -> None:
    found = {
        "trigger": "nonfinite_loss",
        "step": 0,
        "cause": "layer",
        "module": "ff.wo",
        "sentence": "step 0: output of `ff.wo` reached 71,300 > 65,504; FP32 max 9.8e4",
    }

    def broken(record: Any) -> Any:
        return with_probe(diverged(record), "triage", found)

    findings = analysis.findings(grid("fp16", {}, broken))
    (verdict,) = findings.verdicts
    assert verdict.main_reason.code == "NONFINITE"
    assert next(r.code for r in verdict.reasons if r.kind == "warning") == "TRIAGE"
    assert verdict.triage == found
    assert verdict.guilty_module == "ff.wo"
    assert verdict.guilty_sentence == (
        "look at `ff.wo`: step 0: output of `ff.wo` reached 71,300 > 65,504; FP32 max 9.8e4."
    )
    (text,) = [r for r in findings.choice.reasons if r.startswith("fp16 is rejected")]
    assert "Step 0: output of `ff.wo` reached 71,300 > 65,504" in text


def test_a_reference_in_trouble_says_where(analysis: Any) -> None:
    def broken(record: Any) -> Any:
        return with_probe(
            diverged(record), "triage", {"sentence": "step 3: the learning rate is too high"}
        )

    findings = analysis.findings(grid("bf16", {}, broken, broken))
    (verdict,) = findings.verdicts
    assert verdict.main_reason.code == "REFERENCE_UNSTABLE"
    assert verdict.guilty_module is None
    (note,) = [c.message for c in findings.caveats if c.code == "TRIAGE"]
    assert note == "In the FP32 reference itself: Step 3: the learning rate is too high."


@pytest.mark.parametrize("how", ["accept", "unprobed"])
def test_controls_have_no_guilty_module_and_no_warning(analysis: Any, how: str) -> None:
    quiet = {
        "grad_zero_share": 0.3,
        "output_zero_share": 0.4,
        "update_to_weight": 1e-3,
        "attention_logit_max": 3.0,
    }

    def with_all(record: Any) -> Any:
        return with_norms(record, a=quiet, a__b=quiet)

    modules = [error("(model)", 8e-3, noise_ratio=1e-3), error("a", 5e-3), error("a.b", 2e-3)]
    probe = make_same_point(modules=modules, nu=1e-3) if how == "accept" else None
    verdict = analysis.verdict(grid("bf16", BENIGN, with_all, with_all), same_point=probe)
    assert verdict.outcome == "accept"
    assert (verdict.guilty_module, verdict.guilty_sentence) == (None, None)
    assert [r.code for r in verdict.reasons if r.kind == "warning"] == []
    assert all(m.suspicion < 1 for m in verdict.modules)


def test_an_output_that_is_not_finite_is_the_worst_error(analysis: Any) -> None:
    modules = [error("(model)", math.inf), error("ff", math.inf), error("ff.wo", math.inf)]
    probe = make_same_point("fp16", modules=modules)
    verdict = analysis.verdict(grid("fp16", HARM), "fp16", same_point=probe)
    assert message(verdict, "MODULE_ERROR").endswith("the output of `ff.wo` is not finite.")
    assert verdict.guilty_module == "ff.wo"


def test_growing_attention_logits(analysis: Any) -> None:
    def logits(size: float) -> Any:
        return lambda r: with_norms(r, attn={"attention_logit_max": size})

    verdict = analysis.verdict(grid("bf16", BENIGN, logits(300.0), logits(40.0)))
    assert message(verdict, "ATTENTION_LOGITS") == (
        "Attention logits of `attn` reach 300; 40 under FP32."
    )
    verdict = analysis.verdict(grid("bf16", BENIGN, logits(50.0), logits(40.0)))
    assert "ATTENTION_LOGITS" not in analysis.codes(verdict)


def test_memory_and_poisoned_buffers(analysis: Any) -> None:
    def with_memory(record: Any) -> Any:
        record = with_probe(record, "memory", {"largest": "Adam's state is 60 % of it."})
        return with_final(record, nonfinite_buffers=64.0)

    verdict = analysis.verdict(grid("fp16", BENIGN, with_memory), "fp16")
    assert verdict.memory_note == "Adam's state is 60 % of it."
    assert "NONFINITE" in analysis.codes(verdict)
