"""A run goes on whatever happens once: to one rank at about every operation, to three and four at many."""

from __future__ import annotations

import itertools

import pytest
from evidence import Record
from world.cases import every_script, may_happen, once, some, wrong_in
from world.scripts import SCRIPTS
from world.storages import KINDS as STORAGES
from world.trouble import KINDS

#: How many lives there are of each kind of trouble; a life with something between hosts takes longest.
OF_ONE, OF_MANY, ON_HOSTS = 40, 12, 4
#: The hosts of three and four ranks, and what they do.
MANY = [*itertools.product(("aab", "abc", "abba"), ("train", "goes_on")), ("aaa", "memory"), ("aaaa", "memory")]
MANY += [(hosts, "peers") for hosts in ("ab", "aab", "abc", "abba", "abcd")]
MANY += itertools.product(("a", "ab", "aab", "abc", "abba"), ("folders", "uploads"))
CASES = [
    (storage, hosts, script, kind)
    for (hosts, script), storage, kind in itertools.product(MANY, STORAGES, KINDS)
    if may_happen(kind, storage, hosts, script)
    and (storage == "disk" or script == "uploads" or "hosts" not in SCRIPTS[script].has)
]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("storage", "script", "kind"), [*every_script()])
def test_one_rank_goes_on_whatever_happens_once(storage: str, script: str, kind: str, record_property: Record) -> None:
    cases = [*once(kind, storage, "a", script, OF_ONE)]
    record_property("lives", len(cases))
    wrong = wrong_in(cases)
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("storage", "hosts", "script", "kind"), CASES)
def test_ranks_go_on_whatever_happens_once(
    storage: str, hosts: str, script: str, kind: str, record_property: Record
) -> None:
    cases = [*once(kind, storage, hosts, script, ON_HOSTS if "hosts" in SCRIPTS[script].has else OF_MANY)]
    record_property("lives", len(cases))
    wrong = wrong_in(cases)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("storage", ("disk", "mounted"))
@pytest.mark.parametrize("kind", ["power_cut", "answer_lost"])
def test_what_is_acknowledged_lasts(kind: str, storage: str) -> None:
    wrong = wrong_in(once(kind, storage, "a", "train", 10))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("storage", "hosts", "script", "kind"), some(CASES, 5))
def test_some_ranks_go_on_whatever_happens_once(storage: str, hosts: str, script: str, kind: str) -> None:
    wrong = wrong_in(once(kind, storage, hosts, script, 2))
    assert not wrong, "\n".join(wrong)
