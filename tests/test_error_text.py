"""Errors of Hydra in the user's own terms: one line, the closest setting, no internals."""

from __future__ import annotations

import pytest
from hydra.errors import HydraException

from harness.config import UnknownSettingError
from harness.error_text import known_settings, one_line, unknown_setting


def test_lists_of_choices_become_one_line_without_search_paths():
    error = HydraException(
        "Could not find 'policy/x'\n\nAvailable options in 'policy':\n\ta\n\tb\n"
        "Config search path:\n\tprovider=hydra, path=pkg://hydra.conf"
    )
    assert one_line(error) == "Could not find 'policy/x'. Available options in 'policy': a, b"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("polcy", "did you mean policy"),
        ("train.step", "did you mean train.steps"),
        ("workload.widht", "did you mean workload.width"),
        ("decision.alhpa", "did you mean decision.alpha"),
        ("qqq", "--help lists the settings"),
        ("workload.file", "workload.file needs workload=custom"),
    ],
)
def test_an_unknown_setting_names_the_closest(name, hint):
    assert hint in unknown_setting(name)


def test_a_sweep_without_its_plus_is_shown_with_it():
    error = HydraException(
        "Could not override 'sweep'. No match in the defaults list.\n"
        "To append to your default list use +sweep=precision"
    )
    assert one_line(error) == "write +sweep=precision, with the plus sign"


def test_advice_to_force_a_setting_is_not_passed_on():
    error = HydraException(
        "Could not override 'train.step'.\nTo append to your config use +train.step=5"
    )
    assert "+train.step" not in one_line(error)
    assert one_line(error) == one_line(UnknownSettingError("train.step"))


@pytest.mark.parametrize(
    ("given", "hint"), [("precision", "+sweep=precision?"), ("bf16", "a,b without spaces")]
)
def test_a_word_without_equals_is_explained(given, hint):
    error = HydraException(f"Error parsing override '{given}'\nmissing EQUAL at '<EOF>'")
    assert hint in one_line(error)


def test_an_unknown_field_of_a_policy_lists_the_known_ones():
    error = HydraException("In 'policy/mine': ConfigKeyError: Key 'autocst' not in 'PolicyConf'")
    assert one_line(error).startswith("In 'policy/mine': unknown field 'autocst'; known: name, ")
    close = HydraException("In 'policy/mine': Key 'fp32_module' not in 'PolicyConf'")
    assert one_line(close).endswith("did you mean fp32_modules?")


def test_settings_of_every_section_are_known():
    assert {"train.steps", "policy.loss_scale.kind", "workload.text", "decision.alpha"} <= (
        known_settings()
    )
