"""One fork server for all fault tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from forker import Forker


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """Forks children that have torch loaded; see `forker.py`."""
    server = Forker(["faults.workloads"], adopts=True)
    yield server
    server.close()
