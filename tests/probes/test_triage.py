"""Triage's two pure steps: seeing trouble in a run's series, and telling a cause from evidence.

Each cause is planted in otherwise healthy evidence, so that exactly one question is answered.
"""

from __future__ import annotations

import dataclasses
import math

import pytest

from harness.probes.triage import (
    FLUSHED,
    OVERFLOWED,
    Evidence,
    OpEvent,
    OutputSeen,
    Pass,
    Trouble,
    find_trouble,
)
from harness.probes.triage_diagnosis import diagnose
from harness.probes.triage_entry import diagnose_unmoved
from harness.probes.triage_places import number, place

NAN, INF = math.nan, math.inf


def trouble(losses, *, status="completed", fp32=False, final=None, sampled=None, **series):
    sampled_steps, counts = sampled or ((), {})
    return find_trouble(
        status=status,
        series={"loss": losses, **series},
        final=final or {},
        sampled_steps=sampled_steps,
        sampled=counts,
        computes_in_fp32=fp32,
    )


FALLING = [2.0 / (1 + step) for step in range(40)]


class TestFindTrouble:
    def test_a_healthy_run_has_none(self):
        skipped = [1, 1, *[0] * 38]
        assert (
            trouble(FALLING, skipped=skipped, loss_scale=[65536.0, 32768.0, *[16384.0] * 38])
            is None
        )
        assert trouble([1.0] * 40) is None
        assert trouble([0.5, 0.4, 0.6, 0.3, 0.5, 0.4]) is None
        assert trouble([]) is None

    def test_a_crash_is_not_its_business(self):
        assert trouble([NAN], status="crashed") is None

    def test_the_first_non_finite_loss(self):
        assert trouble([1.0, 0.9, INF, NAN]) == Trouble(trigger="nonfinite_loss", step=2)

    def test_a_non_finite_gradient_counts_only_without_a_scaler(self):
        bad = [0, 3, 0, 0]
        found = trouble([1.0, 0.9, 0.8, NAN], nonfinite_grad=bad, loss_scale=[1.0] * 4)
        assert found == Trouble(trigger="nonfinite_gradient", step=1)
        found = trouble(
            [1.0, 0.9, 0.8, NAN],
            nonfinite_grad=bad,
            loss_scale=[4.0, 4.0, 2.0, 2.0],
            skipped=[0, 1, 0, 0],
        )
        assert found == Trouble(trigger="nonfinite_loss", step=3)

    def test_the_calibration_of_a_scale_is_no_collapse(self):
        skips = 16
        scales = [2.0 ** (16 - k) for k in range(skips)] + [1.0] * 24
        skipped = [1] * skips + [0] * 24
        assert trouble(FALLING, loss_scale=scales, skipped=skipped) is None

    def test_a_scale_below_one_has_collapsed(self):
        scales = [2.0 ** (16 - k) for k in range(40)]
        found = trouble(FALLING, loss_scale=scales, skipped=[1] * 40)
        assert found == Trouble(trigger="loss_scale_collapse", step=17)

    def test_so_has_one_that_stops_at_its_floor(self):
        found = trouble(FALLING, loss_scale=[1.0] * 40, skipped=[0] * 10 + [1] * 30)
        assert found == Trouble(trigger="loss_scale_collapse", step=29)

    def test_buffers_come_before_the_loss_that_recovered(self):
        found = trouble([1.0, NAN, 0.8, 0.7], final={"nonfinite_buffers": 2.0})
        assert found == Trouble(trigger="nonfinite_buffers", step=None, suspects=(1,))

    def test_weights_without_another_sign(self):
        found = trouble(FALLING, final={"nonfinite_weights": 1.0})
        assert found is not None
        assert found.trigger == "nonfinite_weights"

    def test_a_loss_that_left_for_good(self):
        losses = FALLING[:20] + [0.1 * 1.6**k for k in range(20)]
        found = trouble(losses)
        assert found is not None
        assert found.trigger == "diverged"
        assert found.step is not None
        assert 25 < found.step < 38

    def test_it_is_looked_at_within_the_run_even_if_the_very_last_loss_is_low_again(self):
        losses = [*FALLING[:20], *[50.0] * 19, 0.1]
        assert trouble(losses) == Trouble(trigger="diverged", step=20)

    def test_mostly_zero_gradients_to_the_end(self):
        counts = {"grad_nonzero": [99, 10, 10, 10], "grad_total": [100] * 4}
        sampled = ((0, 5, 10, 15), counts)
        assert trouble(FALLING, sampled=sampled) == Trouble(trigger="zero_gradients", step=5)
        assert trouble(FALLING, sampled=sampled, fp32=True) is None
        # Not at a step whose gradient was not finite either.
        bad = [0] * 5 + [1] + [0] * 34
        found = trouble(FALLING, sampled=sampled, nonfinite_grad=bad, loss_scale=[2.0] * 40)
        assert found == Trouble(trigger="zero_gradients", step=10)

    def test_zeros_that_went_away_are_none(self):
        counts = {"grad_nonzero": [10, 99], "grad_total": [100] * 2}
        assert trouble(FALLING, sampled=((0, 5), counts)) is None

    def test_a_part_that_never_moved(self):
        final = {"unmoved_tensors": 1.0, "moved_weight_share": 0.9}
        assert trouble(FALLING, final=final) == Trouble(trigger="unmoved_weights", step=19)
        assert trouble(FALLING, final=final, fp32=True) is None


