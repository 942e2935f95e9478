"""What the simulations of published weights have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from simulation.trained import Trained


@pytest.fixture(scope="session")
def trained() -> Trained:
    """The checkpoints whose weights are published."""
    return Trained()


@pytest.fixture
def quiet() -> Iterator[None]:
    """Thousands of failures are not logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
