"""Shared by the tests of the analyzer."""

from __future__ import annotations

import pytest
from analyses import Analysis


@pytest.fixture
def analysis() -> Analysis:
    return Analysis()
