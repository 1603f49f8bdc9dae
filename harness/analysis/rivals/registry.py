"""The rivals by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from harness.analysis.rivals.base import Rival
from harness.analysis.rivals.block_bootstrap import BlockBootstrap
from harness.analysis.rivals.last_step import LastStep
from harness.analysis.rivals.paired_t import PairedT
from harness.analysis.rivals.pointwise_band import PointwiseBand
from harness.analysis.rivals.relative_tail import RelativeTail
from harness.analysis.rivals.steps_to_target import StepsToTarget
from harness.analysis.rivals.ulp_envelope import UlpEnvelope
from harness.analysis.rivals.welch_t import WelchT

_ALL: tuple[Rival, ...] = (
    RelativeTail(),
    PointwiseBand(),
    UlpEnvelope(),
    PairedT(),
    WelchT(),
    BlockBootstrap(),
    StepsToTarget(),
    LastStep(),
)
RIVALS: Mapping[str, Rival] = MappingProxyType({rival.name: rival for rival in _ALL})
"""Name -> rule, in the order of `methods.RIVAL_NAMES`."""
