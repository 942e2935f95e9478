"""Uploads from the folders of several hosts: a checkpoint is in the target whole or not, whatever happens to a host."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from evidence import Record
from parted import save_on_hosts
from simulation.uploads import HOSTS, TROUBLES, Crew, CrewPatches, read_folders
from strides import STRIDE_OFFSET, in_turn

PAIRS = [*itertools.product(TROUBLES, repeat=2)]
#: Of the operations of a host one has its turn, and then each one that is so many later.
STRIDE = 29


class Crews:
    """Makes crews."""

    def __init__(self, patches: CrewPatches, folders: dict[str, dict[str, bytes]]) -> None:
        self._patches, self._folders = patches, folders
        self.operations = dict[bool, Counter[str]]()
        for atomic_rename in (True, False):
            crew = Crew(patches, folders, atomic_rename)
            wrong = crew.violations(ended=crew.run())
            assert not wrong and not crew.failed, (wrong, crew.failed)
            self.operations[atomic_rename] = crew.operations

    def wrong(self, atomic_rename: bool, troubles: dict[tuple[str, int], str]) -> list[str]:
        """What is wrong when these things happen."""
        crew = Crew(self._patches, self._folders, atomic_rename, troubles)
        return [f"{atomic_rename} {troubles}: {text}" for text in crew.violations(ended=crew.run())]


@pytest.fixture(scope="module")
def crews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crews]:
    folder = tmp_path_factory.mktemp("hosts")
    save_on_hosts(folder, HOSTS, 1, 2)
    logging.disable(logging.CRITICAL)
    with CrewPatches() as patches:
        try:
            yield Crews(patches, read_folders(folder))
        finally:
            logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("kind", in_turn(TROUBLES, 3))
def test_an_upload_gets_there_whole_or_not_whatever_happens_to_a_host(
    crews: Crews, kind: str, record_property: Record
) -> None:
    wrong, lives = [], 0
    for atomic_rename, host in itertools.product((True, False), HOSTS):
        for number in range(1 + STRIDE_OFFSET % STRIDE, crews.operations[atomic_rename][host], STRIDE):
            wrong += crews.wrong(atomic_rename, {(host, number): kind})
            lives += 1
    record_property("uploads", lives)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("first", "second"), in_turn(PAIRS, len(PAIRS), [pytest.mark.slow]))
def test_an_upload_gets_there_whole_or_not_whatever_happens_twice(
    crews: Crews, first: str, second: str, record_property: Record
) -> None:
    wrong: list[Any] = []
    chosen = random.Random(f"{first} {second} {STRIDE_OFFSET}")
    for atomic_rename, one, other in itertools.product((True, False), HOSTS, HOSTS):
        for _ in range(4):
            operations = crews.operations[atomic_rename]
            here, there = chosen.randrange(1, operations[one]), chosen.randrange(1, operations[other])
            wrong += crews.wrong(atomic_rename, {(one, here): first, (other, there + (one == other) * here): second})
    record_property("uploads", 72)
    assert not wrong, "\n".join(wrong)
