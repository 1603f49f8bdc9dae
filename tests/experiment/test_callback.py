"""What Hydra hands over, as the plan takes it."""

from __future__ import annotations

import joblib
import pytest

from harness.config import ConfigError
from harness.experiment.callback import num_workers, sweep_name
from harness.experiment.early_checks import SAFE_NAME


def test_workers_are_counted_as_joblib_counts_them():
    assert num_workers(3) == 3
    assert num_workers(None) == 1  # joblib's own default
    assert num_workers(-1) == joblib.cpu_count()
    with pytest.raises(ConfigError, match="n_jobs=0"):
        num_workers(0)


def test_a_sweep_in_a_folder_gives_a_plain_file_name():
    assert sweep_name("precision") == "precision"
    assert SAFE_NAME.fullmatch(sweep_name("team/quick"))
