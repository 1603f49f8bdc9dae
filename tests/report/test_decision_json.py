"""`decision.json`: schema, round trip with non-default values, strictness, the control's place."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import jsonschema
import numpy as np
import pytest
from report_samples import estimate, make_findings, make_verdict

from harness.analysis.findings import Choice, LookSummary, ModelFindings, Ratio, Reason, Savings
from harness.analysis.seed_plan import SeedPlan
from harness.report.decision_json import decision_document, decision_schema, decision_text


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = decision_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


_LOOK = LookSummary(
    index=2,
    of=3,
    pairs=5,
    alpha=0.015,
    settled=True,
    stop="accepted",
    sentence="Accepted.",
    intervals={"train": (-0.4, 0.1, 0.6), "held_out": (-0.5, math.nan, 0.7)},
)


def _full_findings() -> ModelFindings:
    """No field of any part has its default."""
    verdict = make_verdict(
        "bf16_fallback",
        "inconclusive",
        execution="emulated",
        step_time_ratio=Ratio(value=0.71, ci_low=0.69, ci_high=0.74),
        speed_note="alternating blocks",
        peak_memory_ratio=Ratio(value=0.9, ci_low=0.88, ci_high=0.93),
        seeds_dropped=(3,),
        extra_seeds=2,
        extra_seeds_reason="because",
        settle_command="python -m harness seed=0,1,2,3,4",
        lean="acceptable",
        lag_steps=1.5,
        p_reject=0.9,
        reasons=(Reason(code="A_CODE", message="m", value=1.0, threshold=2.0, kind="gate"),),
        min_detectable_harm={"train": 0.1},
        diagnostics={"zero_grad_share": (0.1, None)},
        look=_LOOK,
        looks=(dataclasses.replace(_LOOK, index=1, stop="went_on", settled=False), _LOOK),
        settle=("Seeds: 12 in all.",),
        accepting_margins={"train": 0.03, "held_out": 0.04},
        scope="the first 300 steps",
        failure_rate_note="a run failed",
        min_detectable_harm_note="too few",
    )
    return make_findings(
        verdict,
        make_verdict("fp32_twin", is_control=True),
        failed="the reference crashed",
        plan=SeedPlan(kind="looks", looks=(3, 6), alphas=(0.03, 0.02)),
        savings=Savings(
            runs=5,
            full_runs=18,
            seconds=2.5,
            full_seconds=9.0,
            by_policy={"bf16": 3, "fp32": 2},
            sentence="5 of 18 runs were not needed.",
        ),
    )


def test_every_sample_satisfies_the_schema(validator: Any, written: Any) -> None:
    for findings in (written.findings, _full_findings(), make_findings()):
        document = json.loads(decision_text(findings))
        validator.validate(document)


def test_values_come_through_unchanged() -> None:
    findings = _full_findings()
    document = json.loads(decision_text(findings))
    verdict = findings.verdicts[0]
    stored = document["verdicts"][0]
    for name in ("policy", "outcome", "execution", "extra_seeds", "extra_seeds_reason", "lean"):
        assert stored[name] == getattr(verdict, name)
    for name in ("settle_command", "lag_steps", "p_accept", "p_accept_holm", "p_reject"):
        assert stored[name] == getattr(verdict, name)
    assert stored["failure_rate_bound"] == verdict.failure_rate_bound
    assert stored["seeds_used"] == [0, 1, 2]
    assert stored["seeds_dropped"] == [3]
    assert stored["step_time_ratio"] == 0.71
    assert stored["step_time_ratio_ci"] == [0.69, 0.74]
    assert stored["peak_memory_ratio"] == 0.9
    assert stored["peak_memory_ratio_ci"] == [0.88, 0.93]
    assert stored["speed_note"] == "alternating blocks"
    assert stored["min_detectable_harm"] == {"train": 0.1}
    assert stored["diagnostics"] == {"zero_grad_share": {"candidate": 0.1, "reference": None}}
    assert stored["reasons"] == [dataclasses.asdict(verdict.reasons[0])]
    wanted = dataclasses.asdict(verdict.estimates["train"])
    assert stored["estimates"]["train"] == {**wanted, "differences": list(wanted["differences"])}
    assert stored["look"] == stored["looks"][1]
    assert [look["stop"] for look in stored["looks"]] == ["went_on", "accepted"]
    wanted_look = {**dataclasses.asdict(_LOOK), "intervals": stored["look"]["intervals"]}
    assert stored["look"] == wanted_look
    assert stored["look"]["intervals"]["train"] == {"low": -0.4, "mean": 0.1, "high": 0.6}
    assert stored["look"]["intervals"]["held_out"]["mean"] is None
    for name in ("scope", "failure_rate_note", "min_detectable_harm_note", "accepting_margins"):
        assert stored[name] == getattr(verdict, name)
    assert stored["settle"] == list(verdict.settle)
    assert document["plan"] == {"kind": "looks", "looks": [3, 6], "alphas": [0.03, 0.02]}
    assert document["savings"] == dataclasses.asdict(findings.savings)
    assert document["chosen_policy"] == "bf16"
    assert document["failed"] == "the reference crashed"
    assert document["rule"] == findings.rule
    assert document["environment"] == findings.environment


def test_no_field_of_the_findings_is_forgotten() -> None:
    """A field added to the findings must appear in the file."""
    document = decision_document(_full_findings())
    known = {f.name for f in dataclasses.fields(ModelFindings)}
    assert known <= set(document)
    verdict = document["verdicts"][0]
    fields = {f.name for f in dataclasses.fields(make_verdict())} - {"is_control"}
    assert fields <= set(verdict)


def test_the_control_is_apart_and_without_a_judgement() -> None:
    document = decision_document(_full_findings())
    assert [v["policy"] for v in document["verdicts"]] == ["bf16_fallback"]
    assert [v["policy"] for v in document["controls"]] == ["fp32_twin"]
    assert not {"outcome", "lean", "extra_seeds"} & set(document["controls"][0])


def test_non_finite_numbers_become_null(validator: Any) -> None:
    bad = dataclasses.replace(
        estimate((1.0, 2.0)),
        mean_difference=math.nan,
        ci_low=-math.inf,
        differences=(math.inf, 1.0),
        margin=np.float64(0.5),
    )
    reason = Reason(code="NONFINITE", message="m", value=math.nan)
    findings = make_findings(
        make_verdict(estimates={"train": bad}, reasons=(reason,)),
        environment={"loss": math.inf, "count": np.int64(3)},
    )
    written_text = decision_text(findings)
    assert "NaN" not in written_text
    assert "Infinity" not in written_text
    document = json.loads(written_text)
    validator.validate(document)
    train = document["verdicts"][0]["estimates"]["train"]
    assert train["mean_difference"] is None
    assert train["ci_low"] is None
    assert train["differences"] == [None, 1.0]
    assert train["margin"] == 0.5
    assert document["environment"] == {"loss": None, "count": 3}


def test_no_choice_is_null(validator: Any) -> None:
    choice = Choice(policy=None, sentence="Cannot say.", speed_basis="assumed, not measured")
    document = decision_document(make_findings(choice=choice))
    validator.validate(document)
    assert document["chosen_policy"] is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("verdicts", 0, "outcome"), "maybe"),
        (("verdicts", 0, "execution"), "both"),
        (("verdicts", 0, "extra_seeds"), 1.5),
        (("verdicts", 0, "surprise"), 1),
        (("verdicts", 0, "estimates", "other"), {}),
        (("controls", 0, "outcome"), "accept"),
        (("schema_version",), 2),
        (("surprise",), 1),
    ],
)
def test_the_schema_refuses(validator: Any, path: tuple[Any, ...], value: Any) -> None:
    """Planted faults: a schema that takes everything proves nothing."""
    document = copy.deepcopy(decision_document(_full_findings()))
    target = document
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    assert not validator.is_valid(document)


@pytest.mark.parametrize("key", ["verdicts", "chosen_policy", "caveats", "environment"])
def test_the_schema_requires(validator: Any, key: str) -> None:
    document = decision_document(_full_findings())
    del document[key]
    assert not validator.is_valid(document)
