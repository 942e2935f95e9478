"""A run of two ranks goes on whatever happens twice: each pair of troubles, at some places."""

from __future__ import annotations

import itertools

import pytest
from evidence import Record
from world.cases import SEED, some, twice, wrong_in
from world.storages import KINDS as STORAGES
from world.trouble import KINDS

#: How many lives there are of each pair, on each storage.
LIVES = 3
PAIRS = [*itertools.product(KINDS, repeat=2)]
#: Which ranks are on which hosts, where there is something between these.
ON_HOSTS = ("ab", "aab", "abc")
SCRIPTS = ("train", "goes_on", "tries_again", "shared", "best", "damaged", "rewind")


def wrong_in_pair(first: str, second: str, lives: int) -> list[str]:
    """What is wrong in lives of two ranks, on one host or on two."""
    wrong = list[str]()
    for number, storage in enumerate(STORAGES):
        turn = SEED + number + PAIRS.index((first, second))
        script, hosts = SCRIPTS[turn % len(SCRIPTS)], ("ab", "aa")[turn % 2]
        wrong += wrong_in(twice(first, second, storage, hosts, script, lives))
    wrong += wrong_in(twice(first, second, "disk", "aa", "memory", lives))
    hosts = ON_HOSTS[(SEED + PAIRS.index((first, second))) % len(ON_HOSTS)]
    for script in ("peers", "folders", "uploads"):
        wrong += wrong_in(twice(first, second, "disk", hosts, script, 1))
    return wrong


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_ranks_go_on_whatever_happens_twice(first: str, second: str, record_property: Record) -> None:
    record_property("lives", LIVES * len(STORAGES))
    wrong = wrong_in_pair(first, second, LIVES)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("first", "second"), some(PAIRS, 2))
def test_some_ranks_go_on_whatever_happens_twice(first: str, second: str) -> None:
    wrong = wrong_in_pair(first, second, 1)
    assert not wrong, "\n".join(wrong)
