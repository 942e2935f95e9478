"""What the tests of the world have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of failures are not logged, and torch has one thread, as all simulated ones have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)
