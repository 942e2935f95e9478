"""A run goes on whatever its jobs, people and troubles do, one after the other: histories that the seed chooses."""

from __future__ import annotations

import pytest
from evidence import Record
from world.cases import SEED, wandering, wrong_in
from world.scripts import MANY
from world.storages import KINDS as STORAGES
from world.world import Case

SCRIPTS = ("wander", "wander_best", "wander_frozen")
#: How many histories a test has, and how many tests there are of each script.
EACH, TESTS = 20, 12


def histories(script: str, first: int, count: int) -> list[Case]:
    """Histories of one to four ranks on each storage; other ones for each seed."""
    numbers = range(first, first + count)
    return [
        wandering(STORAGES[number % len(STORAGES)], MANY[number // 4 % len(MANY)], script, 10_000 * SEED + number)
        for number in numbers
    ]


@pytest.mark.parametrize(("number", "script"), [*enumerate(SCRIPTS)])
def test_any_history(number: int, script: str) -> None:
    wrong = wrong_in(histories(script, number, 1))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.turns(12)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("part", range(TESTS))
def test_any_further_history(part: int, script: str, record_property: Record) -> None:
    record_property("histories", EACH)
    wrong = wrong_in(histories(script, part * EACH, EACH))
    assert not wrong, "\n".join(wrong)
