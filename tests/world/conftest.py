"""What the tests of the world have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Live worlds last: some of their files stay open with the process, and `select` takes no number above 1023."""
    items.sort(key=lambda item: _HERE in item.path.parents)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of failures are not logged, and torch has one thread, as all simulated ones have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)
