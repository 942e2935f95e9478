"""One fork server for all fault tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults.forker import Forker


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """Forks children that have torch loaded; see `forker.py`."""
    server = Forker()
    yield server
    server.close()
