"""Rules that others decide by, each as a plug-in of the analyzer; torch-free."""

from harness.analysis.rivals.base import Finding, Rival
from harness.analysis.rivals.registry import RIVALS

__all__ = ["RIVALS", "Finding", "Rival"]
