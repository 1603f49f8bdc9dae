"""From the settings of `conf/workload/*.yaml` to a workload; torch is imported to build one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.workloads import custom_file
from harness.workloads.settings import (
    CharGptSettings,
    CustomSettings,
    DigitsConvnetSettings,
    read_settings,
)

if TYPE_CHECKING:
    from harness.workloads.base import Workload


def make_workload(settings: Mapping[str, Any]) -> Workload:
    """Return the workload that the plain mapping of a composed `workload` section describes.

    Args:
        settings: `kind` chooses `char_gpt`, `digits_convnet` or `custom`; the other keys are the
            fields of that kind's settings.

    Raises:
        ValueError: A key is unknown, a value has the wrong type or is not allowed, the text or
            the user's file is missing or broken. One line, naming `workload.<key>` or the file.
    """
    checked = read_settings(settings)
    if isinstance(checked, CharGptSettings):
        from harness.workloads.char_gpt import CharGptWorkload

        return CharGptWorkload(checked)
    if isinstance(checked, DigitsConvnetSettings):
        from harness.workloads.digits_convnet import DigitsConvnetWorkload

        return DigitsConvnetWorkload(checked)
    from harness.workloads.custom import CustomWorkload

    assert isinstance(checked, CustomSettings)
    return CustomWorkload(checked)


def default_seeds(settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the `SEEDS` of the user's file without importing it, or None where there are none.

    Raises:
        ValueError: As `make_workload`, or `SEEDS` is not a sequence of whole numbers.
    """
    checked = read_settings(settings)
    if not isinstance(checked, CustomSettings):
        return None
    return custom_file.read_seeds(custom_file.find_source(checked.file, checked.module))