def event(**changes):
    values = {
        "module": "blocks.1.attention.scores",
        "direction": "forward",
        "op": "bmm",
        "format": "fp16",
        "kind": OVERFLOWED,
        "value": 71312.0,
        "finite_inputs": True,
        "fp32_max": 98412.0,
        "is_layer": True,
    }
    return OpEvent(**{**values, **changes})


HEALTHY = Pass(
    loss=1.0,
    gradient_finite=True,
    zero_shares={"a": 0.0, "b": 0.0},
    outputs={"a": OutputSeen(largest=3.0, zero_share=0.0)},
)


def evidence(**changes):
    values = {
        "step": 41,
        "reproduced": True,
        "scale": 1.0,
        "has_scaler": False,
        "learning_rate": 1e-3,
        "batch_max": 4.0,
        "earlier_batch_max": 4.5,
        "weights_max": 1.1,
        "first_weights_max": 1.0,
        "bad_weights": (),
        "first_loss": 2.0,
        "low": dataclasses.replace(HEALTHY, loss=NAN, events=(event(),)),
        "fp32": HEALTHY,
        "unscaled_finite": None,
        "bad_buffers": (),
    }
    return Evidence(**{**values, **changes})


LOSS = Trouble(trigger="nonfinite_loss", step=41)
ZEROS = Trouble(trigger="zero_gradients", step=41)


