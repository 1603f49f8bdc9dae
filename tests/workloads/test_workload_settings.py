"""Settings are strict: every wrong key, type and range is one line that names it."""

import subprocess
import sys

import pytest

from harness.workloads.settings import CharGptSettings, CustomSettings, read_settings


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, r"workload\.kind='None'.*char_gpt, digits_convnet, custom"),
        ({"kind": "gpt"}, r"workload\.kind='gpt'"),
        ({"kind": "char_gpt", "num_layer": 2}, r"workload\.num_layer .*did you mean num_layers"),
        ({"kind": "char_gpt", "zzz": 2}, r"workload\.zzz .*has batch_size, betas"),
        ({"kind": "char_gpt", "num_layers": 2.0}, r"workload\.num_layers=2\.0.*whole number"),
        ({"kind": "char_gpt", "num_layers": True}, r"workload\.num_layers=True"),
        ({"kind": "char_gpt", "num_layers": None}, r"workload\.num_layers=None"),
        ({"kind": "char_gpt", "num_layers": 0}, r"workload\.num_layers=0.*1 or more"),
        ({"kind": "char_gpt", "width": 66}, r"workload\.width=66.*num_heads"),
        ({"kind": "char_gpt", "peak_lr": "fast"}, r"workload\.peak_lr='fast'.*a number"),
        ({"kind": "char_gpt", "betas": [0.9]}, r"workload\.betas=\[0\.9\].*2 numbers"),
        ({"kind": "char_gpt", "betas": [0.9, 1.0]}, r"workload\.betas=\[0\.9, 1\.0\]"),
        ({"kind": "char_gpt", "tie_embeddings": 1}, r"workload\.tie_embeddings=1.*true or false"),
        ({"kind": "char_gpt", "name": " "}, r"workload\.name"),
        ({"kind": "digits_convnet", "steps": 0}, r"workload\.steps=0"),
        ({"kind": "digits_convnet", "dropout": 1.0}, r"workload\.dropout"),
        ({"kind": "digits_convnet", "text": "x"}, r"workload\.text is not a setting"),
        ({"kind": "digits_convnet", "clip": 0.0}, r"workload\.clip"),
        ({"kind": "custom"}, r"workload\.file=PATH\.py"),
        ({"kind": "custom", "file": "a.py", "module": "a"}, r"keep one"),
        ({"kind": "custom", "file": "a.py", "steps": 0}, r"workload\.steps=0"),
        ({"kind": "custom", "file": "a.py", "clip": -1}, r"workload\.clip=-1"),
    ],
)
def test_wrong_settings_are_named(data, says):
    with pytest.raises(ValueError, match=says) as caught:
        read_settings(data)
    assert "\n" not in str(caught.value)


def test_values_take_their_annotated_types():
    settings = read_settings({"kind": "char_gpt", "peak_lr": 1, "betas": [0, 0.5], "clip": None})
    assert isinstance(settings, CharGptSettings)
    assert (type(settings.peak_lr), settings.betas, settings.clip) == (float, (0.0, 0.5), None)
    assert settings.recorded()["betas"] == [0.0, 0.5]


def test_recorded_settings_have_no_folder_and_no_description():
    settings = CustomSettings(kind="custom", file="some/where/net.py", description="mine")
    assert settings.recorded()["file"] == "net.py"
    assert "description" not in settings.recorded()


def test_settings_and_seeds_are_read_without_torch():
    code = (
        "import sys, harness.workloads.registry as r\n"
        "r.read_settings({'kind': 'char_gpt'}); r.default_seeds({'kind': 'char_gpt'})\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
