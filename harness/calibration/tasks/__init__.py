"""Eight small trainings whose delicate computations can be replaced one by one."""

from harness.calibration.tasks.catalogue import TASKS, TaskInfo, make_task
from harness.calibration.tasks.hooks import OptimizerHook
from harness.calibration.tasks.seams import DEFAULTS, Seam
from harness.calibration.tasks.shards import ShardRule
from harness.calibration.tasks.task import Task

__all__ = [
    "DEFAULTS",
    "TASKS",
    "OptimizerHook",
    "Seam",
    "ShardRule",
    "Task",
    "TaskInfo",
    "make_task",
]
