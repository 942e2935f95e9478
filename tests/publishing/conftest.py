"""A source of published weights, and a folder that receives them."""

from __future__ import annotations

from pathlib import Path

import pytest
from published import Source


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A folder for versions."""
    return Source(tmp_path / "to")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder that does not exist yet, nor the one around it."""
    return str(tmp_path / "here" / "model")
