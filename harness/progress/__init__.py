"""Progress of a sweep: workers write small heartbeat files, the parent draws what they say.

Files, since runs may live in other processes (joblib, Slurm) that share nothing but a folder. In a
terminal the display is a live one; elsewhere it is plain ASCII lines without control codes.
"""

from harness.progress.display import ProgressDisplay
from harness.progress.heartbeat import Beat, Heartbeat, read_beats
from harness.progress.state import SweepState, estimate_rest
from harness.progress.views import format_duration

__all__ = [
    "Beat",
    "Heartbeat",
    "ProgressDisplay",
    "SweepState",
    "estimate_rest",
    "format_duration",
    "read_beats",
]
