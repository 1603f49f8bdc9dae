"""Who answers Ctrl-C: the process that was started, never its workers."""

from __future__ import annotations

import signal


def answer_interrupts() -> None:
    """Let Ctrl-C, and SIGTERM likewise, raise KeyboardInterrupt here.

    Said for SIGINT too: a shell starts what it puts in the background with SIGINT ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def leave_interrupts_to_the_parent() -> None:
    """Let a worker pass over Ctrl-C, which goes to the whole group, and end at SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
