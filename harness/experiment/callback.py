"""Where Hydra hands a sweep over: before its first run and after its last."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from harness.cli import COMMAND_VARIABLE, EXIT_USAGE, USER_ERRORS
from harness.config import ConfigError
from harness.error_text import one_line

if TYPE_CHECKING:
    from harness.experiment.live import LiveExperiment


class ExperimentCallback(Callback):
    """Plan the experiment before the first run and conclude it after the last.

    Hydra turns an exception of a callback into a warning and exit code 0, so every way out that
    is not a success is a `SystemExit` here. Workers receive a copy of this object: it carries no
    state there.
    """

    def __init__(self) -> None:
        self._live: LiveExperiment | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_live": None}

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check everything, say what will run, and give every run the sweep's name."""
        try:
            from harness.experiment.grid import expand, takes_looks

            grid = expand(config)
            from harness.experiment.early_checks import check_early

            check_early(grid)
            from harness.experiment.live import LiveExperiment

            self._live = LiveExperiment.prepare(
                grid,
                sweep=sweep_name(str(config.hydra.runtime.choices.get("sweep", "pair"))),
                command=os.environ.get(COMMAND_VARIABLE, "python -m harness"),
                workers=num_workers(config.hydra.launcher.get("n_jobs", 1)),
            )
        except USER_ERRORS as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
            raise SystemExit(EXIT_USAGE) from None
        except Exception as error:  # Hydra would turn it into a warning and go on
            raise SystemExit(_unexpected(error)) from error
        OmegaConf.set_readonly(config.hydra, False)
        config.hydra.overrides.task.append(f"sweep_id={self._live.sweep_id}")
        if not takes_looks(config):  # another sweeper launches all at once, in ignorance of looks
            self._live.start()

    @property
    def live(self) -> LiveExperiment:
        """The experiment that goes on in this process, once its first run may start."""
        assert self._live is not None
        return self._live

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Analyze and report; a failure is a non-zero exit code."""
        try:
            code = self.live.conclude()
        except Exception as error:  # Hydra would turn it into a warning and exit code 0
            raise SystemExit(_unexpected(error)) from error
        if code:
            raise SystemExit(code)


def live_experiment(context: HydraContext) -> LiveExperiment:
    """Return the experiment that the callback of this application prepared.

    Raises:
        HydraException: It has no such callback.
    """
    for callback in context.callbacks.callbacks:
        if isinstance(callback, ExperimentCallback):
            return callback.live
    raise HydraException("hydra/sweeper=looks belongs to the precision harness: no experiment")


def sweep_name(choice: str) -> str:
    """Return a choice of the group `sweep` as part of a file's name: it may lie in a folder."""
    return choice.replace("/", "-")


def num_workers(n_jobs: int | None) -> int:
    """Return how many runs joblib does at once: -1 stands for one per core.

    Raises:
        ConfigError: 0 has no meaning.
    """
    from joblib import effective_n_jobs

    try:
        return int(effective_n_jobs(n_jobs))
    except ValueError:
        raise ConfigError(f"hydra.launcher.n_jobs={n_jobs}: not 0; -1 is one per core") from None


def _unexpected(error: Exception) -> int:
    from harness.cli import EXIT_FAILED, TRACEBACK_VARIABLE

    if os.environ.get(TRACEBACK_VARIABLE):
        import traceback

        traceback.print_exception(error)
    kind = type(error).__name__
    print(f"error: {kind}: {one_line(error)} ({TRACEBACK_VARIABLE}=1 shows where)", file=sys.stderr)
    return EXIT_FAILED
