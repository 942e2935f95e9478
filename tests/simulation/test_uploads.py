"""Uploads from the folders of several hosts: a checkpoint is in the target whole or not, whatever happens to a host."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from evidence import Record
from parted import save_on_hosts
from simulation.uploads import NAMES, TROUBLES, Crew, read_folders
from strides import STRIDE_OFFSET, in_turn

PAIRS = [*itertools.product(TROUBLES, repeat=2)]
#: Numbers of hosts; pairs of troubles happen to three.
WORLDS = (1, 2, 3, 4)
#: Of the operations of a host one has its turn, and then each one that is so many later.
STRIDE = 29


class Crews:
    """Makes crews."""

    def __init__(self, folders: dict[str, dict[str, bytes]]) -> None:
        self._folders, self.hosts = folders, (*folders,)
        self.operations = dict[bool, Counter[str]]()
        for atomic_rename in (True, False):
            crew = Crew(folders, atomic_rename)
            wrong = crew.violations(ended=crew.run())
            assert not wrong and not crew.failed, (wrong, crew.failed)
            self.operations[atomic_rename] = crew.operations

    def wrong(self, atomic_rename: bool, troubles: dict[tuple[str, int], str]) -> list[str]:
        """What is wrong when these things happen."""
        crew = Crew(self._folders, atomic_rename, troubles)
        return [f"{atomic_rename} {troubles}: {text}" for text in crew.violations(ended=crew.run())]


class Worlds:
    """Makes them for so many hosts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = dict[int, Crews]()

    def of(self, hosts: int) -> Crews:
        if hosts not in self._made:
            folder = self._folder / str(hosts)
            save_on_hosts(folder, NAMES[:hosts], 1, 2)
            self._made[hosts] = Crews(read_folders(folder))
        return self._made[hosts]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    logging.disable(logging.CRITICAL)
    yield Worlds(tmp_path_factory.mktemp("hosts"))
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "hosts"), in_turn(itertools.product(TROUBLES, WORLDS), 11))
def test_an_upload_gets_there_whole_or_not_whatever_happens_to_a_host(
    worlds: Worlds, kind: str, hosts: int, record_property: Record
) -> None:
    wrong, lives, crews = [], 0, worlds.of(hosts)
    for atomic_rename, host in itertools.product((True, False), crews.hosts):
        for number in range(1 + STRIDE_OFFSET % STRIDE, crews.operations[atomic_rename][host], STRIDE):
            wrong += crews.wrong(atomic_rename, {(host, number): kind})
            lives += 1
    record_property("uploads", lives)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("first", "second"), in_turn(PAIRS, len(PAIRS), [pytest.mark.slow]))
def test_an_upload_gets_there_whole_or_not_whatever_happens_twice(
    worlds: Worlds, first: str, second: str, record_property: Record
) -> None:
    wrong, crews = list[str](), worlds.of(3)
    chosen = random.Random(f"{first} {second} {STRIDE_OFFSET}")
    for atomic_rename, one, other in itertools.product((True, False), crews.hosts, crews.hosts):
        for _ in range(4):
            operations = crews.operations[atomic_rename]
            here, there = chosen.randrange(1, operations[one]), chosen.randrange(1, operations[other])
            wrong += crews.wrong(atomic_rename, {(one, here): first, (other, there + (one == other) * here): second})
    record_property("uploads", 72)
    assert not wrong, "\n".join(wrong)
