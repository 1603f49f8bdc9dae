"""Calls into a workload's own code, whose errors are the user's to read in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from harness.workloads.base import Workload
from harness.workloads.custom import located


@contextlib.contextmanager
def code_of(workload: Workload, what: str) -> Iterator[None]:
    """Turn whatever the workload's code raises inside into one line that says where.

    Raises:
        ValueError: `WHAT raised: FILE line N: Type: message`; the line is the innermost one of
            the user's own file, and left out for a built-in workload.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        source = getattr(workload, "source", None)
        raise ValueError(f"{what} raised: {located(error, source)}") from error
