"""Names of modules: the owner of a parameter, and what a pattern matches."""

from __future__ import annotations

import pytest

from harness.precision.module_names import ROOT, matches, owner


def test_owner() -> None:
    assert owner("blocks.0.norm.weight") == "blocks.0.norm"
    assert owner("scale") == ROOT == "(model)"


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("norm", "blocks.0.norm", True),
        ("norm", "norm", True),
        ("norm", "blocks.norm.0", False),
        ("norm", "subnorm", False),
        ("blocks.*.attn", "net.blocks.3.attn", True),
        ("a.b.c", "b.c", False),
        ("re:net\\..*", "net.blocks.3", True),
        ("re:blocks", "net.blocks", False),
    ],
)
def test_patterns_match_from_the_end(pattern: str, module: str, expected: bool) -> None:
    assert matches(pattern, module) is expected
