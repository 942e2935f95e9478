"""A thousand versions, while publishers and receivers are killed, lose power, fail, and are damaged, again and again."""

from __future__ import annotations

import pytest
from evidence import Record
from simulation.published_history import PublishedHistory
from simulation.publishing import KINDS
from simulation.trained import Trained
from strides import STRIDE_OFFSET

#: In the soak, of all parts together. A part has its turn as other slow tests do.
VERSIONS, PARTS = 1_000, 10


pytestmark = pytest.mark.usefixtures("quiet")


def test_a_few_versions_and_all_that_may_happen(trained: Trained, record_property: Record) -> None:
    history = PublishedHistory(trained, KINDS[STRIDE_OFFSET % len(KINDS)], STRIDE_OFFSET)
    wrong = history.run(12)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(PARTS))
def test_versions_are_right_whatever_happens(number: int, trained: Trained, record_property: Record) -> None:
    """Disturbances have the numbers of operations one after the other, so in the end each one is disturbed."""
    versions = VERSIONS // PARTS
    history = PublishedHistory(trained, KINDS[number % len(KINDS)], STRIDE_OFFSET + number)
    wrong = history.run(versions)
    record_property("published versions", versions)
    assert not wrong, "\n".join(wrong)
