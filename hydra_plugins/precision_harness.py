"""The Hydra sweeper `looks`: runs go out in looks, and only what is undecided goes on.

Hydra instantiates sweepers of the namespace package `hydra_plugins` alone, and imports what lies
here in every Hydra application of the environment: so nothing of the harness is imported before a
sweep starts.
"""

from __future__ import annotations

from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LooksSweeper(Sweeper):
    """Launches what the experiment asks for, batch after batch, until it asks for nothing.

    The experiment has expanded the grid and composed each of its choices when the callback
    prepared it, so nothing is expanded or validated a second time here. Works with any launcher.

    Args:
        params: The sweep's parameters, as for Hydra's basic sweeper. Without `seed` among them or
            on the command line, seeds are taken in looks.
    """

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = params
        self.hydra_context: HydraContext | None = None
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what Hydra hands over and make the launcher."""
        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Launch the batches of the experiment; `arguments` are in its grid already.

        Returns:
            What the launcher returned, one sequence per batch.

        Raises:
            HydraException: The application has no experiment (it is not the harness).
            Exception: What a job raised; a run in trouble is a record and raises nothing.
        """
        from harness.experiment.callback import live_experiment

        assert self.hydra_context is not None
        assert self.launcher is not None
        returned: list[Any] = []
        num_launched = 0
        for jobs in live_experiment(self.hydra_context).batches():
            results = self.launcher.launch(jobs, initial_job_idx=num_launched)
            for result in results:
                _ = result.return_value  # raises what the job raised
            num_launched += len(jobs)
            returned.append(results)
        return returned