class TestDiagnose:
    def test_an_overflowing_layer_in_one_sentence(self):
        found = diagnose(LOSS, evidence())
        assert found["cause"] == "layer"
        assert found["sentence"] == (
            "step 41: output of `blocks.1.attention.scores` reached 71,300 > 65,504 (FP16); "
            "FP32 max 98,400"
        )
        assert (found["module"], found["op"], found["kind"]) == (
            "blocks.1.attention.scores",
            "bmm",
            "output of",
        )
        assert (found["value"], found["limit"], found["fp32_max"]) == (71312.0, 65504.0, 98412.0)

    def test_the_data_are_asked_first(self):
        found = diagnose(LOSS, evidence(batch_max=NAN, weights_max=1e9))
        assert found["cause"] == "data"
        assert "the batch itself holds NaN" in found["sentence"]
        found = diagnose(LOSS, evidence(batch_max=3e5, weights_max=1e9))
        assert found["cause"] == "data"
        assert "holds 300,000, 66,700 times the largest magnitude" in found["sentence"]
        assert "reached 71,300 > 65,504" in found["sentence"]
        assert diagnose(LOSS, evidence(batch_max=9.0))["cause"] == "layer"

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"fp32": dataclasses.replace(HEALTHY, loss=INF)}, "not finite in FP32 either"),
            ({"fp32": dataclasses.replace(HEALTHY, gradient_finite=False)}, "in FP32 either"),
            ({"fp32": dataclasses.replace(HEALTHY, loss=1e5)}, "50,000 times the first"),
            ({"weights_max": 400.0}, "grew from 1 to 400"),
            ({"fp32": None}, "no low format is to blame"),
        ],
    )
    def test_then_the_learning_rate(self, changes, words):
        found = diagnose(LOSS, evidence(**changes))
        assert found["cause"] == "learning_rate"
        assert words in found["sentence"]
        assert "learning rate of 0.001" in found["sentence"]

    def test_then_the_loss_scale(self):
        backward = event(direction="backward", op="mm")
        low = dataclasses.replace(HEALTHY, gradient_finite=False, events=(backward,))
        seen = evidence(low=low, scale=65536.0, has_scaler=True, unscaled_finite=True)
        found = diagnose(Trouble(trigger="loss_scale_collapse", step=41), seen)
        assert found["cause"] == "loss_scale"
        assert found["kind"] == "gradient of"
        assert "at loss scale 65,536" in found["sentence"]
        still_bad = dataclasses.replace(seen, unscaled_finite=False)
        assert diagnose(LOSS, still_bad)["cause"] == "layer"

    def test_weights_that_were_bad_before(self):
        low = dataclasses.replace(HEALTHY, loss=NAN, passed_on=event(finite_inputs=False))
        found = diagnose(LOSS, evidence(low=low, bad_weights=("head",)))
        assert found["cause"] == "layer"
        assert "weights of `head` are not finite" in found["sentence"]

    def test_an_infinity_inside_silences_a_layer(self):
        inside = event(module="norm", op="pow", value=1.2e7, is_layer=False, fp32_max=None)
        low = dataclasses.replace(
            HEALTHY,
            zero_shares={"inp": 1.0, "norm": 1.0, "head": 0.4},
            outputs={"norm": OutputSeen(largest=0.0, zero_share=1.0)},
            events=(inside,),
        )
        fp32 = dataclasses.replace(
            HEALTHY,
            zero_shares=dict.fromkeys(("inp", "norm", "head"), 0.0),
            outputs={"norm": OutputSeen(largest=2.9, zero_share=0.0)},
        )
        found = diagnose(ZEROS, evidence(low=low, fp32=fp32))
        assert (found["cause"], found["module"]) == ("silent", "norm")
        assert "output of `pow` inside `norm` reached 1.2e7 > 65,504 (FP16)" in found["sentence"]
        assert "output of `norm` is all zeros" in found["sentence"]
        assert "all gradients of `inp`, `norm` are exactly zero" in found["sentence"]

    def test_gradients_that_underflow_want_a_scale(self):
        flushed = event(direction="backward", op="mul", kind=FLUSHED, value=8e-9, module="f")
        low = dataclasses.replace(HEALTHY, zero_shares={"f": 1.0}, events=(flushed,))
        fp32 = dataclasses.replace(HEALTHY, zero_shares={"f": 0.0})
        found = diagnose(ZEROS, evidence(low=low, fp32=fp32))
        assert found["cause"] == "loss_scale"
        assert "flushed to zero: its FP32 maximum 8e-9" in found["sentence"]
        assert "5.96e-8" in found["sentence"]
        assert "no loss scale lifts it" in found["sentence"]

    def test_zeros_that_fp32_has_too_are_no_trouble(self):
        same = dataclasses.replace(HEALTHY, zero_shares={"table": 1.0})
        assert diagnose(ZEROS, evidence(low=same, fp32=same)) is None

    def test_a_run_that_did_not_repeat_itself_is_unknown(self):
        seen = evidence(low=HEALTHY, reproduced=False)
        found = diagnose(LOSS, seen)
        assert found["cause"] == "unknown"
        assert "did not give its losses again" in found["sentence"]

    def test_buffers_are_named(self):
        seen = evidence(bad_buffers=("bn.running_mean", "bn.running_var"))
        found = diagnose(Trouble(trigger="nonfinite_buffers", step=None), seen)
        assert "`bn.running_mean`, `bn.running_var` became non-finite" in found["sentence"]
        assert found["step"] == 41

    def test_weights_that_do_not_move(self):
        silent = Trouble(trigger="unmoved_weights", step=19)

        def told(shares, count=1, fmt="bf16"):
            return diagnose_unmoved(silent, shares, steps=20, count=count, format_name=fmt)

        assert told({}) is None
        assert told({"frozen": (0.0, 0.0), "moving": (0.6, 1.0)}) is None
        found = told({"head.bias": (1.0, 1.0), "target.weight": (0.0, 1.0)})
        assert (found["cause"], found["module"]) == ("silent", "target")
        assert found["sentence"] == (
            "1 parameter never moved; after 20 steps no element of "
            "`target.weight` moved, while all of them moved under FP32: their updates are lost in "
            "BF16 weights"
        )
        found = told({"a.b": (0.0, 0.3)}, 2, "fp32")
        assert found["sentence"].startswith("2 parameters never moved")
        assert "gradients are lost" in found["sentence"]

    def test_weights_that_hardly_move(self):
        """A slow average: elements near zero move, the others stay."""
        final = {"unmoved_tensors": 0.0, "moved_weight_share": 0.6}
        assert trouble(FALLING, final=final) == Trouble(trigger="unmoved_weights", step=19)
        assert trouble(FALLING, final={**final, "moved_weight_share": 0.99}) is None
        silent = Trouble(trigger="unmoved_weights", step=19)
        shares = {"target.0.weight": (0.02, 1.0), "target.0.bias": (0.0, 0.98)}
        found = diagnose_unmoved(silent, shares, steps=20, count=0, format_name="bf16")
        assert found["sentence"].startswith(
            "after 20 steps at most 2 % of the elements of `target.0.weight`, `target.0.bias` "
            "moved, while at least 98 % of them moved under FP32: "
        )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (65504.0, "65,504"),
        (71312.4, "71,300"),
        (65536.0, "65,536"),
        (57344.0, "57,344"),
        (9.8e8, "9.8e8"),
        (3.4028e38, "3.4e38"),
        (5.9604645e-08, "5.96e-8"),
        (448.0, "448"),
        (0.25, "0.25"),
        (0.0, "0"),
        (NAN, "NaN"),
        (INF, "infinite"),
        (None, "NaN"),
    ],
)
def test_numbers_read_as_a_person_writes_them(value, text):
    assert number(value) == text


def test_places_read_as_a_person_writes_them():
    assert place(event(module="ff.wo", op="mm")) == "output of `ff.wo`"
    inside = event(module="norm", op="pow", is_layer=False)
    assert place(inside) == "output of `pow` inside `norm`"
    back = event(module="f", op="convolution_backward", direction="backward")
    assert place(back) == "gradient inside `f` (`convolution`)"
    assert place(event(module=None, op="exp", is_layer=False)) == (
        "output of `exp` outside of every module"
    )
    assert place(event(op="_to_copy", module="stem")) == "a value cast to FP16 inside `stem`"
    rounded = event(op="rounding", module="head", format="fp8_e4m3", direction="backward")
    assert place(rounded) == "a gradient rounded to FP8 E4M3 inside `head`"
